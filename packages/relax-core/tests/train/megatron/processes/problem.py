"""The batch and the loss that every split and the oracle work on. Imports nothing of the backend."""

import hearing
import seeing
import torch
from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.train.base import Packed

SETTINGS = {"lr": 1e-3, "temperature": 0.9, "weight_decay": 0.1, "clip_grad_norm": 0.5}


def batches_for(folder: str, seed: int, vocabulary: int, count: int = 4) -> list[Packed]:
    """With media for a model that sees or hears."""
    kind = hearing.batches if hearing.hears(folder) else seeing.batches if seeing.sees(folder) else batches
    return kind(seed, vocabulary, count)


def batches(seed: int, vocabulary: int, count: int = 4) -> list[Packed]:
    """Micro-batches of different lengths, some of their response tokens not marked."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [((5, 4), (3, 6), (7, 2)), ((2, 9),), ((4, 3), (6, 5)), ((3, 3), (1, 7), (2, 2), (8, 1))]
    made = []
    for rows in (shapes[index % len(shapes)] for index in range(count)):
        lengths = torch.tensor([prompt + response for prompt, response in rows])
        responses = sum(response for _, response in rows)
        made.append(
            Packed(
                torch.randint(0, vocabulary, (int(lengths.sum()),), generator=generator),
                torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
                torch.tensor([prompt for prompt, _ in rows]),
                {
                    "loss_mask": (torch.rand(responses, generator=generator) < 0.8).to(torch.uint8),
                    "rollout_logprobs": -4 * torch.rand(responses, generator=generator),
                    "advantages": torch.randn(responses, generator=generator),
                },
            )
        )
    return made


def loss(inputs: LossInputs) -> LossOutputs:
    """A ratio loss, over whole rows as well: its gradient at a token depends on others."""
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(max=1.0).exp()
    mask = inputs.mask.to(ratio.dtype)
    rows = torch.stack(
        [
            (inputs.logprobs[first:last] * mask[first:last]).sum()
            for first, last in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True)
        ]
    )
    value = -(ratio * inputs.advantages * mask).sum() + 0.01 * rows.square().sum()
    count = float(mask.sum())
    return LossOutputs(
        value,
        count,
        {
            "ratio": (float((ratio.detach() * mask).sum()), count),
            "ratio_max": (float(ratio.detach().max()), 1.0),
        },
    )
