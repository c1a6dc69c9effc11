"""What the rank processes of these tests do. Each case takes JSON, and returns JSON on every rank."""

import contextlib
import dataclasses
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import seeing
import torch
from problem import SETTINGS, batches, batches_for, loss
from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.train.base import Packed
from relax.backends.train.megatron.rank import MegatronRank
from relax.backends.train.ranks import RankBackend, RankSpec
from relax.backends.train.registry import rank_backend
from relax.backends.train.settings import TrainerSettings
from relax.config.roles import ActorSettings
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.weights import WeightPublisher
from safetensors.torch import load_file, save_file
from torch import distributed


@contextlib.contextmanager
def rank_of(
    folder: str, actor: dict[str, Any], critic: bool = False, trains: bool = True, **settings: Any
) -> Iterator[MegatronRank]:
    spec = RankSpec(
        Path(folder),
        TrainerSettings(**{**SETTINGS, **settings}),
        ActorSettings(backend="megatron", **actor),
        seed=3,
        trains=trains,
    )
    rank = MegatronRank(spec, critic=critic)
    try:
        yield rank
    finally:
        rank.close()


def mine(rank: RankBackend, everything: list[Packed]) -> list[Packed]:
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
        work = mine(rank, batches_for(folder, 11, vocabulary))
        where = rank.coordinates
        before = rank.forward(work)
        found = rank.forward_backward(work, loss)
        # The gradient as the optimizer meets it: finished. Twice would add up twice, so the step has a copy.
        optimizer = rank._trained
        raw = [[buffer.grad_data.clone() for buffer in _buffers(chunk)] for chunk in optimizer._chunks]
        finalize_model_grads(optimizer._chunks)
        if not actor.get("megatron", {}).get("distributed_optimizer"):
            gathered(rank, _main_grads(rank), place / "grads")
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


def pictures_then_text(folder: str, actor: dict[str, Any], out: str, vocabulary: int) -> None:
    """A step with pictures and one without, by ranks of any backend; then the Hugging Face folder."""
    made = ActorSettings(**actor)
    settings: dict[str, Any] = {**SETTINGS}
    spec = RankSpec(Path(folder), TrainerSettings(**settings), made, seed=3)
    rank = rank_backend(made.backend)(spec)
    try:
        for work in seeing.pictures_then_text(vocabulary):
            rank.forward_backward(mine(rank, work), loss)
            rank.optim_step(1 / 40)
        Path(out).mkdir(exist_ok=True)
        distributed.barrier()
        rank.export(Path(out))
    finally:
        rank.close()


def _main_grads(rank: Any) -> dict[str, torch.Tensor]:
    trained = {name: part for name, part in rank._parameters.items() if part.requires_grad}
    return {name: parameter.main_grad.clone() for name, parameter in trained.items()}


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
            rank.forward_backward(mine(rank, batches_for(folder, 20 + step, vocabulary)), loss)
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


def save_and_export(folder: str, actor: dict[str, Any], out: str, vocabulary: int) -> dict[str, Any]:
    """A step, then a checkpoint and a Hugging Face folder of the same weights."""
    with rank_of(folder, actor) as rank:
        rank.forward_backward(mine(rank, batches_for(folder, 20, vocabulary)), loss)
        rank.optim_step(1 / 40)
        rank.save(Path(out) / "checkpoint")
        rank.export(Path(out) / "exported")
        return {}


def publish(folder: str, actor: dict[str, Any], out: str, vocabulary: int, endpoint: list[str]) -> None:
    """A step, an export of its weights, and a version of them that is taken before this returns."""
    with rank_of(folder, actor) as rank:
        rank.forward_backward(mine(rank, batches_for(folder, 20, vocabulary)), loss)
        rank.optim_step(1 / 40)
        rank.export(Path(out))
        at, tensors = rank.coordinates, dict(rank.tensors())
        publisher = WeightPublisher(
            Endpoint(*endpoint), "run", tensors, WeightSettings(), rank=at.rank, world_size=at.world_size,
            session="one", layout=rank.layout(),
        )  # fmt: skip
        try:
            publisher.freeze(0, tensors)
            publisher.settle()
            distributed.barrier()
        finally:
            publisher.close()


def _go_on(rank: MegatronRank, vocabulary: int) -> dict[str, Any]:
    work = mine(rank, batches_for(str(rank.folder), 40, vocabulary))
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


