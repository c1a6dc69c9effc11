"""The nccl side of a collective group: through two buckets on the device, between any kind of memory.

At the source a bucket goes host -> device -> nccl, at the others nccl -> device -> host (or to a buffer on
the device). Copies run on a stream of their own: they overlap with the broadcast of the bucket before.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch

from dcs.wire.rendezvous import Rendezvous, distributed

# By default torch ends the whole process when a collective fails or is late; this group reports it instead.
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NEVER = timedelta(days=7)  # the group's own deadline comes first
_environment = threading.Lock()


class NcclTransport:
    """See `Transport`. The communicator is made before it returns."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("nccl needs a GPU, and torch finds none here; use gloo")
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._rank = rendezvous.rank
        torch.cuda.set_device(self._device)  # of this thread; it belongs to the group
        with _settings():
            self._group = distributed.ProcessGroupNCCL(
                rendezvous.store, rendezvous.rank, rendezvous.size, _NEVER
            )
        self._copies = torch.cuda.Stream(self._device)
        self._bounce = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._turn = 0
        self._aborted = False
        self._cutting = threading.Lock()
        # The communicator is made by the first call. Everybody has just been seen in the store.
        self.start(torch.zeros(1, dtype=torch.uint8, device=self._device), 0, rendezvous.seconds)()

    def start(self, bucket: torch.Tensor, source: int, seconds: float) -> Callable[[], None]:
        """`seconds` is kept by the group, which cuts this transport when they are over.

        A bucket on the device is broadcast where it lies, without a bounce.
        """
        group = self._group
        if self._aborted or group is None:
            raise RuntimeError("the group was aborted")
        on_device = bucket if bucket.is_cuda else self._bounce_for(bucket)
        is_source = self._rank == source
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with torch.cuda.stream(self._copies):
            if is_source and on_device is not bucket:
                on_device.copy_(bucket, non_blocking=True)
            work = group.broadcast([on_device], options)  # on nccl's own stream, after the copy
        # Waited for on a stream of the bucket's own: the next copy to the device must not queue behind it.
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            work.wait()
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(side)

        def finish() -> None:
            arrived.synchronize()
            error = work.exception() if work.is_completed() else None
            if error is not None or self._aborted:
                raise RuntimeError(str(error or "the group was aborted"))
            if not is_source and on_device is not bucket:
                # Only what nccl has delivered is copied on, so that an abort cannot spoil the buffer later.
                with torch.cuda.stream(side):
                    bucket.copy_(on_device, non_blocking=True)
                    copied = torch.cuda.Event(blocking=True)
                    copied.record(side)
                copied.synchronize()

        return finish

    def _bounce_for(self, bucket: torch.Tensor) -> torch.Tensor:
        """In turn one of two buffers on the device. At most two buckets are under way: this one's is free."""
        place = self._turn % 2
        self._turn += 1
        if len(self._bounce[place]) < len(bucket):
            self._bounce[place] = torch.empty(len(bucket), dtype=torch.uint8, device=self._device)
        return self._bounce[place][: len(bucket)]

    def watched(self) -> Sequence[socket.socket]:
        return ()  # nccl's own threads watch their connections

    def cut(self) -> None:
        with self._cutting:
            if self._aborted or self._group is None:
                return
            self._aborted = True
            # ncclCommAbort may wait for the device: whoever cuts goes on.
            threading.Thread(target=self._group.abort, name="dcs-nccl-abort", daemon=True).start()

    def quiet(self) -> bool:
        return False  # until the thread has let go of the bucket itself

    def close(self) -> None:
        with self._cutting:
            group, self._group = self._group, None
        if group is not None and not self._aborted:
            group.shutdown()
        self._bounce = []


@contextmanager
def _settings() -> Iterator[None]:
    """The process's environment with `_SETTINGS`, for the moment in which torch reads it."""
    with _environment:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
