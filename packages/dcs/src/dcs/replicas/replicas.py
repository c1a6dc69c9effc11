"""`Replicas`: what a rank saves to, and restores from."""

import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from dcs.arguments import (
    require_addresses,
    require_kind,
    require_label,
    require_seconds,
    require_secret,
    require_timeout,
    require_whole,
)
from dcs.errors import Closed, DcsError, Evicted, InvalidArgument, StaleVersion, Timeout
from dcs.replicas.census import Census, HeldStep, missing_text, take
from dcs.replicas.errors import KeeperLost
from dcs.replicas.link import Link, await_first
from dcs.replicas.messages import Choice, Choose, Floor, Place, Shard, Watch
from dcs.replicas.restoring import CONNECT_SECONDS, census_now, fetch_tree
from dcs.replicas.saving import Journey, Saved, Saving, Stats
from dcs.replicas.shipping import Shipping
from dcs.replicas.tree import Tree, flatten
from dcs.wire.tls import Tls, client_context

_REMEMBERED = 64  # steps that `wait` knows

_HIGHEST_STEP = (1 << 61) - 1


class Replicas:
    """Keeps the last steps of one rank's state in the memory of keepers.

    Args:
        keepers: addresses, in the same order for all ranks. A rank hands its state to the keeper of its own
            machine, without a copy, and sends it to the next ones in the list, first those of other failure
            domains.
        name: of what is kept, such as "actor"; equal for all of its ranks, and for all starts of one run.
        rank, world_size: of this process among those that each keep a part.
        copies: how many keepers are to hold each shard. With 2, any one of them may be lost.
        keep: how many complete steps stay. A node's memory holds about copies x (keep + 1) x the bytes of a
            shard for each of its ranks, and one more of a shard of one chunk (4 MiB).
        token: the keepers' secret.
        session: names this start of the run, and has to be new for each; equal in all ranks. May be left out
            by a single rank.
        tls: certificates, for keepers that were given some.
        block_seconds: `save` never waits longer than this (and `shipping.RECLAIM_SECONDS`) for memory; after
            that an older step that is not complete gives its memory up.
        connect_seconds: within which the keepers have to be reached.

    A keeper that cannot be reached is tried again in the background, for as long as this object lives.
    Raises `KeeperLost` (none can be reached), `Unauthorized`, `ProtocolMismatch`, `WorldSizeMismatch` (the
    session has another number of ranks), and `InvalidArgument`.
    """

    def __init__(
        self,
        keepers: Sequence[str],
        name: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        copies: int = 2,
        keep: int = 2,
        token: str | None = None,
        session: str | None = None,
        tls: Tls | None = None,
        block_seconds: float = 10.0,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        keepers = require_addresses(keepers, "keepers")
        require_label(name, "name")
        world_size = require_whole(world_size, "world_size", 1)
        rank = require_whole(rank, "rank", 0)
        copies = require_whole(copies, "copies", 1)
        keep = require_whole(keep, "keep", 1)
        require_secret(token, f"the replicas of {name!r}")
        if token == "":
            raise InvalidArgument("token is empty; give the keepers' secret, or None")
        require_kind(tls, Tls, "tls", "dcs.Tls(certificate, key, authority)")
        require_seconds(block_seconds, "block_seconds", zero=True)
        require_seconds(connect_seconds, "connect_seconds")
        if len(set(keepers)) != len(keepers) or copies > len(keepers):
            raise InvalidArgument(
                f"copies={copies} of {list(keepers)}; give as many different keepers, or fewer copies"
            )
        if rank >= world_size:
            raise InvalidArgument(f"rank={rank} of world_size={world_size}; ranks count from 0")
        if session is None:
            if world_size > 1:
                raise InvalidArgument(
                    f"session is None with world_size={world_size}; give all ranks the same string, a new "
                    "one for each start of the run (a job's id with its restart count)"
                )
            session = secrets.token_hex(8)
        require_label(session, "session")
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self._process = os.getpid()
        self._copies = copies
        self._keep = keep
        self._block_seconds = block_seconds
        self._base = session
        self._life = 0  # grows with each restore
        self._session = f"{session}#0"
        self._attempt = 0
        self._last: int | None = None
        self._saving_now = threading.Lock()
        self._savings: dict[int, Saving] = {}
        self._stats = Stats()
        self._completed: int | None = None
        self._census = Census((), {}, {})
        who = f"rank {rank} of {name!r} (session {session!r}, process {os.getpid()})"
        context = None if tls is None else client_context(tls)
        self._links = [Link(address, who, token, self, context) for address in keepers]
        self._shipping = Shipping(copies, keep + 1, self, self._own)
        self._changed = self._shipping.changed
        try:
            for link in self._links:
                link.start()
            await_first(self._links, connect_seconds)
            self._agree()
            self._shipping.start()
        except BaseException:
            self.close()
            raise

    # -- saving --

    def save(self, step: int, tree: Tree) -> Saving:
        """Freeze a tree as `step`, and have it copied in the background.

        Returns when it is frozen. All ranks save the same steps, in ascending order. See `tree.flatten` for
        what a tree may be made of.

        Raises `StaleVersion` (a step that is not newer than the last one), `UnsupportedLeaf`, `Evicted` (a
        newer session has taken over: this process has to end), `Timeout` (no memory), `DcsError` (nor has the
        system), `Closed`. What keepers answer is raised by `Saving.wait`.
        """
        self._raise_if_forked()
        step = require_whole(step, "step", -math.inf)
        with self._saving_now:  # one at a time, in the order of the steps
            return self._save(step, tree)

    def _save(self, step: int, tree: Tree) -> Saving:
        with self._changed:
            self._shipping.check()
            if not 0 <= step <= _HIGHEST_STEP:
                raise StaleVersion(f"step {step} of {self.name!r}; steps count from 0 to {_HIGHEST_STEP}")
            if self._last is not None and step <= self._last:
                raise StaleVersion(
                    f"step {step} of {self.name!r} after step {self._last}; steps are positive and grow"
                )
        began = time.monotonic()
        self._shipping.express.take()
        flat = flatten(tree)
        flattened = time.monotonic()
        arena = self._shipping.arena(flat.nbytes, self._block_seconds)
        blocked = time.monotonic() - flattened
        try:
            arena.fill(flat)
        except BaseException:
            self._shipping.give_back(arena)
            raise
        freeze = time.monotonic() - began - blocked
        bare = Shard(
            self.name, self._session, self.world_size, self.rank, step, flat.nbytes, b"", flat.structure
        )
        with self._changed:
            order = self._order()
            journey = Journey(
                step,
                bare,
                arena,
                self._copies,
                order[: self._copies],
                order[self._copies :],
                freeze,
                blocked,
                began,
            )
            journey.unreachable = {
                link.address: str(link.fault or f"keeper {link.address} has not answered")
                for link in self._links
                if not link.up
            }
            try:
                self._shipping.add(journey)
            except DcsError:
                self._shipping.give_back(arena)
                raise
            saving = Saving(
                journey, self._changed, lambda: self._shipping.closed, self._lacking, self.awaiting
            )
            self._last = step
            self._savings[step] = saving
            if len(self._savings) > _REMEMBERED:
                del self._savings[next(iter(self._savings))]
            old = self._stats
            self._stats = Stats(
                old.saves + 1,
                old.nbytes + flat.nbytes,
                old.freeze_seconds + freeze,
                old.blocked_seconds + blocked,
            )
        return saving

    def wait(self, step: int, timeout: float = 60.0) -> Saved:
        """`Saving.wait` of a step that was saved lately. Raises `StaleVersion` for one that was not."""
        with self._changed:
            saving = self._savings.get(step)
        if saving is None:
            raise StaleVersion(
                f"step {step} of {self.name!r} is none of the last {_REMEMBERED} that were saved here"
            )
        return saving.wait(timeout)

    @property
    def completed(self) -> int | None:
        """The newest step of this session that is known to be complete over all ranks."""
        with self._changed:
            return self._completed

    def stats(self) -> Stats:
        """Sums over all saves so far."""
        with self._changed:
            old = self._stats
            return Stats(
                old.saves,
                old.nbytes,
                old.freeze_seconds,
                old.blocked_seconds,
                self._shipping.degraded,
                self._completed,
            )

    # -- restoring --

    def newest(self) -> int | None:
        """The newest complete step that the keepers in reach hold, of whatever session."""
        self._raise_if_forked()
        newest = self._now().newest_complete()
        return None if newest is None else newest.place.step

    def restore(
        self, timeout: float = 60.0, device: str | torch.device | None = None
    ) -> tuple[int, Tree] | None:
        """The newest complete step and this rank's tree of it, or None when the keepers in reach hold none.

        All ranks call it together; rank 0 chooses, so that all get the same step. Saving starts anew from
        there: the next step may be any newer than the one restored, and what was not complete is never taken
        up again. Tensors on the CPU are views of one allocation; `device` puts all of them there instead of
        where they came from.

        Raises `WorldSizeMismatch`, `CorruptChunk` (no keeper has this rank's shard undamaged), `KeeperLost`,
        `Timeout` (rank 0 has not chosen), `DcsError` (a device that is not here), `Closed`.
        """
        self._raise_if_forked()
        deadline = time.monotonic() + require_timeout(timeout)
        step = self._choose() if self.rank == 0 else self._await_choice(deadline)
        tree = None
        if step is not None:
            tree = fetch_tree(self._links, self.name, step, self.rank, self.world_size, device, deadline)
        with self._changed:
            self._life += 1
            self._session = f"{self._base}#{self._life}"
            self._attempt = 0
            self._shipping.evicted = None
            self._last = self._completed = None if step is None else step.place.step
        self._agree()
        return None if step is None else (step.place.step, tree)

    def _choose(self) -> HeldStep | None:
        newest = self._now().newest_complete()
        choice = Choice(None if newest is None else newest.place)
        if self.world_size > 1:
            told = 0
            for link in self._links:
                try:
                    link.tell(Choose(self.name, self._session, choice))
                    told += 1
                except KeeperLost:
                    continue  # the other ranks hear it from another one
            if not told:
                raise KeeperLost(f"no keeper of {self.name!r} can be reached")
        return newest

    def _await_choice(self, deadline: float) -> HeldStep | None:
        with self._changed:
            while (choice := self._census.choices.get(self._session)) is None:
                if self._shipping.closed:
                    raise Closed("the replicas were closed")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Timeout(
                        f"rank 0 of {self.name!r} (session {self._session!r}) has not chosen a step; all "
                        "ranks call restore together, with the same session"
                    )
                self._changed.wait(left)
        if choice.place is None:
            return None
        step = self._now().find(choice.place.session, choice.place.step)
        if step is None or (self.rank not in step.holders and step.world_size == self.world_size):
            raise KeeperLost(
                f"rank 0 of {self.name!r} chose step {choice.place.step}, of which rank {self.rank} can "
                "reach no shard"
            )
        return step

    # -- what keepers hold --

    def _now(self) -> Census:
        return census_now(self._links, self.watch(0, 0.0))

    def watch(self, generation: int, seconds: float) -> Watch:
        """What a link asks its keeper."""
        with self._changed:
            return Watch(
                self.name,
                self._session,
                self._attempt,
                self.world_size,
                generation,
                seconds,
                self.floor(),
                self.rank,
            )

    def changed(self) -> None:
        """A link has news."""
        with self._changed:
            self._census = take(
                {link.address: view for link in self._links if (view := link.view) is not None}
            )
            census = self._census
            self._attempt = max(self._attempt, census.numbers.get(self._session, 0))
            for session, number in census.numbers.items():
                if number > self._attempt > 0 and not self._shipping.evicted:
                    self._shipping.evicted = Evicted(
                        f"session {session!r} has taken over {self.name!r} from {self._session!r}; this rank "
                        "is of a start that is over, and has to end (or its ranks restore, and it has to as "
                        "well)"
                    )
            newest = next((s for s in census.steps if s.complete and s.place.session == self._session), None)
            if newest is not None:
                self._completed = max(newest.place.step, self._completed or 0)
            self._shipping.look(
                lambda j: (
                    newest is not None and j.bare.session == self._session and j.step <= newest.place.step
                )
            )

    def awaiting(self) -> None:
        """A link's answer is waited for."""
        self._shipping.express.expedite()

    def floor(self) -> Floor | None:
        """What may be dropped; with the lock held."""
        up = sum(link.up for link in self._links)
        return self._census.floor(self._keep, min(self._copies, up))

    def place(self, journey: Journey) -> Place:
        """Where a step stands; with the lock held."""
        session = journey.bare.session
        return Place(self._census.numbers.get(session, 0), journey.step, session)

    def _lacking(self, step: int) -> str:
        return missing_text(self._census.find(self._session, step), self.world_size)

    def _agree(self) -> None:
        """Have every keeper in reach know the session by the same, greatest, number."""
        for _ in range(3):
            numbers = {}
            for link in self._links:
                if not link.up:
                    continue
                try:
                    view = link.look(self.watch(0, 0.0))
                except KeeperLost:
                    continue
                numbers[link.address] = next(a.number for a in view.attempts if a.session == self._session)
            self.changed()
            if len(set(numbers.values())) <= 1:
                return

    def _own(self) -> Link | None:
        local = [link for link in self._links if link.local]
        return local[self.rank % len(local)] if local else None

    def _order(self) -> list[Link]:
        """Keepers by preference: our own, then the ones that follow it in the list, other domains first.

        All ranks of a node take the same ones: were each to take others, the loss of any two nodes would lose
        some rank's shard.
        """
        own = self._own()
        start = self._links.index(own) if own is not None else self.rank % len(self._links)
        order = [link for link in self._links[start:] + self._links[:start] if link.up]
        chosen: list[Link] = []
        while order:
            domains = {link.welcome.domain for link in chosen if link.welcome is not None}
            link = next((o for o in order if o.welcome and o.welcome.domain not in domains), order[0])
            order.remove(link)
            chosen.append(link)
        return chosen

    def _raise_if_forked(self) -> None:
        """Before any lock is taken: the child's copy of one may be held by a thread that it does not have."""
        if os.getpid() != self._process:
            raise DcsError(
                f"the replicas of {self.name!r} belong to process {self._process}; make some in this process"
            )

    # -- closing --

    def close(self) -> None:
        """Stop: what is on its way is given up, what keepers hold stays with them. May be called twice.

        In a process that was forked off it does nothing: connections and threads are those of the parent.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            self._shipping.closed = True
            self._changed.notify_all()
        for link in self._links:
            link.close()
        self._shipping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
