"""Plain transformers in float64: what every split has to come to. Knows nothing of the backend."""

import math
from typing import Any

import hearing
import seeing
import torch
from problem import SETTINGS, batches_for, loss
from relax.algorithms.spec import LossInputs
from relax.backends.models import unsampled_tokens
from relax.backends.train.base import Packed
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)


def load(folder: str) -> torch.nn.Module:
    # The grouped kernels of experts know no float64.
    kind: Any = AutoModelForImageTextToText if seeing.sees(folder) else AutoModelForCausalLM
    if hearing.hears(folder):
        kind = Qwen3OmniMoeThinkerForConditionalGeneration
    return kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


def logprobs(model: Any, batch: Packed, temperature: float) -> Tensor:
    """Row by row, without padding or packing; 0 for a token that stands for media, which is never said."""
    found = []
    never = list(unsampled_tokens(model.config))
    for first, last, prompt, media in zip(
        batch.offsets[:-1].tolist(),
        batch.offsets[1:].tolist(),
        batch.prompt_lengths.tolist(),
        batch.media or [[]] * batch.rows,
        strict=True,
    ):
        row = batch.tokens[first:last]
        shown = (hearing if hasattr(model.config, "audio_config") else seeing).arguments(row, media)
        logits = model(input_ids=row[None], use_cache=False, **shown).logits[0].double() / temperature
        logits = logits.index_fill(1, torch.tensor(never, dtype=torch.int64), -torch.inf)
        scores = logits.log_softmax(-1)[prompt - 1 : -1]
        unsaid = torch.isin(row[prompt:], torch.tensor(never))
        said = row[prompt:].masked_fill(unsaid, seeing.START)
        found.append(scores.gather(1, said[:, None])[:, 0].masked_fill(unsaid, 0.0))
    return torch.cat(found)


def split(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers holds the experts of a layer in two tensors; on disk each has its own."""
    found = {}
    for name, tensor in named.items():
        head, fused, kind = name.rpartition(".experts.")
        if not fused:
            found[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            if kind == "down_proj":
                found[f"{head}.experts.{expert}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2)
                found[f"{head}.experts.{expert}.gate_proj.weight"] = gate
                found[f"{head}.experts.{expert}.up_proj.weight"] = up
    return found


def _is_frozen(name: str, parts: tuple[str, ...]) -> bool:
    if ".visual." not in name:
        return "language" in parts
    return ("projector" if "merger" in name else "vision") in parts


def one_step(
    folder: str, vocabulary: int, seed: int = 11, scale: float = 1 / 40, frozen: tuple[str, ...] = ()
) -> dict[str, dict[str, Tensor]]:
    model = load(folder)
    temperature = SETTINGS["temperature"]
    work = batches_for(folder, seed, vocabulary)
    every: dict[str, Any] = dict(model.named_parameters())
    named = {name: parameter for name, parameter in every.items() if not _is_frozen(name, frozen)}
    with torch.no_grad():
        scores = {f"before.{i}": logprobs(model, batch, temperature) for i, batch in enumerate(work)}
    total, count = 0.0, 0.0
    for batch in work:
        outputs = loss(
            LossInputs(
                logprobs(model, batch, temperature),
                batch.fields["rollout_logprobs"].double(),
                batch.fields["advantages"].double(),
                batch.fields["loss_mask"],
                batch.response_offsets,
            )
        )
        outputs.loss.backward()
        total += float(outputs.loss.detach())
        count += outputs.count
    grads = {name: parameter.grad.clone() for name, parameter in named.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values())) * scale
    factor = scale * min(1.0, SETTINGS["clip_grad_norm"] / norm)
    for parameter in named.values():
        parameter.grad.mul_(factor)
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": SETTINGS["weight_decay"]},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=SETTINGS["lr"], betas=(0.9, 0.95), eps=1e-8).step()
    with torch.no_grad():
        scores |= {f"after.{i}": logprobs(model, batch, temperature) for i, batch in enumerate(work)}
    return {
        "scores": scores,
        "grads": split(grads),
        "weights": split({name: parameter.detach().clone() for name, parameter in every.items()}),
        "sums": {"loss": torch.tensor(total), "count": torch.tensor(count), "norm": torch.tensor(norm)},
    }
