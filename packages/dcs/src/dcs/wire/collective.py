"""Broadcast through torch.distributed, in groups that are thrown away when a peer dies.

A group belongs to nobody but dcs: it is made from the backend's own class on a store of ours, so the default
process group of the process, the trainer's, is neither used nor made. All calls into torch are made by one
daemon thread of the group, and the caller waits for that thread under a deadline, with an eye on the
connections to the peers. Whatever torch does, the caller goes on.
"""

import atexit
import os
import re
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import ClassVar, Literal, Protocol, Self

import torch

from dcs.errors import Closed, DcsError
from dcs.wire.rendezvous import CollectiveStore as CollectiveStore
from dcs.wire.rendezvous import Rendezvous

BUCKET_BYTES = 64 << 20
_IN_FLIGHT = 2  # buckets: one is being moved while the next one is being set up
_HANGUP_SECONDS = 1.0  # for the next bucket to come once a peer's connection is closed
_SETTLE_SECONDS = 5.0  # for the backend to let go of a buffer after its deadline
_JOIN_SECONDS = 1.0
_OWN_SHARE = 0.9
_CLOSED = "it was closed"


class CollectiveBroken(DcsError):
    """A collective group lost a peer, passed its deadline or was aborted; it cannot be used any more.

    What the buffer holds may be torn: keep what its hashes confirm, and pull the rest over another wire.

    Attributes:
        rank, size: of the member that reports it.
        bucket: the first bucket that is not known to have arrived; -1 when the group was being made.
        cause: what happened, in words.
        quiet: nothing writes to the buffer any more. When False (a backend that did not react to its abort),
            the buffer must be given up, not used again.
    """

    code: ClassVar[str] = "collective"

    def __init__(self, key: str, rank: int, size: int, bucket: int, cause: str, quiet: bool = True) -> None:
        where = "while it was made" if bucket < 0 else f"in bucket {bucket}"
        super().__init__(
            f"collective group {key!r} broke {where}, at rank {rank} of {size}: {cause}; make a new group of"
            " the members that live, and pull what is missing over tcp"
        )
        self.rank, self.size, self.bucket, self.cause, self.quiet = rank, size, bucket, cause, quiet


_held_back: list[tuple[threading.Thread, float]] = []  # by torch, and until when at the latest


_live: weakref.WeakSet["Group"] = weakref.WeakSet()


@atexit.register
def _wait_for_held_back() -> None:
    """A thread that is still inside torch when the interpreter ends would take the process down (SIGABRT)."""
    for group in list(_live):
        group.close()
    for thread, until in _held_back:
        thread.join(max(0.0, until - time.monotonic()))


class Transport(Protocol):
    """One backend's side of a group. `cut`, `watched`, `quiet` are for any thread, the rest for its own."""

    def start(self, bucket: torch.Tensor, source: int, seconds: float) -> Callable[[], None]:
        """Begin to broadcast a bucket; the function returned waits for it and raises RuntimeError."""
        ...

    def watched(self) -> Sequence[socket.socket]:
        """Connections to peers whose end means that the peer is gone."""
        ...

    def cut(self) -> None:
        """End what is under way, from any thread; idempotent."""
        ...

    def quiet(self) -> bool:
        """After `cut`: nothing can be written to a bucket any more, even if a call has not returned."""
        ...

    def close(self) -> None:
        """Give everything back; may wait for what was not cut."""
        ...


class _Bell:
    """Wakes a thread that polls; ringing it after it was closed does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def still(self) -> None:
        if self.descriptor >= 0:
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1


class _Job:
    """A broadcast that the group's thread carries out; `done` only grows."""

    def __init__(self, buckets: Sequence[torch.Tensor], source: int, deadline: float) -> None:
        self.buckets, self.source, self.deadline = buckets, source, deadline
        self.done = self.reported = 0  # buckets
        self.error = ""  # in words: the frames of an exception would keep the backend's threads alive
        self.ended = threading.Event()  # the thread has let go of the buckets

    def run(self, transport: Transport, bell: _Bell) -> None:
        try:
            waiting: deque[Callable[[], None]] = deque()
            try:
                for bucket in self.buckets:
                    if len(waiting) == _IN_FLIGHT:
                        self._finish(waiting.popleft(), bell)
                    seconds = max(self.deadline - time.monotonic(), 0.001)
                    waiting.append(transport.start(bucket, self.source, seconds))
                while waiting:
                    self._finish(waiting.popleft(), bell)
            except (RuntimeError, OSError) as error:
                self.error = _words(error)
                bell.ring()
                while waiting:  # they fail as well; the buckets are theirs until they have
                    with suppress(RuntimeError, OSError):
                        waiting.popleft()()
        finally:
            self.buckets = ()
            self.ended.set()
            bell.ring()

    def news(self) -> bool:
        return self.done > self.reported or bool(self.error) or self.ended.is_set()

    def _finish(self, finish: Callable[[], None], bell: _Bell) -> None:
        finish()
        self.done += 1
        bell.ring()