def _with_routes(work: list[Packed], experts: int, layers: int, top_k: int) -> list[Packed]:
    """Random routes; none for the last token of a row, nor for some others."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for batch in work:
        tokens = len(batch.tokens)
        choice = torch.rand(tokens, layers, experts, generator=generator).argsort(-1)[..., :top_k]
        choice[batch.offsets[1:] - 1] = -1
        choice[torch.rand(tokens, layers, generator=generator) < 0.1] = -1
        made.append(dataclasses.replace(batch, routes=choice.to(torch.int16)))
    return made


def replayed(folder: str, actor: dict[str, Any], out: str, vocabulary: int) -> dict[str, Any]:
    """Gradient under given routes; whether each layer of this rank used them where there are any."""
    from megatron.core.distributed import finalize_model_grads

    with rank_of(folder, actor) as rank:
        routing = rank._routing
        assert routing is not None
        given_routes = routing.experts, len(routing.layers), routing.top_k
        work = mine(rank, _with_routes(batches_for(folder, 11, vocabulary), *given_routes))
        rank.forward(work[:1])
        given = work[0].routes
        assert given is not None
        assert rank._replay is not None
        used = rank._replay.recorded()
        followed = {}
        for layer, chosen in used.items():
            if len(chosen) < len(given):
                continue  # this rank's router sees a part of the tokens
            wanted = given[:, routing.layers.index(layer)].long()
            mask = wanted[:, 0] >= 0
            followed[layer] = [bool((chosen[: len(wanted)][mask] == wanted[mask]).all()), int(mask.sum())]
        rank.forward([dataclasses.replace(work[0], routes=None)])
        live = {layer: bool((c[: len(given)] >= 0).all()) for layer, c in rank._replay.recorded().items()}
        rank.forward_backward(work, loss)
        finalize_model_grads(rank._trained._chunks)
        gathered(rank, _main_grads(rank), Path(out) / "grads")
        return {"followed": followed, "live": live}


def encoded(folder: str, actor: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """How many items this rank's encoder met in each call of both passes, and what is refused."""
    from relax.backends.train.errors import BatchError

    with rank_of(folder, actor) as rank:
        work = mine(rank, batches_for(folder, 11, vocabulary))
        met: list[int] = []
        (model, *_) = rank._models
        for encoder in getattr(model, "encoders", {}).values():
            encoder.register_forward_pre_hook(lambda _, given: met.append(len(given[0])))
        rank.forward(work)
        forward, met[:] = list(met), []
        rank.forward_backward(work, loss)
        rank.discard_gradient()
        refused = []
        for call in (rank.require_seen, lambda batch: rank.forward([batch])):
            rank.require_seen(work[0])
            try:
                call(dataclasses.replace(work[0], media=[*work[0].media[1:], *work[0].media[:1]]))
            except BatchError as raised:
                refused.append(str(raised))
        return {"forward": forward, "backward": met, "refused": refused}


def turned(folder: str, actor: dict[str, Any]) -> dict[str, Any]:
    """Rotary angles of three axes against transformers' own."""
    from relax.backends.models import load_config
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    positions = torch.tensor([[0, 1, 2, 2, 9], [0, 1, 3, 2, 9], [0, 1, 2, 5, 9]])
    theirs = Qwen3VLTextRotaryEmbedding(load_config(folder).text_config)
    cos, sin = theirs(torch.zeros(1), positions[:, None])
    with rank_of(folder, actor) as rank:
        angles = rank._models[0].rotary_pos_emb(positions, [])
        alike = rank._models[0].rotary_pos_emb(positions[:1], [])
        plain = rank._models[0].rotary_pos_emb(positions[:1].expand(3, -1), [])
    ours = torch.stack([angles.cos(), angles.sin()])[:, :, 0, 0]
    expected = torch.stack([cos, sin])[:, 0]
    return {
        "difference": float((ours - expected).abs().max()),
        "same": torch.equal(alike, plain),
        "axes": float((angles - plain).abs().max()),
    }


def turned_thd(folder: str, actor: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Megatron's own rotation of rows packed for Transformer Engine, against that of each own token alone."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import (
        _apply_rotary_pos_emb_bshd,
        _apply_rotary_pos_emb_thd,
    )
    from relax.backends.train.megatron import packing

    with rank_of(folder, actor) as rank:
        batch = batches_for(folder, 11, vocabulary)[0]
        shown = rank._read(batch)
        assert shown is not None
        packed = packing.sequence(
            batch, vocabulary=vocabulary, context=128, unsampled=None, multiple=1, thd=True,
            positions=shown.positions,
        )  # fmt: skip
        assert packed.ends is not None
        rotary = rank._models[0].rotary_pos_emb
        ranks: Any = parallel_state.get_context_parallel_group()
        states = torch.randn(len(packed.tokens), 2, 16)
        found = _apply_rotary_pos_emb_thd(
            states,
            packed.ends.cu_seqlens_q_padded,
            rotary(packed.position_ids, []),
            cp_group=ranks,
        )
        real = packed.tokens >= 0
        alone = rotary(shown.positions[:, packed.tokens[real]], [])
        expected = _apply_rotary_pos_emb_bshd(states[real][:, None], alone)[:, 0]
        text = rotary(torch.arange(len(alone))[None], [])
        return {
            "difference": float((found[real] - expected).abs().max()),
            "tokens": int(real.sum()),
            "matters": float((alone - text).abs().max()),
        }


