"""Of some weights only an adapter is trained: the base travels once, versions are two small matrices a layer.

An engine is given whole tensors as ever: they are merged in the process that follows the versions for it,
which keeps the base. So any engine that takes tensors takes adapters.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import dcs

from relax.config.lora import LoraSettings
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.weights import POLL_SECONDS, LivePublisher, Updatable, Update, subscribe

if TYPE_CHECKING:
    from torch import Tensor

_FIRST, _SECOND, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


def base_run(run: str) -> str:
    """Name of the run whose only version is the base."""
    return f"{run}.base"


class AdapterPublisher:
    """The actor's side: publishes the base with the first version.

    Args:
        base: the weights by Hugging Face name, without adapters.
        matrices: `X.lora_A.weight` and `X.lora_B.weight` of each layer X with an adapter.
        dtype: that engines compute in, in which the base travels; the matrices keep theirs.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run: str,
        base: "Callable[[], Iterable[tuple[str, Tensor]]]",
        matrices: "Callable[[], Iterable[tuple[str, Tensor]]]",
        settings: WeightSettings,
        dtype: str,
    ) -> None:
        self._versions = LivePublisher(endpoint, run, matrices, settings)
        try:
            self._base = LivePublisher(endpoint, base_run(run), base, settings, dtype)
        except BaseException:
            self._versions.close()
            raise
        self._sent = False

    @property
    def away(self) -> frozenset[str]:
        return self._versions.away

    @away.setter
    def away(self, names: frozenset[str]) -> None:
        self._versions.away = self._base.away = names

    def publish(self, version: int) -> dcs.Stats | None:
        if not self._sent:
            self._base.publish(0)
            self._sent = True
        return self._versions.publish(version)

    def settle(self) -> dcs.Stats | None:
        return self._versions.settle()

    def close(self) -> None:
        self._versions.close()
        self._base.close()


class MergingEngine:
    """An engine whose versions come as adapters; it takes them merged, on a base that is fetched once."""

    def __init__(
        self,
        engine: Updatable,
        endpoint: Endpoint,
        run: str,
        name: str,
        layout: dcs.Layout,
        settings: WeightSettings,
        lora: LoraSettings,
    ) -> None:
        self._engine = engine
        self._source = (endpoint, base_run(run), name, layout, settings)
        self._lora = lora
        self._base: dict[str, Tensor] | None = None

    async def begin_update(self, version: int, tensors: "Mapping[str, Tensor]") -> None:
        if self._base is None:
            self._base = await asyncio.to_thread(self._fetch)
        merged = await asyncio.to_thread(merge_all, self._base, tensors, self._lora)
        await self._engine.begin_update(version, merged)

    async def commit_update(self, version: int) -> Update:
        return await self._engine.commit_update(version)

    def _fetch(self) -> "dict[str, Tensor]":
        subscriber = subscribe(*self._source)
        try:
            staged = None
            while staged is None:
                staged = subscriber.next(after=-1, timeout=POLL_SECONDS)
            base = {name: tensor.clone() for name, tensor in staged.tensors.items()}
            staged.ack(0.0)
            return base
        finally:
            subscriber.close()


def adapted(layout: dcs.Layout, lora: LoraSettings) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the matrices that adapters of an engine's weights have."""
    found: dict[str, tuple[int, ...]] = {}
    for spec in layout.tensors:
        layer = spec.name.removesuffix(_WEIGHT)
        if spec.name.endswith(_WEIGHT) and layer.rpartition(".")[2] in lora.targets and len(spec.shape) == 2:
            rows, columns = spec.shape
            found[layer + _FIRST] = (lora.rank, columns)
            found[layer + _SECOND] = (rows, lora.rank)
    return found


def adapter_layout(layout: dcs.Layout, lora: LoraSettings) -> dcs.Layout:
    """What an engine whose weights have a layout asks for."""
    import torch

    shapes = adapted(layout, lora)
    return dcs.layout.of({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def merge_all(
    base: "Mapping[str, Tensor]", matrices: "Mapping[str, Tensor]", lora: LoraSettings
) -> "dict[str, Tensor]":
    """The weights of a version from the base and its matrices."""
    scale = lora.alpha / lora.rank
    merged = dict(base)
    for name, first in matrices.items():
        if name.endswith(_FIRST):
            layer = name.removesuffix(_FIRST)
            weight = layer + _WEIGHT
            merged[weight] = merge(base[weight], first, matrices[layer + _SECOND], scale)
    return merged


def merge(weight: "Tensor", first: "Tensor", second: "Tensor", scale: float) -> "Tensor":
    """weight + scale * second @ first, in the weight's dtype."""
    return weight + (scale * (second @ first)).to(weight.dtype)
