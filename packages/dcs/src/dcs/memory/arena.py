"""A flat buffer for one version of a model: one memfd, and every tensor of a layout as a view into it.

It is shared memory, so that other processes of the machine can map it (`Arena.map`) instead of copying it.
Buffers are reused from version to version: the first touch of a page costs more than the copy into it.
"""

import itertools
import mmap
import os
import warnings
from collections.abc import Mapping

import numpy as np
import torch
import xxhash

from dcs.errors import DcsError, LayoutMismatch, NoMemory
from dcs.layout import Layout, local, spec_of
from dcs.layout.tensors import FLOATING, TensorSpec
from dcs.memory import streaming

_BLOCK_BYTES = 256 << 10  # that are copied and then hashed, while they are in cache
_numbers = itertools.count(1)


class Arena:
    """Host memory for one version of a model.

    Attributes:
        tensors: every tensor of the layout, in name order, as views of the buffer.
        flat: the same bytes, uint8 [nbytes].
        memory: the same bytes.
        descriptor: of the memfd, -1 once closed.
        number: unique in this process.
        mapped: it belongs to another process and cannot be written.

    Raises `NoMemory`.
    """

    def __init__(self, layout: Layout) -> None:
        _, nbytes = layout.offsets()
        try:
            descriptor = os.memfd_create("dcs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NoMemory(
                f"no memory to stage {nbytes} bytes: {error}; free descriptors of this process, or raise"
                " their limit (ulimit -n)"
            ) from error
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
            mapping = mmap.mmap(descriptor, max(nbytes, 1))
        except OSError as error:
            os.close(descriptor)
            raise NoMemory(f"no memory to stage {nbytes} bytes: {error}") from error
        self._view(layout, nbytes, mapping, descriptor)
        self.mapped = False

    @classmethod
    def map(cls, layout: Layout, descriptor: int) -> "Arena":
        """Another process's arena of the same layout, read-only; takes the descriptor over.

        Raises `DcsError` when it is too small, and `NoMemory`.
        """
        _, nbytes = layout.offsets()
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            os.close(descriptor)
            raise DcsError(f"was given memory of {size} bytes, the layout needs {nbytes}")
        arena = cls.__new__(cls)
        try:
            mapping = mmap.mmap(descriptor, max(nbytes, 1), prot=mmap.PROT_READ)
        except OSError as error:
            os.close(descriptor)
            raise NoMemory(f"no memory to map {nbytes} bytes: {error}") from error
        arena._view(layout, nbytes, mapping, descriptor)
        arena.mapped = True
        return arena

    def _view(self, layout: Layout, nbytes: int, mapping: mmap.mmap, descriptor: int) -> None:
        self.layout = layout
        self.number = next(_numbers)
        self.nbytes = nbytes
        self.descriptor = descriptor
        self.flat = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        self.memory = memoryview(self.flat)
        with warnings.catch_warnings():
            # torch has no read-only tensors. Whoever writes to one of a mapped arena gets SIGSEGV, not a mix.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            flat = torch.from_numpy(self.flat)
        self.tensors: dict[str, torch.Tensor] = {}
        self._ends: list[int] = []
        starts, _ = layout.offsets()
        for spec, start in zip(layout.tensors, starts, strict=True):
            end = start + spec.nbytes
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self.tensors[spec.name] = flat[start:end].view(dtype).view(spec.shape)
            self._ends.append(end)

    def fill(self, tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> tuple[int, ...]:
        """Copy `tensors` in, cast to the layout's dtypes, and return the xxh3-64 of every chunk.

        What has been copied is hashed at once, block by block, while it is in cache. The tensors may lie on
        any device, be non-contiguous, share storage, or require gradients; they must have been checked with
        `check`.
        """
        hashes = _Hashes(chunk_bytes)
        loop = streaming.loaded() if self.nbytes >= streaming.WORTH_BYTES else None
        done = 0
        for (name, view), end in zip(self.tensors.items(), self._ends, strict=True):
            tensor = _values(tensors[name])
            start = end - view.nbytes
            hashes.add(self.memory[done:start])  # of the gap before it
            if streaming.is_plain(view, tensor):
                self._fill_plain(start, tensor, hashes, loop)
            else:
                view.copy_(tensor)
                hashes.add(self.memory[start:end])
            done = end
        hashes.add(self.memory[done:])
        return hashes.finish()

    def _fill_plain(
        self, start: int, tensor: torch.Tensor, hashes: "_Hashes", loop: streaming.Streaming | None
    ) -> None:
        """Copy and hash by blocks. What was copied past the caches is hashed where it came from."""
        source = tensor.reshape(-1).view(torch.uint8).numpy()
        target = self.flat[start : start + len(source)]
        for at in range(0, len(source), _BLOCK_BYTES):
            block = slice(at, at + _BLOCK_BYTES)
            if loop is None:
                np.copyto(target[block], source[block])
                hashes.add(memoryview(target[block]))
            else:
                loop.block(target[block], source[block])
                hashes.add(memoryview(source[block]))

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """`fill` without the hashes, which is a third cheaper."""
        streaming.copy((view, _values(tensors[name])) for name, view in self.tensors.items())

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether `tensors`, cast as `fill` would, are what is here, bit for bit."""
        return all(
            torch.equal(_bits(_values(tensors[name]).to("cpu", view.dtype)), _bits(view))
            for name, view in self.tensors.items()
        )

    def close(self) -> None:
        """Close the descriptor. The memory goes when the last view of it goes, here and elsewhere."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is here, apart from its gradients. Not by `no_grad`, which Ctrl-C may leave on for good."""
    return local(tensor).detach()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, which are equal where two NaNs are not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Hashes:
    """xxh3-64 of the chunks of a buffer, whose bytes are given from its start."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._held = 0  # bytes of the chunk at hand
        self._state = xxhash.xxh3_64()
        self._found: list[int] = []

    def add(self, memory: memoryview) -> None:
        """The next bytes."""
        while len(memory):
            room = self._chunk_bytes - self._held
            self._state.update(memory[:room])
            self._held += min(room, len(memory))
            memory = memory[room:]
            if self._held == self._chunk_bytes:
                self._close()

    def finish(self) -> tuple[int, ...]:
        """All hashes; the last chunk may be short."""
        if self._held:
            self._close()
        return tuple(self._found)

    def _close(self) -> None:
        self._found.append(self._state.intdigest())
        self._state.reset()
        self._held = 0


def _is_plainly(tensor: object, spec: TensorSpec) -> bool:
    """Whether it is just what the spec says; otherwise it may still be. As cheap as can be."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not (tensor.is_nested or tensor.is_meta)
        and tensor.shape == spec.shape
        and tensor.dtype is getattr(torch, spec.dtype)
        and tensor.layout is torch.strided
    )


