"""Clients that an earlier life of the controller served: they come back, or they are found to be gone."""

import os
from collections.abc import Callable

from ..wire.messages import Admitted, Committed, Granted, Leased, decode_reply
from ..wire.node import Answered, Node, Session
from . import events
from .memory import Memory
from .puts import Puts, take_back
from .recording import birth_of
from .recovery import Client, Past
from .shelves import Shelves
from .timers import Timers

_GRACE = 5.0  # seconds in which a client of another host, of which nothing else tells, should be back
_FORGOTTEN_AFTER = 600.0  # seconds in which it may come back and ask again what it has asked
_UNCOMMITTED_SECONDS = 600.0  # after which memory for one put that a client was granted is taken back


class Returning:
    """Keeps what earlier clients hold until they speak for themselves.

    A client of this host keeps it until its process ends: it may look at memory for long without a word. One
    of another host only reads through storage units, which refuse a block that is not what it was.
    """

    def __init__(self, node: Node, memory: Memory, puts: Puts, shelves: Shelves, timers: Timers) -> None:
        self._node = node
        self._memory = memory
        self._puts = puts
        self._shelves = shelves
        self._timers = timers
        self._watched: dict[int, int] = {}

    def expect(self, past: Past, forget: Callable[[Session], None]) -> None:
        """Begins to wait for all clients of the past.

        Args:
            forget: called for those of this host that are gone already.
        """
        same_store = past.incarnation == self._node.incarnation
        for number, client in list(past.clients.items()):
            alive = past.same_boot and client.pid and birth_of(client.pid) == client.born
            if client.pid and not alive:
                forget(Session(number))
                continue
            if alive or same_store:
                answers = [self._answer(number, kept) for kept in client.answers.values() if same_store]
                session = self._node.restore(number, client.low, answers)
                if client.pid:
                    self._watch(session, client)
                else:
                    self._await(session)
            else:
                del past.clients[number]
        for number in set(self._memory.holders()) - past.clients.keys():
            self._timers.at(self._timers.now() + _GRACE, lambda n=number: self._release(n))
        for grant in list(self._memory.grants.values()):
            if grant.owner is not None and not grant.slab:
                self._timers.at(
                    self._timers.now() + _UNCOMMITTED_SECONDS, lambda g=grant: self._puts.end_grant(g)
                )

    def came(self, session: Session) -> None:
        """A client is connected: its connection tells the rest."""
        pidfd = self._watched.pop(session.number, None)
        if pidfd is not None:
            self._node.poll.forget(pidfd)
            os.close(pidfd)

    def _watch(self, session: Session, client: Client) -> None:
        try:
            pidfd = self._watched[session.number] = os.pidfd_open(client.pid)
        except ProcessLookupError:
            self._timers.at(self._timers.now(), lambda: self._node.lost(session))
            return
        self._node.poll.watch(pidfd, lambda: self._died(session))

    def _died(self, session: Session) -> None:
        self.came(session)
        if session.connection is None:
            self._node.lost(session)

    def _await(self, session: Session) -> None:
        now = self._timers.now()
        self._timers.at(now + _GRACE, lambda: self._release(session.number))
        self._timers.at(now + _FORGOTTEN_AFTER, lambda: self._forget(session))

    def _forget(self, session: Session) -> None:
        if session.connection is None and self._node.session(session.number) is session:
            self._node.lost(session)

    def _release(self, number: int) -> None:
        """It has not come back. What it asked before it may still ask again."""
        session = self._node.session(number)
        if session is None or session.connection is None:
            self._memory.unpin_all(number)
            self._puts.forget(number)

    def _answer(self, client: int, kept: events.Kept) -> Answered:
        """An answer as it was, with what takes it back."""
        body = decode_reply(kept.reply).body
        match body:
            case Committed(first):
                partition = self._shelves[kept.partition].partition
                ids = range(first, first + kept.rows)
                return Answered(kept.request, body, lambda: take_back(partition, ids), True, (), ())
            case Granted(where):
                grant = self._memory.grants.get(where.grant)
                arenas = [self._memory.arena(where.arena)]
                undo = None if grant is None else lambda: self._puts.end_grant(grant)
                return Answered(kept.request, body, undo, False, (), arenas)
            case Leased():
                partition = self._shelves[kept.partition].partition
                pins = [handle.block for handle in body.places.blocks]
                arenas = [self._memory.arena(number) for number in {h.arena for h in body.places.blocks}]

                def give_up() -> None:
                    self._memory.unpin(client, pins)
                    # A part of a round waits for its rank, which asks again or is replaced.
                    if body.round < 0 and body.lease in partition.leases:
                        partition.nack(body.lease, self._timers.now())

                return Answered(kept.request, body, give_up, False, pins, arenas)
            case Admitted(ticket):
                partition = self._shelves[kept.partition].partition
                return Answered(kept.request, body, lambda: partition.unpromise(ticket), False, (), ())
            case _:
                return Answered(kept.request, body, None, False, (), ())

    def close(self) -> None:
        """Waits for nobody any more. Idempotent."""
        while self._watched:
            os.close(self._watched.popitem()[1])
