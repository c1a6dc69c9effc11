"""An episode's place in the pool: its requests go where the pool says, and outlive their engine."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentic import Generation, GenerationRequest

from relax.engine import failover
from relax.engine.router import Ask

if TYPE_CHECKING:
    from relax.engine.pool import EnginePool, Replica


@dataclass(frozen=True)
class Party:
    """A group as the pool sees it: its name and ordinal, the step it is for, how many episodes it has."""

    name: str
    ordinal: int
    step: int
    members: int


class Seat:
    """One episode in the pool.

    A request whose engine is lost is asked of another one, under the same id and seed. Tokens that the engine
    had let out are kept, and only the rest is asked for; there is no other way by which an answer could be
    counted twice, as an engine that is lost is not listened to any more.

    Args:
        pool: the replicas.
        party: the episode's group.
        replica: where it sits from the beginning, announced there (`front.enter`); None: where its first
            request is placed.
        placed: called with each request's id and its replica's name, when it is sent there.
    """

    def __init__(
        self,
        pool: "EnginePool",
        party: Party,
        replica: "Replica | None" = None,
        placed: Callable[[str, str], None] = lambda request, replica: None,
    ) -> None:
        self._pool = pool
        self._party = party
        self._replica = replica
        self._placed = placed
        self._given_up: set[str] = set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The answer to one request of the episode.

        Raises:
            NoReplicaLeft: there is no engine any more.
            EngineError: the request cannot be served.
        """
        kept: Generation | None = None
        asked = request
        while True:
            replica = await self._place(asked)
            if replica is None:
                return failover.aborted(kept)
            replica.requests += 1
            try:
                answer = await replica.front.generate(asked)
            except failover.LOSSES as error:
                lost = self._pool.lose(replica, error)
                self._pool.moved += 1
            else:
                return failover.joined(len(request.tokens), kept, answer)
            finally:
                replica.requests -= 1
                self._pool.placement.ended(request.id)
            partial = lost.partial.get(request.id)
            if partial is not None and len(partial.tokens):
                kept = failover.joined(len(request.tokens), kept, partial)
                if (whole := failover.ended(request, kept)) is not None:
                    return whole
                asked = failover.resumed(request, kept)

    async def abort(self, request_id: str) -> None:
        """End a request with what it has, wherever it is."""
        self._given_up.add(request_id)
        self._pool.wake()
        if self._replica is not None:
            with contextlib.suppress(*failover.LOSSES):  # then it is not asked for again
                await self._replica.engine.abort(request_id)

    def leave(self) -> None:
        """The episode has ended."""
        if self._replica is not None:
            self._replica.front.leave()

    async def _place(self, request: GenerationRequest) -> "Replica | None":
        ask = Ask(
            request=request.id,
            episode=request.id.rpartition("/")[0],
            group=self._party.name,
            ordinal=self._party.ordinal,
            members=self._party.members,
            prompt=request.tokens,
            new_tokens=request.sampling.max_new_tokens,
            media=bool(request.media),
        )
        replica = await self._pool.place(ask, self._party.step, lambda: request.id in self._given_up)
        if replica is not None:
            if replica is not self._replica:
                self.leave()
                replica.front.enter(1)
                self._replica = replica
            self._placed(request.id, replica.name)
        return replica
