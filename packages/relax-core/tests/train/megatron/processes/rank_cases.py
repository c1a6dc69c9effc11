"""What the rank processes of these tests do. Each case takes JSON, and returns JSON on every rank."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.train.base import Packed
from relax.backends.train.megatron.rank import MegatronRank
from relax.backends.train.ranks import RankSpec
from relax.backends.train.settings import TrainerSettings
from relax.config.roles import ActorSettings
from safetensors.torch import load_file, save_file
from torch import distributed

SETTINGS = {"lr": 1e-3, "temperature": 0.9, "weight_decay": 0.1, "clip_grad_norm": 0.5}


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
        value, count, {"ratio": (float((ratio * mask).sum()), count), "ratio_max": (float(ratio.max()), 1.0)}
    )


@contextlib.contextmanager
def rank_of(
    folder: str, actor: dict[str, Any], critic: bool = False, **settings: Any
) -> Iterator[MegatronRank]:
    spec = RankSpec(
        Path(folder),
        TrainerSettings(**{**SETTINGS, **settings}),
        ActorSettings(backend="megatron", **actor),
        seed=3,
    )
    rank = MegatronRank(spec, critic=critic)
    try:
        yield rank
    finally:
        rank.close()


def mine(rank: MegatronRank, everything: list[Packed]) -> list[Packed]:
    where = rank.coordinates
    return everything[where.data_rank :: where.data_size]


def gathered(rank: MegatronRank, local: dict[str, torch.Tensor], out: Path) -> None:
    """Write Hugging Face tensors made of every rank's boxes of `local`, if replicas agree."""
    from relax.backends.train.megatron.weights import sources_of

    boxes = [
        (piece.source, piece.shape, piece.start, piece.extent, _box(local[spec.name], piece))
        for spec in rank.layout().tensors
        for piece in sources_of(spec)
        if spec.name in local
    ]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, boxes)
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for source, shape, start, extent, box in (box for part in everyone for box in part):
        target = whole.setdefault(source, torch.zeros(shape))
        seen = written.setdefault(source, torch.zeros(shape, dtype=torch.bool))
        place = tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))
        if seen[place].any():
            difference = float((target[place] - box).abs().max())
            assert difference <= 1e-6 * max(1.0, float(box.abs().max())), (
                f"replicas of {source}: {difference}"
            )
        target[place], seen[place] = box, True
    assert all(seen.all() for seen in written.values())
    if distributed.get_rank() == 0:
        save_file(whole, out)
    distributed.barrier()


def _box(tensor: torch.Tensor, piece: Any) -> torch.Tensor:
    for dimension, (first, length) in enumerate(zip(piece.at, piece.own_extent, strict=True)):
        tensor = tensor.narrow(dimension, first, length)
    return tensor.reshape(piece.extent).clone().float()


def one_step(
    folder: str, actor: dict[str, Any], out: str, vocabulary: int, **settings: Any
) -> dict[str, Any]:
    """Logprobs, loss sums, finished gradient and the weights after a step, in files of `out`."""
    from megatron.core.distributed import finalize_model_grads

    place = Path(out)
    with rank_of(folder, actor, **settings) as rank:
        work = mine(rank, batches(11, vocabulary))
        where = rank.coordinates
        before = rank.forward(work)
        found = rank.forward_backward(work, loss)
        # The gradient as the optimizer meets it: finished. Twice would add up twice, so the step has a copy.
        optimizer = rank._trained
        raw = [[buffer.grad_data.clone() for buffer in _buffers(chunk)] for chunk in optimizer._chunks]
        finalize_model_grads(optimizer._chunks)
        if not actor.get("megatron", {}).get("distributed_optimizer"):
            gathered(
                rank, {name: p.main_grad.clone() for name, p in rank._parameters.items()}, place / "grads"
            )
        for chunk, copies in zip(optimizer._chunks, raw, strict=True):
            for buffer, copy in zip(_buffers(chunk), copies, strict=True):
                buffer.grad_data.copy_(copy)
        stats = rank.optim_step(1 / 40)
        after = rank.forward(work)
        gathered(rank, dict(rank.tensors()), place / "weights")
        if where.speaks:
            scores = {f"{kind}.{where.data_rank + index * where.data_size}": part
                      for kind, parts in (("before", before), ("after", after))
                      for index, part in enumerate(parts or [])}  # fmt: skip
            save_file(scores, place / f"scores.{where.data_rank}")
        return {
            "coordinates": [where.rank, where.data_rank, where.data_size, where.speaks],
            "loss": None if found is None else [float(found.loss), found.count, found.metrics],
            "stats": [stats.grad_norm, stats.lr, stats.skipped],
        }


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def names(folder: str, actor: dict[str, Any]) -> dict[str, Any]:
    """Whether the layout names exactly the parameters that there are, with their shapes."""
    with rank_of(folder, actor) as rank:
        held = {name: list(tensor.shape) for name, tensor in rank.tensors()}
        said = {spec.name: list(spec.shape) for spec in rank.layout().tensors}
        return {"held": held, "said": said}


def round_trip(folder: str, actor: dict[str, Any], out: str, limit: int | None = None) -> dict[str, Any]:
    """Hugging Face to megatron and back."""
    from relax.backends.train.megatron import export

    with rank_of(folder, actor) as rank:
        if limit is None:
            rank.export(Path(out))
        else:
            export.write(Path(out), source=rank.folder, layout=rank.layout(), tensors=rank._parameters,
                         device=rank.device, limit=limit)  # fmt: skip
        return {"files": sorted(path.name for path in Path(out).iterdir())}


def train_and_save(
    folder: str, actor: dict[str, Any], out: str, vocabulary: int, steps: int = 2, **settings: Any
) -> dict[str, Any]:
    """Train, save after `steps`, go on; logprobs at the save and the digest of weights at the end."""
    with rank_of(folder, actor, **settings) as rank:
        for step in range(steps):
            rank.forward_backward(mine(rank, batches(20 + step, vocabulary)), loss)
            rank.optim_step(1 / 40)
        rank.save(Path(out))
        return _go_on(rank, vocabulary)


def load_and_go_on(
    folder: str, actor: dict[str, Any], out: str, vocabulary: int, **settings: Any
) -> dict[str, Any]:
    with rank_of(folder, actor, **settings) as rank:
        torch.rand(3)
        rank.load(Path(out))
        return _go_on(rank, vocabulary)


def _go_on(rank: MegatronRank, vocabulary: int) -> dict[str, Any]:
    work = mine(rank, batches(40, vocabulary))
    scores = rank.forward(work)
    draw = torch.rand(4).tolist()
    rank.forward_backward(work, loss)
    stats = rank.optim_step(1 / 40)
    digest = {name: [float(t.double().sum()), float(t.double().abs().sum())] for name, t in rank.tensors()}
    return {
        "scores": None if scores is None else [part.tolist() for part in scores],
        "steps": rank.steps,
        "draw": draw,
        "norm": stats.grad_norm,
        "digest": digest,
    }


def run(line: str) -> str:
    """One request: {"case": ..., arguments}."""
    request = json.loads(line)
    return json.dumps(globals()[request.pop("case")](**request))


__all__ = ["load_file", "run"]
