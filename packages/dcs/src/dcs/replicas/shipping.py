"""What happens to a frozen step in the background: its copies are made, and its memory is used again.

One thread makes each of a rank's copies, in the order of the steps; another takes arenas back from the
keepers. Small shards go to keepers on this machine without either: see `express`. All state is guarded by one
lock. Each kind of waiter has a condition of its own over it: a thread that is woken for nothing takes the
interpreter from the thread that trains.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from dcs.errors import Closed, DcsError, Evicted, Timeout
from dcs.interruptible import Condition
from dcs.replicas.arenas import Arena
from dcs.replicas.errors import KeeperFull
from dcs.replicas.express import Express, Posted, is_small
from dcs.replicas.link import Link
from dcs.replicas.messages import CHUNK_BYTES, MAX_DROPS, Drop, Floor, Hand, Held, Place
from dcs.replicas.saving import Journey

RECLAIM_SECONDS = 5.0  # for a keeper to let go of what it was told to


class View(Protocol):
    """What is known of the keepers. Called with the lock held."""

    def floor(self) -> Floor | None:
        """What may be dropped."""
        ...

    def place(self, journey: Journey) -> Place:
        """Where a step stands among all."""
        ...

    def changed(self) -> None:
        """A keeper holds something else."""
        ...


class Shipping:
    """The steps of one rank that are on their way, and the arenas they lie in.

    Args:
        copies: how many keepers are to hold each step.
        arenas: how many steps may lie in memory at a time, without what `freeze` gives up; one more where
            they are small, as those are only taken back with the message of the next step.
        view: what is known of the keepers.
        local: the keeper that arenas may be handed over to, or None; called with the lock held.
    """

    def __init__(self, copies: int, arenas: int, view: View, local: Callable[[], Link | None]) -> None:
        lock = threading.RLock()
        self.changed = Condition(lock)  # for callers: a step that settles, memory that is free
        self._queued = [Condition(lock) for _ in range(copies)]
        self._reclaimable = Condition(lock)
        self.evicted: DcsError | None = None
        self.closed = False
        self.degraded = 0  # steps with fewer copies than asked for
        self._view = view
        self._local = local
        self._limit = arenas
        self._count = 0
        self._free: list[Arena] = []
        self._journeys: list[Journey] = []  # whose arenas are not free yet
        self._incomplete: list[Journey] = []
        self._queues: list[deque[Journey]] = [deque() for _ in range(copies)]
        self._hurry = False  # a keeper or another rank did not keep up: do not wait for it again
        self._releasing = 0  # arenas that a keeper is asked to let go of
        self._wanted = 0  # bytes of an arena that is made in the background
        self._waiting = 0  # callers that need an arena now
        self._working = [False] * copies  # the thread of this copy is making one
        self.express = Express(self._answered)
        self._threads = [
            threading.Thread(target=self._copy, args=(index,), name=f"dcs-replicas-copy-{index}", daemon=True)
            for index in range(copies)
        ]
        self._threads.append(threading.Thread(target=self._reclaim, name="dcs-replicas-reclaim", daemon=True))

    def start(self) -> None:
        """Start the threads."""
        self.express.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop; the links have to be closed by now, so that no thread is waiting on one."""
        with self.changed:
            self.closed = True
            for condition in (self.changed, self._reclaimable, *self._queued):
                condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.express.close()
        with self.changed:
            for arena in [*self._free, *(j.arena for j in self._journeys if not j.released)]:
                arena.close()
            self._free.clear()
            self._journeys.clear()

    # -- arenas --

    def arena(self, nbytes: int, seconds: float) -> Arena:
        """Memory for `nbytes`, waiting at most `seconds` for it, and then giving up an older step.

        Raises `Timeout` when a keeper does not even let go of that.
        """
        now = time.monotonic()
        with self.changed:
            self._wanted = nbytes
            limit = self._most(nbytes)
            deadline = now if self._hurry else now + seconds
            last = deadline + RECLAIM_SECONDS
            while True:
                self.check()
                arena = self._take(nbytes)
                if arena is not None:
                    return arena
                now = time.monotonic()
                late = now >= deadline
                if self._count < limit + late:
                    self._count += 1
                    break
                if late:
                    self._hurry = True
                    self._give_one_up()
                if now >= last:
                    raise Timeout(
                        f"no memory for a step of {nbytes} bytes after {seconds + RECLAIM_SECONDS} s: keepers"
                        f" hold on to {self._count} older ones"
                    )
                self._waiting += 1
                self.express.expedite()
                try:
                    self._wake()
                    self.changed.wait((last if late else deadline) - now)
                finally:
                    self._waiting -= 1
        try:
            return Arena(nbytes)
        except OSError as error:
            self.give_back(None)
            raise DcsError(
                f"no memory for a step of {nbytes} bytes: {error}; free some, or descriptors (ulimit -n),"
                " or save less"
            ) from error
        except BaseException:
            self.give_back(None)
            raise

    def give_back(self, arena: Arena | None) -> None:
        """An arena was not used after all, or could not be made."""
        with self.changed:
            if arena is None:
                self._count -= 1
            else:
                self._free.append(arena)
            self._wake()

    def check(self) -> None:
        """Raise `Closed` or `Evicted` if so; with the lock held."""
        if self.closed:
            raise Closed("the replicas were closed")
        if self.evicted is not None:
            raise self.evicted

    def _most(self, nbytes: int) -> int:
        return self._limit + (nbytes <= CHUNK_BYTES)

    def _take(self, nbytes: int) -> Arena | None:
        for arena in self._free:
            if arena.fits(nbytes):
                self._free.remove(arena)
                return arena
        while self._free:
            self._free.pop().close()
            self._count -= 1
        return None

    def _give_one_up(self) -> None:
        """Give up an older step, unless one is on its way out: one that is not being copied, if there is
        one.
        """
        floor = self._view.floor()
        if self._releasing or any(j.given_up and not j.settled for j in self._journeys):
            return
        if any(self._may_go(j, floor) for j in self._journeys):
            return
        kept = [j for j in self._journeys if j.settled and j.complete]
        idle = [j for j in self._journeys if not j.moving and j not in kept]
        busy = [j for j in self._journeys if j.moving]
        for journey in [*idle, *busy]:
            journey.given_up = (
                "its memory was needed for a newer step: a keeper, or another rank, does not keep up"
            )
            for queue in self._queues:
                if journey in queue:
                    queue.remove(journey)
                    self._close_one(journey)
            for link in journey.busy:
                link.cut()
            self._wake()
            if not journey.settled or self._may_go(journey, floor):
                return  # else it is the newest complete one, and its memory stays

    def _close_one(self, journey: Journey) -> None:
        """One of a step's copies is made, or will not be."""
        journey.open -= 1
        if journey.settled:
            journey.settled_at = time.monotonic()
            self.degraded += len(journey.held) < journey.copies
        self._wake()

    def _wake(self) -> None:
        """Callers look again, and the thread that takes arenas back, if there is one to take."""
        self.changed.notify_all()
        if self._due() is not None:
            self._reclaimable.notify()

    # -- copies --

    def add(self, journey: Journey) -> None:
        """Begin to make the copies of a frozen step."""
        with self.changed:
            self.check()
            journey.open = len(self._queues)
            self._journeys.append(journey)
            self._incomplete.append(journey)
            for index in range(len(self._queues)):
                if not self._post(journey, index):
                    self._queue(journey, index)
            self._wake()

    def look(self, complete: Callable[[Journey], bool]) -> None:
        """The keepers hold something else: note which steps are complete. With the lock held."""
        for journey in self._incomplete:
            journey.complete = complete(journey)
            if journey.complete and not journey.given_up and not journey.failed:
                self._hurry = False
        self._incomplete = [j for j in self._incomplete if not j.complete and j.fault() is None]
        self._wake()

    def _queue(self, journey: Journey, index: int) -> None:
        self._queues[index].append(journey)
        self._queued[index].notify()

    def _post(self, journey: Journey, index: int) -> bool:
        """Have a copy made without a thread that waits for it, if that works at once."""
        if index >= len(journey.routes) or self._queues[index] or self._working[index]:
            return False  # steps do not overtake each other
        link = journey.routes[index]
        if not (link.up and link.local and is_small(journey.bare)):
            return False
        mapped = link is self._local()
        floor = self._view.floor()
        returning = []
        if mapped:
            journey.handed = link  # before it is, as from then on its memory is not ours
            returning = [j for j in self._journeys if j.handed is link and self._may_go(j, floor)][:MAX_DROPS]
        drops = tuple(_drop(each) for each in returning)
        message = Hand(journey.shard(), floor, not mapped, drops)
        if not self.express.send(Posted(journey, index, link, returning), message):
            return False
        for each in returning:
            self._part(each)
        journey.moving += 1
        journey.busy.append(link)
        return True

    def _answered(self, answers: Sequence[tuple[Posted, Held | DcsError]]) -> None:
        for posted, answer in answers:
            if isinstance(answer, Held):
                posted.link.note(answer.inventory)
        self._view.changed()
        with self.changed:
            for posted, answer in answers:
                journey, index = posted.journey, posted.index
                journey.moving -= 1
                journey.busy.remove(posted.link)
                if isinstance(answer, Held):
                    journey.held.append(posted.link)
                    self._close_one(journey)
                    for each, free in zip(posted.returning, answer.dropped, strict=True):
                        self._settle(each, free)
                    continue
                # Once more, by the one who can wait, and turn to others: a request may be repeated.
                for each in posted.returning:
                    self._releasing -= 1
                    each.released = False
                    self._journeys.append(each)
                self._queue(journey, index)
            self._wake()

    def _copy(self, index: int) -> None:
        queue, queued = self._queues[index], self._queued[index]
        while True:
            with queued:
                while not queue and not self.closed:
                    queued.wait()
                if self.closed:
                    return
                journey = queue.popleft()
                journey.moving += 1
                self._working[index] = True
            try:
                self._make_copy(journey, index)
            finally:
                with self.changed:
                    journey.moving -= 1
                    self._working[index] = False
                    self._close_one(journey)

    def _make_copy(self, journey: Journey, index: int) -> None:
        link = journey.routes[index] if index < len(journey.routes) else None
        while True:
            with self.changed:
                if self.evicted is not None:
                    journey.failed.setdefault("any keeper", self.evicted)
                if journey.given_up or self.closed or self.evicted is not None:
                    return
                if link is None:
                    link = next((spare for spare in journey.spare if spare.up), None)
                    if link is None:
                        return
                    journey.spare.remove(link)
                hand = link is self._local()
                if hand:
                    journey.handed = link  # before it is, as from then on its memory is not ours
                journey.busy.append(link)
            try:
                if hand:
                    link.hand(journey.shard(), journey.arena.descriptor, self._floor())
                else:
                    link.send(
                        journey.shard(), journey.arena.memory, self._floor(), lambda: self._over(journey)
                    )
            except DcsError as error:
                with self.changed:
                    journey.busy.remove(link)
                    journey.failed[link.address] = error
                    if hand and isinstance(error, KeeperFull):
                        journey.handed = None  # it did not take the memory, so that is ours
                    if isinstance(error, Evicted):
                        self.evicted = error
                link = None
                continue
            with self.changed:
                journey.busy.remove(link)
                journey.held.append(link)
            return

    def _floor(self) -> Floor | None:
        with self.changed:
            return self._view.floor()

    def _over(self, journey: Journey) -> bool:
        with self.changed:
            return bool(journey.given_up) or self.closed or self.evicted is not None

    # -- memory that is used again --

    def _may_go(self, journey: Journey, floor: Floor | None) -> bool:
        """Whether a step's memory can be taken back from the keeper that maps it."""
        if not journey.settled:
            return False
        # Never because this rank was evicted: those who have taken over may restore what it left.
        if journey.handed is None or (journey.given_up and not journey.complete):
            return True
        place = self._view.place(journey)
        if floor is None or place == floor.anchor:
            return False
        return (place.attempt, place.step) < (floor.oldest.attempt, floor.oldest.step)

    def _due(self) -> Journey | int | None:
        """A step whose memory can be taken back, or how many bytes a new arena is to have, if either."""
        floor = self._view.floor() if self._journeys else None
        for journey in self._journeys:
            # A small one goes with the next step's message, unless somebody needs it now.
            if (self._waiting or journey.handed is None or not is_small(journey.bare)) and self._may_go(
                journey, floor
            ):
                return journey
        few = self._count < self._most(self._wanted)
        return self._wanted if self._wanted and not self._free and few else None

    def _reclaim(self) -> None:
        while True:
            with self._reclaimable:
                while (due := self._due()) is None and not self.closed:
                    self._reclaimable.wait()
                if self.closed or due is None:
                    return
                if isinstance(due, Journey):
                    self._part(due)
                else:
                    self._count += 1
            if isinstance(due, Journey):
                self._release(due)
            else:
                self._make_ahead(due)

    def _release(self, journey: Journey) -> None:
        free = True
        if journey.handed is not None:
            try:
                free = journey.handed.drop(_drop(journey))
            except DcsError:
                free = False  # whether it still maps it is not known
        with self.changed:
            self._settle(journey, free)
            self._wake()

    def _part(self, journey: Journey) -> None:
        """A step's memory is being taken back."""
        self._journeys.remove(journey)
        journey.released = True
        self._releasing += 1

    def _settle(self, journey: Journey, free: bool) -> None:
        """A keeper has let go of a step's memory, or (not `free`) may not have."""
        self._releasing -= 1
        if free:
            self._free.append(journey.arena)
        else:
            # Never written again, as somebody may read it; a new one takes its place.
            journey.arena.close()
            self._count -= 1

    def _make_ahead(self, nbytes: int) -> None:
        """Make an arena before it is asked for: the kernel clears its pages, which takes longer than to fill
        it.
        """
        try:
            arena = Arena(nbytes)
        except OSError:
            arena = None  # whoever asks for it will hear of it
        with self.changed:
            self._wanted = 0 if arena is None else self._wanted
        self.give_back(arena)


def _drop(journey: Journey) -> Drop:
    bare = journey.bare
    return Drop(bare.name, bare.session, bare.rank, bare.step)
