"""Small shards on their way to keepers on this machine: one message to each, one answer, and a single thread.

The time that a small shard takes is not that of its bytes, but of threads that wake each other up while
training holds the interpreter. So whoever saves sends the messages, which waits for nothing, and takes the
answers to those of the step before. A thread takes them where no step follows soon, or somebody waits for
one. Whatever does not work here is done again by the threads that can wait.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dcs.errors import DcsError
from dcs.replicas.link import SILENCE_SECONDS, Link
from dcs.replicas.messages import CHUNK_BYTES, Hand, Held, Shard
from dcs.replicas.saving import Journey

MAX_STRUCTURE_BYTES = 256 << 10  # a message has to fit into the socket's buffer
LOOK_SECONDS = 0.5  # at most, until an answer is taken that nobody waits for


def is_small(shard: Shard) -> bool:
    """Whether a shard may go this way: of one chunk, and described in few words."""
    return shard.nbytes <= CHUNK_BYTES and len(shard.structure) <= MAX_STRUCTURE_BYTES


@dataclass(eq=False)
class Posted:
    """A copy of a step that a keeper was asked to take.

    `index` says which one, `returning` are the steps whose memory the keeper gives back with its answer.
    """

    journey: Journey
    index: int
    link: Link
    returning: list[Journey]
    since: float = field(default_factory=time.monotonic)


class Express:
    """The messages that are on their way.

    Args:
        answered: called with each of them and what came of it, without a lock.
    """

    def __init__(self, answered: Callable[[Sequence[tuple[Posted, Held | DcsError]]], None]) -> None:
        self._answered = answered
        self._lock = threading.Lock()
        self._posted: dict[int, Posted] = {}  # by the descriptor of its connection
        self._recent = False  # something was posted since the thread looked last
        self._idle = False  # the thread does not look at all
        self._awaited = False  # somebody waits for what is on its way
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="dcs-replicas-answers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop; the links have to be closed by now, so that nothing is on its way. May be called twice."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake)

    def send(self, posted: Posted, message: Hand) -> bool:
        """Post a message; False when the link has something else to do, or has first to be connected."""
        with self._lock:  # so that nobody looks for it before it is there
            descriptor = posted.link.post(message, posted.journey.arena.descriptor)
            if descriptor is None:
                return False
            self._posted[descriptor] = posted
            self._recent = True
            if self._idle:
                self._idle = False
                os.eventfd_write(self._wake, 1)
        return True

    def expedite(self) -> None:
        """Somebody waits for what is on its way: have the answers taken as soon as they come."""
        with self._lock:
            if self._posted and not self._awaited and not self._closed:
                self._awaited = True
                os.eventfd_write(self._wake, 1)

    def take(self) -> None:
        """Take the answers that have come."""
        with self._lock:
            if not self._posted:
                return
            poll = select.poll()
            for descriptor in self._posted:
                poll.register(descriptor, select.POLLIN)
            answers = [self._posted.pop(descriptor) for descriptor, _ in poll.poll(0)]
        if answers:
            self._answered([(posted, _collect(posted.link)) for posted in answers])

    def _run(self) -> None:
        while not self._closed:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self._lock:
                self._idle = not self._posted and not self._recent
                self._recent = False
                self._awaited = self._awaited and bool(self._posted)
                if self._awaited:
                    for descriptor in self._posted:
                        poll.register(descriptor, select.POLLIN)
            events = poll.poll(None if self._idle else 1000 * LOOK_SECONDS)
            if any(descriptor == self._wake for descriptor, _ in events):
                os.eventfd_read(self._wake)
            self.take()
            late = time.monotonic() - SILENCE_SECONDS
            with self._lock:
                overdue = [posted.link for posted in self._posted.values() if posted.since < late]
            for link in overdue:
                link.cut()  # which is an answer, too


def _collect(link: Link) -> Held | DcsError:
    try:
        return link.collect()
    except DcsError as error:
        return error
