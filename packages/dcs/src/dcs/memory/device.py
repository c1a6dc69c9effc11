"""A version staged on a device: copied there beside the work that goes on, and then one short copy away.

The host keeps the arena that was verified and is served to peers; the mirror is a second, flat buffer with
the same offsets. What the device has no memory for is staged on the host alone, and the reason is said.
"""

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from dcs.errors import Closed, Timeout
from dcs.layout import Layout

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegister's flags: for all contexts of the process; never written
_MOST_PINNED = 5  # regions of host memory; as many as a member has arenas
_SETTLE_SECONDS = 30.0  # for copies under way
_LOOK_SECONDS = 0.0005  # CUDA has no wait with a deadline, so its events are looked at this often


class DeviceMirror:
    """A flat buffer on `device` for one version, and its tensors. Make one with `allocate`.

    One thread at a time fills it. On a GPU the copies run on a stream of their own, so that the device's
    other work goes on; on a CPU (`device="cpu"`) they are plain copies.

    Attributes:
        flat: uint8 [nbytes], on the device.
        tensors: every tensor of the layout, in name order, as views of `flat`.
        unpinned: why host memory that was copied from is not pinned ("" when all of it is); such copies are
            about half as fast, and block.
    """

    def __init__(self, layout: Layout, flat: torch.Tensor) -> None:
        starts, self.nbytes = layout.offsets()
        self.layout = layout
        self.device = flat.device
        self.flat = flat
        self.tensors: dict[str, torch.Tensor] = {}
        for spec, start in zip(layout.tensors, starts, strict=True):
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self.tensors[spec.name] = flat[start : start + spec.nbytes].view(dtype).view(spec.shape)
        self.unpinned = ""
        self._pinned: dict[tuple[int, int], torch.Tensor] = {}
        self._refused: set[tuple[int, int]] = set()
        self._stream = torch.cuda.Stream(flat.device) if flat.is_cuda else None
        self._closed = False

    @classmethod
    def allocate(
        cls, layout: Layout, device: torch.device | str
    ) -> "tuple[DeviceMirror, str] | tuple[None, str]":
        """A mirror and "", or None and why there is none (then stage on the host)."""
        device = torch.device(device)
        if device.type not in ("cuda", "cpu"):
            return None, f"dcs stages on cuda or cpu, not on {device}"
        if device.type == "cuda" and not torch.cuda.is_available():
            return None, f"{device} was asked for, and torch finds no CUDA device here"
        _, nbytes = layout.offsets()
        try:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(device)
            return None, f"{device} has {free} of {total} bytes free, the layout needs {nbytes}"
        except RuntimeError as error:  # what torch raises on a CPU, or for a device that is not there
            return None, f"no {nbytes} bytes on {device}: {str(error).partition('\n')[0]}"
        return cls(layout, flat), ""

    def pin(self, host: torch.Tensor) -> str:
        """Page-lock `host` (uint8 [nbytes], such as an arena's), in place; "" or why it stays unpinned.

        Costs something the first time and nothing after that: arenas are used again. What is pinned is kept
        alive; of more than a few regions the one that was used longest ago is given up.
        """
        if self._stream is None or host.is_pinned() or not len(host):
            return ""
        region = (host.data_ptr(), len(host))
        if region in self._pinned:
            self._pinned[region] = self._pinned.pop(region)  # the newest
            return ""
        if region in self._refused:
            return self.unpinned
        cudart: Any = torch.cuda.cudart()
        codes = [int(cudart.cudaHostRegister(*region, _PORTABLE))]
        if codes[0]:  # another process's arena is mapped for reading only
            codes.append(int(cudart.cudaHostRegister(*region, _PORTABLE | _READ_ONLY)))
        if all(codes):
            with suppress(
                RuntimeError
            ):  # the runtime remembers its error for whoever comes next: let it be us
                torch.ones(1, device=self.device)
            self._refused.add(region)
            self.unpinned = f"cudaHostRegister of {len(host)} bytes gave errors {codes}"
            return self.unpinned
        self._pinned[region] = host
        if len(self._pinned) > _MOST_PINNED:
            self.unpin(next(iter(self._pinned.values())))
        return ""

    def unpin(self, host: torch.Tensor) -> None:
        """Undo `pin`, when copies are done; nothing when it was not pinned."""
        region = (host.data_ptr(), len(host))
        self._refused.discard(region)
        if self._pinned.pop(region, None) is not None:
            self.wait(_SETTLE_SECONDS)
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(region[0])

    def copy(self, host: torch.Tensor, start: int = 0, end: int | None = None) -> None:
        """Copy bytes `start` to `end` of `host` (uint8 [nbytes]) to the same place here.

        Returns when they are under way (unpinned or on a CPU: when they are there). `host` must stay as it is
        until `wait`. May be called for each chunk as soon as it is verified.
        """
        if self._closed:
            raise Closed("this mirror was closed")
        if host.dtype != torch.uint8 or host.dim() != 1 or len(host) != self.nbytes:
            raise ValueError(
                f"the mirror takes uint8 [{self.nbytes}] from the host, not {host.dtype} {list(host.shape)}"
            )
        end = self.nbytes if end is None else end
        if not 0 <= start <= end <= self.nbytes:
            raise ValueError(f"bytes {start} to {end} of {self.nbytes}")
        if self._stream is None:
            self.flat[start:end].copy_(host[start:end])
            return
        self.pin(host)
        with torch.cuda.stream(self._stream):
            self.flat[start:end].copy_(host[start:end], non_blocking=True)

    def wait(self, seconds: float) -> None:
        """Until all copies are there; then any stream may read `tensors`. Raises `Timeout`."""
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
            deadline, pause = time.monotonic() + seconds, threading.Event()
            while not event.query():
                if time.monotonic() > deadline:
                    raise Timeout(f"{self.nbytes} bytes were not copied to {self.device} in {seconds:g} s")
                pause.wait(_LOOK_SECONDS)

    def reuse(self) -> None:
        """Let later copies wait for what the current stream still reads from `tensors`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def close(self, seconds: float = _SETTLE_SECONDS) -> None:
        """Wait for copies under way and give the memory back, once nobody has views of it; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.wait(seconds)
        for host in list(self._pinned.values()):
            self.unpin(host)
        self.tensors = {}
        self.flat = self.flat[:0].clone()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