def patience(folder: str, actor: dict[str, Any], seconds: float) -> float:
    """How long a collective of a group that Megatron made waits, in seconds."""
    from megatron.core import parallel_state

    settings: dict[str, Any] = {**SETTINGS}
    made = ActorSettings(backend="megatron", **actor)
    rank = MegatronRank(RankSpec(Path(folder), TrainerSettings(**settings), made, timeout=seconds))
    try:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    finally:
        rank.close()


def refused_actor(folder: str, actor: dict[str, Any]) -> dict[str, Any]:
    """What a rank that cannot be made says."""
    from relax.backends.train.errors import SettingsError, StateFileError, StateMismatchError

    try:
        with rank_of(folder, {key: value for key, value in actor.items() if key != "load"}) as rank:
            rank.load(Path(actor["load"]))
    except (SettingsError, StateFileError, StateMismatchError) as raised:
        return {"said": f"{type(raised).__name__}: {raised}"}
    return {"said": None}


def full_disk(folder: str, actor: dict[str, Any], out: str, vocabulary: int) -> dict[str, Any]:
    """A save that the disk has no room for, beside an older one."""
    from relax.backends.train.errors import StateFileError

    old, new = Path(out) / "old", Path(out) / "new"
    with rank_of(folder, actor) as rank:
        work = mine(rank, batches(6, vocabulary))
        rank.forward_backward(work, loss)
        rank.optim_step(1 / 40)
        rank.save(old)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            rank.save(new)
            said = None
        except StateFileError as raised:
            said = str(raised)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        distributed.barrier()
        rank.load(old)
        rank.save(new)  # the remains of the failed one are no hindrance
        return {"said": said, "steps": rank.steps, "left": sorted(path.name for path in Path(out).iterdir())}


