"""One rank of `torch_native`: FSDP2 shards, or a whole replica whose gradients are added up.

Gradients are summed over ranks, never averaged: the loss sums of all of them are divided once.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dcs
import torch
import torch.distributed
from torch import Tensor

from relax.algorithms.spec import LossOutputs
from relax.backends.models import torch_dtype
from relax.backends.train.base import LossFn, Packed, StepStats
from relax.backends.train.errors import StateMismatchError
from relax.backends.train.ranks import Coordinates, RankSpec
from relax.backends.train.state_files import read_from
from relax.backends.train.sums import add
from relax.backends.train.torch_native.hf_files import write_together
from relax.backends.train.torch_native.masters import local
from relax.backends.train.torch_native.replica import Replica
from relax.backends.train.torch_native.shard_files import Box, Parts, is_sharded, write_part
from relax.backends.train.torch_native.sharded import Sharded
from relax.backends.train.torch_native.trainer import POLICY, RNG, WARMUP, WEIGHT, options_of

distributed: Any = torch.distributed


class NativeRank:
    """One of `data_parallel` ranks; all of them hold the model once together (FSDP2), or once each."""

    def __init__(self, spec: RankSpec) -> None:
        actor = spec.actor
        rank, size = distributed.get_rank(), distributed.get_world_size()
        self._coordinates = Coordinates(rank, size, data_rank=rank, data_size=size, speaks=True)
        self._sharded = actor.fsdp and size > 1
        dtype = torch_dtype(actor.dtype)
        kind: type[Replica] = Replica
        if self._sharded:
            # Sharded weights are stepped in float32, and gathered in the dtype they are used in.
            kind = type("Sharded", (Sharded,), {"compute_dtype": dtype})
            dtype = torch.float32 if actor.master_weights else dtype
        self._trainer = kind(
            spec.folder,
            settings=spec.settings,
            dtype=dtype,
            device=spec.device,
            seed=spec.seed,
            torch_threads=spec.torch_threads,
            options=options_of(actor),
        )

    @property
    def coordinates(self) -> Coordinates:
        return self._coordinates

    def forward(self, batches: Sequence[Packed]) -> list[Tensor]:
        return [self._trainer.forward(batch) for batch in batches]

    def forward_backward(self, batches: Sequence[Packed], loss: LossFn) -> LossOutputs:
        return add([self._trainer.forward_backward(batch, loss) for batch in batches])

    def optim_step(self, scale: float) -> StepStats:
        return self._trainer.optim_step(scale)

    def discard_gradient(self) -> None:
        self._trainer.discard_gradient()

    def supervised_step(self, batches: Sequence[Packed], lr: float, count: int) -> float:
        total = sum(self._trainer.supervised_backward(batch) for batch in batches)
        self._trainer.supervised_finish(lr, count, total / count)
        return total

    # Shards

    def layout(self) -> dcs.Layout:
        """What `tensors` holds: DTensors are boxes; of replicas, every rank offers some tensors whole."""
        held = dict(self._trainer.base_tensors())
        if not self._sharded:
            own = set(self._share(held))
            return dcs.layout.of({name: tensor for name, tensor in held.items() if name in own})
        return dcs.layout.of({name: tensor for name, tensor in held.items() if local(tensor).numel()})

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        merged = dict(self._trainer.tensors())
        if not self._sharded:
            return [(name, merged[name]) for name in self._share(merged)]
        return [(name, local(tensor)) for name, tensor in merged.items() if local(tensor).numel()]

    def _share(self, held: Mapping[str, Tensor]) -> list[str]:
        """The tensors that this replica offers, each of them once; the largest to whom has least."""
        loads = [0] * self._coordinates.world_size
        own = []
        for name in sorted(held, key=lambda name: (-held[name].nbytes, name)):
            rank = loads.index(min(loads))
            loads[rank] += held[name].nbytes
            if rank == self._coordinates.rank:
                own.append(name)
        return own

    # State

    def save(self, folder: Path) -> None:
        """Write this rank's part: its shards, or the tensors that it offers of replicas."""
        self._trainer.require_no_gradient("save")
        folder.mkdir(parents=True, exist_ok=True)
        rank, size = self._coordinates.rank, self._coordinates.world_size
        names = self._trainer.saved_weights()
        own = {name for place, name in enumerate(sorted(names)) if place % size == rank}
        random = torch.get_rng_state()
        tensors = {f"{RNG}.{rank}.torch": random}
        boxes = {f"{RNG}.{rank}.torch": Box(tuple(random.shape), (0,))}
        for key, tensor, box in self._trainer.parts(own.__contains__):
            tensors[key], boxes[key] = tensor, box
        write_part(folder, rank, size, tensors, boxes, self._trainer.data)

    def load(self, folder: Path) -> None:
        """Go on from what any number of ranks wrote; bit for bit where there were as many."""
        with read_from(folder):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        if not is_sharded(folder):
            self._trainer.load_whole(folder)
            return
        rank = self._coordinates.rank
        parts = Parts(folder, rank, self._coordinates.world_size)
        own = f"{RNG}.{rank}.torch"
        random = parts.read(own if own in parts.names() else f"{RNG}.0.torch")
        named: dict[str, dict[str, Tensor]] = {WEIGHT: {}, POLICY: {}, WARMUP: {}}
        for key in parts.names():
            part, _, name = key.partition(".")
            if part == RNG:
                continue
            if part not in named:
                raise StateMismatchError(f"state tensor {key!r} belongs to none of {sorted(named)}")
            named[part][name] = self._trainer.own_box(key, parts.shape(key), parts.read)
        self._trainer.take(parts.data, named, random)

    def export(self, folder: Path) -> None:
        """Every rank writes the Hugging Face tensors it is given, layer by layer; rank 0 the config."""
        write_together(
            folder,
            self._trainer.model,
            self._trainer.whole_tensors(),
            self._coordinates,
        )

    def close(self) -> None:
        """Nothing is held but memory."""