class Group:
    """A collective group of `size` members, for one version or for many.

    Every member makes it with the same `key`, which must be new in this store, and then makes the same calls
    of `broadcast`. The first error breaks the group for good, here and soon at the others too.

    Args:
        backend: `gloo` for host memory, `nccl` for GPUs (then `device` is this member's).
        store_host, store_port: of the publisher's `CollectiveStore`.
        key: names the group in the store.
        rank, size: of this member.
        deadline_seconds: how long making the group may take, and each `broadcast`.
        wait: until the group is made. Without it, it is made in the background, and the first `broadcast`
            waits for it: so another thread can `abort` meanwhile.

    Raises `CollectiveBroken` when the group has not come together in time; ValueError for arguments that
    cannot be right.
    """

    def __init__(
        self,
        backend: Literal["nccl", "gloo"],
        store_host: str,
        store_port: int,
        key: str,
        rank: int,
        size: int,
        deadline_seconds: float,
        device: torch.device | str | None = None,
        wait: bool = True,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of a collective group of {size}: ranks are 0 to {size - 1}")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"collective backend {backend!r}: gloo and nccl are what dcs knows")
        if deadline_seconds <= 0:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; a collective group needs some time")
        self.key, self.rank, self.size = key, rank, size
        self._deadline_seconds = deadline_seconds
        self._bell = _Bell()
        self._lock = threading.RLock()  # held by the caller that makes or uses the group
        self._work = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._transport: Transport | None = None
        self._failure = ""  # to make it
        self._reason = ""  # why it cannot be used any more
        self._closing = False
        self._began = began = time.monotonic()

        def make() -> Transport:
            # A little before the caller gives up, so that it hears who did not come.
            rendezvous = Rendezvous(
                store_host, store_port, key, rank, size, began + _OWN_SHARE * deadline_seconds
            )
            if backend == "nccl":
                from dcs.wire.nccl import NcclTransport

                return NcclTransport(rendezvous, torch.device(device or "cuda"))
            from dcs.wire.gloo import GlooTransport

            return GlooTransport(rendezvous)

        _live.add(self)
        self._thread = threading.Thread(
            target=self._drive, args=(make,), name=f"dcs-{backend}-{key}", daemon=True
        )
        self._thread.start()
        if wait:
            self.ready()

    def ready(self) -> None:
        """Wait until the group is made, by its deadline. Raises `CollectiveBroken` and `Closed`."""
        self._made()

    def _made(self) -> Transport:
        with self._lock:
            if self._transport is None and not self._closing:
                deadline = self._began + self._deadline_seconds
                cause = self._attend(lambda: bool(self._transport or self._failure), deadline, ())
                if self._transport is None:
                    self._reason = self._reason or cause or self._failure
                    self.close()
                    raise CollectiveBroken(self.key, self.rank, self.size, -1, self._reason)
            if self._reason:
                raise CollectiveBroken(self.key, self.rank, self.size, 0, self._reason)
            if self._closing or self._transport is None:
                raise Closed(f"collective group {self.key!r} was closed")
            return self._transport

    def broadcast(
        self,
        flat: torch.Tensor,
        source: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        on_bucket: Callable[[int, int], None] | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """Make `flat` of every member equal to that of `source`.

        Args:
            flat: uint8 [n], contiguous, of the same n everywhere. On the host; with nccl on its device too
                (then what writes it must have finished). Is only read at the source.
            source: rank of the member that has the bytes.
            bucket_bytes: how much is moved at a time; the same everywhere.
            on_bucket: called here, in this thread, with the start and end of each bucket in turn as soon as
                it has arrived, while further ones arrive. At the source: as soon as its buffer was read.
            deadline_seconds: for the whole of it, if other than the group's.

        Raises `CollectiveBroken`, `Closed`, ValueError, or what `on_bucket` raises (which breaks the group).
        """
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"broadcast takes a contiguous uint8 [n], not {flat.dtype} {list(flat.shape)}; view the arena"
            )
        if not 0 <= source < self.size or bucket_bytes < 1:
            raise ValueError(f"source {source} of {self.size}, buckets of {bucket_bytes} bytes")
        with self._lock:
            transport = self._made()
            seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
            job = _Job(flat.split(bucket_bytes) if len(flat) else (), source, time.monotonic() + seconds)
            with self._work:
                self._jobs.append(job)
                self._work.notify()
            try:
                while True:
                    cause = self._attend(job.news, job.deadline, transport.watched())
                    cause = cause or self._reason or job.error
                    ended = job.ended.is_set()
                    for index in range(job.reported, job.done):
                        if on_bucket is not None:
                            start = index * bucket_bytes
                            on_bucket(start, min(start + bucket_bytes, len(flat)))
                        job.reported += 1
                    if cause:
                        quiet = self._break(transport, job, cause)
                        raise CollectiveBroken(self.key, self.rank, self.size, job.reported, cause, quiet)
                    if ended:
                        return
            except CollectiveBroken:
                raise
            except BaseException:
                self._break(transport, job, "the function given as on_bucket raised")
                raise
            finally:
                if self._closing:
                    self._bell.close()

    def abort(self, reason: str = "it was aborted") -> None:
        """Break the group, from any thread: a `broadcast` under way raises at once. Idempotent."""
        self._reason = self._reason or reason
        self._bell.ring()
        if self._transport is not None:
            self._transport.cut()

    def close(self) -> None:
        """Give the group up; idempotent, and never waits for a peer.

        A thread that torch holds back (gloo's notices a closed connection at its deadline only) is left to
        end by itself, and what it holds goes with it: at the latest when the deadline of its call has passed.
        """
        with self._work:
            if self._closing:
                return
            self._closing = True
            self._work.notify()
        if self._jobs or self._reason:
            self.abort(_CLOSED)
        self._bell.ring()
        self._thread.join(_JOIN_SECONDS if not self._reason else _JOIN_SECONDS / 10)
        if self._thread.is_alive():
            _held_back[:] = [held for held in _held_back if held[0].is_alive()]
            _held_back.append((self._thread, time.monotonic() + self._deadline_seconds + _SETTLE_SECONDS))
        if self._lock.acquire(timeout=_JOIN_SECONDS):  # else a broadcast is on its way out, and closes it
            self._bell.close()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self, make: Callable[[], Transport]) -> None:
        """The thread that calls torch."""
        failure = "its thread has died, with a traceback on stderr"
        transport = None
        try:
            transport = make()
        except (RuntimeError, OSError, ImportError) as error:  # torch's own errors are RuntimeErrors
            failure = _words(error)
            return
        finally:
            self._transport, self._failure = transport, "" if transport else failure
            self._bell.ring()
        try:
            while True:
                with self._work:
                    self._work.wait_for(lambda: self._jobs or self._closing)
                    if self._closing:
                        return
                    job = self._jobs[0]
                job.run(transport, self._bell)
                with self._work:
                    self._jobs.popleft()
        finally:
            transport.close()

    def _attend(self, over: Callable[[], bool], deadline: float, watched: Sequence[socket.socket]) -> str:
        """Wait until `over`; returns why waiting is of no use before that, or an empty string."""
        if self._closing:
            return _CLOSED
        poll = select.poll()
        poll.register(self._bell.descriptor, select.POLLIN)
        for sock in watched:
            poll.register(sock, select.POLLRDHUP)
        began = time.monotonic()
        limit, late = deadline, "its deadline passed"
        while not over():
            if self._reason or self._closing:
                return self._reason or _CLOSED
            remaining = limit - time.monotonic()
            if remaining <= 0:
                return late
            for descriptor, _ in poll.poll(remaining * 1000):
                if descriptor == self._bell.descriptor:
                    self._bell.still()
                else:  # what was sent before may still be on its way to us
                    poll.unregister(descriptor)
                    if limit == deadline:
                        limit = min(deadline, time.monotonic() + _HANGUP_SECONDS)
                        late = f"a peer is gone (its connection closed {limit - began:.1f} s into the wait)"
        return ""

    def _break(self, transport: Transport, job: _Job, cause: str) -> bool:
        """Make sure that nothing writes to the job's buffer any more; False when that cannot be known."""
        self._reason = self._reason or cause
        transport.cut()
        limit = max(job.deadline, time.monotonic()) + _SETTLE_SECONDS
        pause = 0.001
        while not job.ended.wait(pause) and not transport.quiet():
            if time.monotonic() > limit:
                return False
            pause = min(2 * pause, 0.05)
        return True


def _words(error: Exception) -> str:
    """What torch says, on one line: without where in its sources, and without the frames that follow."""
    said = re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error))
    said = re.split(r"Exception raised from|This is typically caused by", said)[0]
    return "; ".join(filter(None, map(str.strip, said.splitlines())))[:1000] or type(error).__name__