def balanced(folder: str, actor: dict[str, Any], out: str, vocabulary: int, count: int) -> None:
    """The gradient that balancing losses alone give: the policy's loss is 0."""
    from megatron.core.distributed import finalize_model_grads

    def nothing(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(inputs.logprobs.sum() * 0.0, float(inputs.mask.sum()))

    with rank_of(folder, actor) as rank:
        rank.forward_backward(mine(rank, batches(12, vocabulary, count)), nothing)
        finalize_model_grads(rank._trained._chunks)
        gathered(rank, _main_grads(rank), Path(out) / "grads")


def unmapped(folder: str) -> str:
    """What a rank of the registered backend says of a model that it cannot build."""
    from relax.backends.train.errors import UntrainableModelError
    from relax.backends.train.megatron.bridge import megatron_rank

    actor = ActorSettings(backend="megatron", data_parallel=2)
    settings: dict[str, Any] = {**SETTINGS}
    try:
        megatron_rank(RankSpec(Path(folder), TrainerSettings(**settings), actor)).close()
    except UntrainableModelError as error:
        return str(error)
    return ""


def values(folder: str, actor: dict[str, Any], vocabulary: int, out: str) -> dict[str, Any]:
    """A critic: values at first, after steps towards a target, and after a checkpoint was loaded."""
    target = 0.7

    def error(inputs: LossInputs) -> LossOutputs:
        return LossOutputs((inputs.logprobs - target).square().sum(), float(len(inputs.logprobs)))

    with rank_of(folder, actor, critic=True, lr=3e-2, clip_grad_norm=None, weight_decay=0.0) as rank:
        work = mine(rank, batches_for(folder, 5, vocabulary))
        first = rank.forward(work)
        norms = []
        for _ in range(12):
            rank.forward_backward(work, error)
            norms.append(rank.optim_step(1 / 60).grad_norm)
        trained = rank.forward(work)
        names = sorted({piece.source for spec in rank.layout().tensors for piece in spec.pieces})
        rank.save(Path(out))
    with rank_of(folder, actor, critic=True) as rank:
        rank.load(Path(out))
        again = rank.forward(work)
    return {
        "first": _listed(first),
        "norm": norms[0],
        "trained": _listed(trained),
        "again": _listed(again),
        "names": names,
    }


def _listed(found: list[torch.Tensor] | None) -> list[list[float]] | None:
    return None if found is None else [part.tolist() for part in found]


def warm_up(folder: str, actor: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Supervised steps, then one of RL: its moments start afresh."""
    with rank_of(folder, actor) as rank:
        work = mine(rank, batches(6, vocabulary))
        count = sum(int(batch.fields["loss_mask"].sum()) for batch in batches(6, vocabulary))
        sums = [rank.supervised_step(work, 5e-3, count) for _ in range(6)]
        before = {name: tensor.clone() for name, tensor in rank.tensors()}
        rank.forward_backward(work, loss)
        stats = rank.optim_step(1 / 40)
        moved = max(float((tensor - before[name]).abs().max()) for name, tensor in rank.tensors())
        return {"sums": sums, "steps": rank.steps, "moved": moved, "lr": stats.lr}


def odd_steps(folder: str, actor: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """A dummy micro-batch adds nothing; a gradient that is not finite changes nothing; order is kept."""
    from relax.backends.train.errors import BatchError, StepOrderError

    def broken(inputs: LossInputs) -> LossOutputs:
        return LossOutputs((inputs.logprobs * float("nan")).sum(), 1.0)

    with rank_of(folder, actor) as rank:
        work = mine(rank, batches(8, vocabulary))
        before = {name: tensor.clone() for name, tensor in rank.tensors()}
        rank.forward_backward(work, broken)
        skipped = rank.optim_step(1 / 40)
        same = all(torch.equal(tensor, before[name]) for name, tensor in rank.tensors())
        refused = []
        foreign = dataclasses.replace(work[0], tokens=work[0].tokens + vocabulary)
        for call, error in (
            (lambda: rank.optim_step(1 / 40), StepOrderError),
            (lambda: rank.forward([]), BatchError),
            (lambda: rank.forward([foreign]), BatchError),
        ):
            try:
                call()
            except error as raised:
                refused.append(str(raised))
        masked = {**work[0].fields, "loss_mask": torch.zeros_like(work[0].fields["loss_mask"])}
        dummy = dataclasses.replace(work[0], fields=masked, dummy=True)
        plain = rank.forward_backward(work, loss)
        grads = [buffer.grad_data.clone() for chunk in rank._trained._chunks for buffer in _buffers(chunk)]
        rank.discard_gradient()
        filled = rank.forward_backward([*work, dummy], loss)
        others = [buffer.grad_data for chunk in rank._trained._chunks for buffer in _buffers(chunk)]
        difference = max(float((a - b).abs().max()) for a, b in zip(grads, others, strict=True))
        rank.discard_gradient()
        for batch in work:
            rank.forward_backward([batch], loss)
        others = [buffer.grad_data for chunk in rank._trained._chunks for buffer in _buffers(chunk)]
        apart = max(float((a - b).abs().max()) for a, b in zip(grads, others, strict=True))
        rank.discard_gradient()
        scores = rank.forward(work)
    with rank_of(folder, actor, trains=False) as rank:
        again = rank.forward(work)
        try:
            rank.forward_backward(work, loss)
        except StepOrderError as raised:
            refused.append(str(raised))
    return {
        "alike": _listed(scores) == _listed(again),
        "skipped": skipped.skipped,
        "steps": rank.steps,
        "same": same,
        "refused": refused,
        "difference": difference,
        "apart": apart,
        "counts": None if plain is None or filled is None else [plain.count, filled.count],
    }


def half(folder: str, actor: dict[str, Any], vocabulary: int, out: str) -> dict[str, Any]:
    """bfloat16 with float32 masters: an update too small for bfloat16 is kept, and survives a checkpoint."""
    with rank_of(folder, actor, lr=1e-5, clip_grad_norm=None) as rank:
        work = mine(rank, batches_for(folder, 9, vocabulary))
        for _ in range(3):
            rank.forward_backward(work, loss)
            rank.optim_step(1 / 40)
        rank.save(Path(out))
        after = _go_on(rank, vocabulary)
        kinds = sorted({str(tensor.dtype) for _, tensor in rank.tensors()})
    with rank_of(folder, actor, lr=1e-5, clip_grad_norm=None) as rank:
        rank.load(Path(out))
        again = _go_on(rank, vocabulary)
    return {"equal": after == again, "kinds": kinds, "norm": after["norm"]}


def run(line: str) -> str:
    """One request: {"case": ..., arguments}."""
    request = json.loads(line)
    return json.dumps(globals()[request.pop("case")](**request))


__all__ = ["load_file", "run"]
