"""Weights on a GPU, lent to another process of the same GPU: a CUDA-IPC handle travels, no byte of them does.

What torch.multiprocessing would put into a pickle is plain data (handles, sizes, offsets), so it is sent as a
msgspec struct and checked before CUDA sees it. The lender keeps its buffer until the borrower has dropped
every view of it; a borrower that is killed leaves torch's counter raised, and the lender's memory stays
allocated until the lender ends or calls `torch.cuda.ipc_collect()` after it has freed it.

SGLang takes the same handles inside its own call: `dcs.appliers.sglang` sends it CUDA tensors so.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch

from dcs.errors import DcsError, ProtocolError
from dcs.layout import Layout
from dcs.wire.machine import machine_id

_Handle = Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class Place(msgspec.Struct, frozen=True):
    """Where a process runs, as far as CUDA-IPC cares: `gpu` is the uuid of its device."""

    machine: _Text
    gpu: _Text


class Loan(msgspec.Struct, frozen=True):
    """A flat bucket of device memory that another process may map.

    Attributes:
        place: of the lender.
        layout: fingerprint of the layout whose tensors lie in the bucket, from its first byte on.
        start, nbytes: of the bucket within the storage.
        storage, storage_offset, storage_bytes: the allocation's handle, the storage's offset in it, its size.
        counter, counter_offset: torch's reference counter, in shared memory.
        event, wait: the CUDA event to wait for before the first read, if any.
    """

    place: Place
    layout: _Text
    start: _Size
    nbytes: _Size
    storage: _Handle
    storage_offset: _Size
    storage_bytes: _Size
    counter: _Handle
    counter_offset: _Size
    event: Annotated[bytes, msgspec.Meta(max_length=4096)]
    wait: bool

    def __post_init__(self) -> None:
        if self.start + self.nbytes > self.storage_bytes:
            raise ValueError(
                f"bytes {self.start} to {self.start + self.nbytes} of a storage of {self.storage_bytes}"
            )


@dataclass(frozen=True)
class Borrowed:
    """A lender's bucket, mapped here: drop `flat` and `tensors` to give it back."""

    flat: torch.Tensor
    tensors: dict[str, torch.Tensor]


def here(device: torch.device | str) -> Place:
    """This process's place; raises `DcsError` with `probe`'s words where there is no such GPU."""
    if reason := probe(device):
        raise DcsError(f"no CUDA-IPC on {device}: {reason}")
    return Place(machine_id(), _uuid(torch.device(device)))


def probe(device: torch.device | str, peer: Place | None = None) -> str:
    """Why memory cannot be lent from or to `device` (and `peer`), in words; "" when it can."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    if (device.index or 0) >= torch.cuda.device_count():
        return f"{device} does not exist, there are {torch.cuda.device_count()} here"
    if _expandable():
        return (
            "PYTORCH_CUDA_ALLOC_CONF asks for expandable_segments, whose memory has no plain CUDA-IPC handle;"
            " leave that out in the process that lends"
        )
    if peer is not None:
        if peer.machine != machine_id():
            return "the peer is on another machine, or of another user or network namespace"
        if peer.gpu != _uuid(device):
            return f"the peer is on GPU {peer.gpu}, this process on {_uuid(device)}"
    return ""


def lend(flat: torch.Tensor, layout: Layout) -> Loan:
    """Offer `flat` (uint8 [nbytes], on a GPU, laid out as `layout`) to one borrower.

    A loan is for one `borrow`: each borrower gets its own. Keep `flat` until it has been given back. Raises
    `DcsError` where CUDA-IPC does not work, ValueError for another kind of tensor.
    """
    _, nbytes = layout.offsets()
    if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous() or len(flat) < nbytes:
        raise ValueError(
            f"a loan is a contiguous uint8 [{nbytes}] for this layout, not {flat.dtype} {list(flat.shape)}"
        )
    place = here(flat.device)
    storage: Any = flat.untyped_storage()
    # What reduce_tensor of torch.multiprocessing puts into its pickle.
    try:
        shared = storage._share_cuda_()
    except RuntimeError as error:
        raise DcsError(f"{len(flat)} bytes on {flat.device} cannot be lent: {error}") from error
    _, handle, storage_bytes, storage_offset, counter, counter_offset, event, wait = shared
    return Loan(
        place,
        layout.fingerprint,
        int(flat.storage_offset()),
        nbytes,
        bytes(handle),
        storage_offset,
        storage_bytes,
        bytes(counter),
        counter_offset,
        bytes(event),
        bool(wait),
    )


def encode(loan: Loan) -> bytes:
    """The bytes of a loan, for a socket."""
    return msgspec.msgpack.encode(loan)


def decode(body: bytes) -> Loan:
    """Raises `ProtocolError` for what is no loan, or reaches beyond its own storage; never anything else."""
    try:
        return msgspec.msgpack.decode(body, type=Loan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(body)} bytes that are no CUDA-IPC loan: {error}") from error


def borrow(loan: Loan, layout: Layout, device: torch.device | str) -> Borrowed:
    """Map a lender's bucket into this process.

    Raises `DcsError` when it was made for another layout, with `probe`'s words, or with CUDA's, as when the
    lender is gone.
    """
    device = torch.device(device)
    if loan.layout != layout.fingerprint:
        raise DcsError(f"the loan is of layout {loan.layout}, expected {layout.fingerprint}")
    starts, nbytes = layout.offsets()
    if loan.nbytes != nbytes:
        raise DcsError(f"the loan has {loan.nbytes} bytes, its layout needs {nbytes}")
    if reason := probe(device, loan.place):
        raise DcsError(f"no CUDA-IPC to {device}: {reason}")
    storages: Any = torch.UntypedStorage
    try:
        storage = storages._new_shared_cuda(
            device.index or 0,
            loan.storage,
            loan.storage_bytes,
            loan.storage_offset,
            loan.counter,
            loan.counter_offset,
            loan.event,
            loan.wait,
        )
    except RuntimeError as error:
        raise DcsError(f"{loan.nbytes} bytes cannot be borrowed on {device}: {error}") from error
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    flat = whole[loan.start : loan.start + nbytes]
    tensors: dict[str, torch.Tensor] = {}
    for spec, start in zip(layout.tensors, starts, strict=True):
        dtype: torch.dtype = getattr(torch, spec.dtype)
        tensors[spec.name] = flat[start : start + spec.nbytes].view(dtype).view(spec.shape)
    return Borrowed(flat, tensors)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _expandable() -> bool:
    settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return any("expandable_segments:true" in setting.replace(" ", "").lower() for setting in settings)
