"""New weights into the tensors of this process, in place."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from dcs.appliers.names import NameMap, SameNames
from dcs.appliers.version import Applied, Version, check, in_dtype
from dcs.errors import ApplyFailed, LayoutMismatch
from dcs.layout import Layout, of
from dcs.memory import streaming

_SAME = SameNames()


class StateDictApplier:
    """Copies every version into the parameters and persistent buffers of a module, or into a dict of tensors.

    Nobody may compute with the tensors meanwhile: give the `lock` that the engine computes under, or call
    the applier between two steps. Names that share a tensor (a tied `lm_head.weight`) count once, under the
    first of them. CUDA targets are waited for, so that the copies are done when the call returns.

    Args:
        target: the module, or tensors by name; the tensors are the ones there are now (a parameter that is
            replaced later is not followed).
        names: how published names differ from those of `target`.
        dtype: in which floating tensors are published, when that is not their own dtype here; they are cast
            while they are copied. Without it another dtype is refused.
        layout: for a target that holds parts of tensors: names, shapes and dtypes as without it, plus the
            pieces (`dcs.layout.of(..., pieces=...)`).
        lock: entered for the pause.

    Attributes:
        layout: what to give `Subscriber(layout=...)`.
        usable: False after an error in the middle of a version.
        last: what the newest version cost, or None.

    Raises:
        LayoutMismatch: the target, or `layout`, cannot be filled.
    """

    def __init__(
        self,
        target: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        names: NameMap = _SAME,
        dtype: torch.dtype | None = None,
        layout: Layout | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        named = target.state_dict() if isinstance(target, torch.nn.Module) else target
        self._targets: dict[str, torch.Tensor] = {}
        seen = set[object]()
        for name, tensor in named.items():
            if tensor.is_meta:
                raise LayoutMismatch(f"tensor {name!r} is on the meta device and holds nothing", name, "meta")
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel() and place in seen:
                continue
            seen.add(place)
            self._targets[names.published(name)] = tensor.detach()
        own = in_dtype(of(self._targets), dtype)
        self.layout = own if layout is None else layout
        if _shapes(self.layout) != _shapes(own):
            differing = sorted(_shapes(self.layout) ^ _shapes(own))[0]
            raise LayoutMismatch(
                f"the layout given is not the target's: they differ in {differing}", differing[0]
            )
        self.usable = True
        self.last: Applied | None = None
        self._lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self._devices = {tensor.device for tensor in self._targets.values() if tensor.is_cuda}

    def __call__(self, version: Version) -> None:
        """Copy a version in.

        Raises:
            LayoutMismatch: it does not fit; the old weights are whole.
            ApplyFailed: an error in the middle, now or in an earlier call; the target is neither old nor new.
        """
        began = perf_counter()
        if not self.usable:
            raise ApplyFailed(
                "an earlier version failed half way, so these tensors must not be used; load them anew"
            )
        nbytes = check(version, self.layout, "the target")
        with self._lock:
            paused = perf_counter()
            self.usable = False
            try:
                streaming.copy((own, version.tensors[name].detach()) for name, own in self._targets.items())
                for device in self._devices:
                    torch.cuda.synchronize(device)
            except Exception as error:
                raise ApplyFailed(
                    f"version {version.version} failed half way, so these tensors must not be used: {error!r}"
                ) from error
            self.usable = True
            done = perf_counter()
        self.last = Applied(version.version, version.epoch, nbytes, done - began, done - paused)


def _shapes(layout: Layout) -> set[tuple[str, str]]:
    return {(spec.name, f"{spec.dtype}{list(spec.shape)}") for spec in layout.tensors}
