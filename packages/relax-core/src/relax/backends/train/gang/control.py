"""The control group of a gang: torch.distributed's groups, and the collectives by which a verb travels.

The default group spans all ranks and belongs to the backend. Control has a gloo group of its own, on the CPU:
a header in msgpack and flat uint8 tensors, broadcast or sent, each under the group's deadline. Nothing is
pickled.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from relax.backends.train.gang.flat import flatten, unflatten

distributed: Any = torch.distributed  # its stubs do not know the stores

LOOPBACK = "lo"


def serve_store(host: str, timeout: float) -> tuple[Any, int]:
    """torch's key-value store, where the groups of all ranks meet, and the port it listens at on `host`
    alone.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = distributed.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's own would listen on every address
    )
    return store, port


def join_store(host: str, port: int, timeout: float) -> Any:
    """The leader's store, from another process."""
    return distributed.TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)


class Control:
    """One rank's part in the default group and in the control group.

    Args:
        store: where groups meet.
        rank, world_size: the rank's place.
        device: kind of device, `cpu` or `cuda`.
        timeout: seconds that a collective of either group may take.
        host: address of this rank; gloo speaks over loopback where that is one of it.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, device: str, timeout: float, host: str
    ) -> None:
        self.rank, self.world_size = rank, world_size
        limit = timedelta(seconds=timeout)
        with _interface(host):
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=distributed.PrefixStore("gang", store),
                rank=rank,
                world_size=world_size,
                timeout=limit,
            )
            self._group = distributed.new_group(backend="gloo", timeout=limit)

    # What the leader does

    def give(self, plain: Any, parts: Sequence[Any]) -> None:
        """Broadcast plain data, and send every rank its own part, which may hold tensors."""
        packed = [flatten(part) for part in parts]
        sizes = [(len(header), len(buffer)) for header, buffer in packed]
        header, _ = flatten({"plain": plain, "sizes": sizes})
        length = torch.tensor([len(header)])
        distributed.broadcast(length, 0, group=self._group)
        distributed.broadcast(_bytes(header), 0, group=self._group)
        sending = []
        for rank in range(1, self.world_size):
            head, buffer = packed[rank]
            full = [tensor for tensor in (_bytes(head), buffer) if len(tensor)]
            sending += [(tensor, distributed.isend(tensor, rank, group=self._group)) for tensor in full]
        for _, work in sending:
            work.wait()

    def collect(self) -> list[Any]:
        """What each rank from 1 on answers with `answer`."""
        answers = []
        for rank in range(1, self.world_size):
            sizes = torch.zeros(2, dtype=torch.int64)
            distributed.recv(sizes, rank, group=self._group)
            head, buffer = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
            for tensor in (head, buffer):
                if len(tensor):
                    distributed.recv(tensor, rank, group=self._group)
            answers.append(unflatten(head.numpy().tobytes(), buffer))
        return answers

    # What the others do

    def take(self) -> tuple[Any, Any]:
        """The plain data, and this rank's part."""
        length = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(length, 0, group=self._group)
        header = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(header, 0, group=self._group)
        told: Mapping[str, Any] = unflatten(header.numpy().tobytes(), torch.empty(0, dtype=torch.uint8))
        head, buffer = (torch.empty(size, dtype=torch.uint8) for size in told["sizes"][self.rank])
        for tensor in (head, buffer):
            if len(tensor):
                distributed.recv(tensor, 0, group=self._group)
        return told["plain"], unflatten(head.numpy().tobytes(), buffer)

    def answer(self, what: Any) -> None:
        """Answer the leader."""
        head, buffer = flatten(what)
        distributed.send(torch.tensor([len(head), len(buffer)]), 0, group=self._group)
        for tensor in (_bytes(head), buffer):
            if len(tensor):
                distributed.send(tensor, 0, group=self._group)

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _bytes(header: bytes) -> Tensor:
    return torch.frombuffer(bytearray(header), dtype=torch.uint8)


@contextlib.contextmanager
def _interface(host: str) -> Iterator[None]:
    """Have gloo's sockets on loopback for ranks of one machine, unless the user chose an interface."""
    name = "GLOO_SOCKET_IFNAME"
    if not host.startswith("127.") or name in os.environ:
        yield
        return
    os.environ[name] = LOOPBACK
    try:
        yield
    finally:
        del os.environ[name]