def check(tensors: Mapping[str, torch.Tensor], layout: Layout, cast: bool = False) -> None:
    """Raise `LayoutMismatch` unless `tensors` are exactly those of `layout`.

    With `cast`, floating tensors may have another floating dtype than the layout names for the wire.
    """
    if not isinstance(tensors, Mapping):
        raise LayoutMismatch(
            f"a {type(tensors).__name__} was given, expected tensors by name: publish its state_dict()"
        )
    for spec in layout.tensors:
        tensor = tensors.get(spec.name)
        if _is_plainly(tensor, spec):
            continue
        if tensor is None:
            raise LayoutMismatch(
                f"tensor {spec.name!r} is absent, expected {spec}", spec.name, "absent", str(spec)
            )
        if tensor.is_meta or tensor.is_nested:
            kind = "a meta tensor" if tensor.is_meta else "nested"
            raise LayoutMismatch(
                f"tensor {spec.name!r} is {kind}, expected {spec} with values", spec.name, kind, str(spec)
            )
        got = spec_of(spec.name, local(tensor))
        castable = cast and {got.dtype, spec.dtype} <= set(FLOATING)
        if got.shape != spec.shape or (got.dtype != spec.dtype and not castable):
            raise LayoutMismatch(
                f"tensor {spec.name!r} is {got}, expected {spec}: publish what the layout was made from",
                spec.name,
                str(got),
                str(spec),
            )
    if len(tensors) != len(layout.tensors):
        name = sorted(tensors.keys() - {spec.name for spec in layout.tensors})[0]
        got = str(spec_of(name, tensors[name]))
        raise LayoutMismatch(
            f"tensor {name!r} is {got}, expected absent: the layout does not name it", name, got, "absent"
        )
