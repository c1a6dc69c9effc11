"""What the train part of the GPU check works on: sizes, a model, batches, and the distance of two answers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from relax.backends.train.base import Packed
from relax.backends.train.conformance import make_rows, pack


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a check.

    Attributes:
        model: of a Qwen3, as its config names them.
        compared: (prompt, response) lengths of the rows that are compared with the CPU.
        trained: of the rows of a training step.
        steps: optimizer steps, after the first.
        requests: that the engine serves together.
        prompt, answer: their tokens.
    """

    model: dict[str, Any]
    compared: list[tuple[int, int]]
    trained: list[tuple[int, int]]
    steps: int
    requests: int
    prompt: int
    answer: int


LARGE = Sizes(
    # Qwen3-0.6B
    model={
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    compared=[(32, 48), (7, 90), (64, 21), (1, 40)],
    trained=[(128, 384)] * 8,
    steps=6,
    requests=32,
    prompt=128,
    answer=128,
)
SMALL = Sizes(
    model={
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    },
    compared=[(5, 9), (1, 14), (9, 3)],
    trained=[(4, 20)] * 6,
    steps=4,
    requests=6,
    prompt=8,
    answer=12,
)


def write_model(folder: Path, sizes: Sizes, device: str) -> int:
    """A Qwen3 with random weights, in bfloat16 as they are published; its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes.model, tie_word_embeddings=True)).bfloat16()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def batch_of(sizes: Sizes, lengths: list[tuple[int, int]], seed: int) -> Packed:
    """Random rows; one advantage a row, +1 and -1 in turn, and every response token counts."""
    batch = pack(make_rows(sizes.model["vocab_size"], lengths, seed))
    answers = batch.response_offsets.diff()
    signs = torch.tensor([1.0 if row % 2 else -1.0 for row in range(batch.rows)])
    fields = {
        **batch.fields,
        "loss_mask": torch.ones_like(batch.fields["loss_mask"]),
        "advantages": torch.repeat_interleave(signs, answers),
    }
    return dataclasses.replace(batch, fields=fields)


def off_policy(batch: Packed, logprobs: torch.Tensor) -> Packed:
    """The batch as if another policy had sampled it: with ratios around 1, its loss depends on logprobs."""
    noise = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(4))
    return dataclasses.replace(
        batch, fields={**batch.fields, "rollout_logprobs": logprobs.cpu().float() + 0.05 * noise}
    )


def prompts(sizes: Sizes) -> list[np.ndarray]:
    """int32 [prompt] each."""
    random = np.random.default_rng(5)
    return [
        random.integers(0, sizes.model["vocab_size"], sizes.prompt, dtype=np.int32)
        for _ in range(sizes.requests)
    ]


def answered(asked: list[np.ndarray], given: list[np.ndarray], said: list[np.ndarray]) -> Packed:
    """Prompts and what an engine answered, with its logprobs, as a trainer takes them."""
    rows = [np.concatenate([prompt, answer]) for prompt, answer in zip(asked, given, strict=True)]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Packed(
        tokens=torch.from_numpy(np.concatenate(rows)).long(),
        offsets=offsets,
        prompt_lengths=torch.tensor([len(prompt) for prompt in asked]),
        fields={"rollout_logprobs": torch.from_numpy(np.concatenate(said))},
    )


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Mean and largest distance of two answers."""
    distance = (ours.cpu().double() - theirs.cpu().double()).abs()
    return float(distance.mean()), float(distance.max())
