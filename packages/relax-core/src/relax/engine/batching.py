"""How single generation calls become calls on an engine.

`Coalescing` sends together what arrives together: the members of a group start in one turn of the event loop
and are admitted as one. `Lockstep` waits until every live episode of a step has asked or left, and sends them
in canonical order, so that an engine sees the same calls in the same order in every run.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from agentic import Generation, GenerationRequest

from relax.backends.inference.base import FinishedGeneration
from relax.backends.inference.errors import EngineLost, InvalidRequest

LAST_WORDS_SECONDS = 1.0
"""For calls on a lost engine to end by themselves, with what they know of their answers."""


class Generates(Protocol):
    """The part of an engine that a front needs."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]: ...


class Batching(Protocol):
    """One replica's front: a coroutine a request over an engine's batched call."""

    async def generate(self, request: GenerationRequest) -> Generation: ...

    def enter(self, episodes: int) -> None:
        """Announce episodes before any of them asks."""
        ...

    def leave(self) -> None:
        """An episode has ended, or gone elsewhere, and asks for nothing more here."""
        ...

    async def fail(self, lost: EngineLost) -> None:
        """The engine is lost: all that is open here fails with that, and nothing arrives any more."""
        ...

    async def close(self) -> None: ...


class _Front:
    """What both share: open futures by request id, and the tasks that drain engine calls into them."""

    def __init__(self, engine: Generates) -> None:
        self._engine = engine
        self._open: dict[str, asyncio.Future[Generation]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._waiting: list[GenerationRequest] = []
        self._lost: EngineLost | None = None

    def _send(self, requests: Sequence[GenerationRequest]) -> None:
        call = asyncio.create_task(self._drain(requests))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _drain(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            async for finished in self._engine.generate(requests):
                self._settle(finished.id, finished.generation)
        except InvalidRequest as error:
            rest = [request for request in requests if request.id in self._open]
            if len(requests) == 1:
                self._settle(requests[0].id, error)
            for request in rest if len(requests) > 1 else ():
                self._send([request])  # one of them is at fault, and fails alone
        except BaseException as error:
            for request in requests:
                self._settle(request.id, error)
            if not isinstance(error, Exception):
                raise

    def _settle(self, request_id: str, outcome: Generation | BaseException) -> None:
        future = self._open.pop(request_id, None)
        if future is None or future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _opened(self, request: GenerationRequest) -> "asyncio.Future[Generation]":
        if self._lost is not None:
            raise self._lost
        if request.id in self._open:
            raise ValueError(f"generation request {request.id!r} is already running on this replica")
        future = asyncio.get_running_loop().create_future()
        self._open[request.id] = future
        return future

    async def fail(self, lost: EngineLost) -> None:
        self._lost = lost
        for request in self._waiting:
            self._settle(request.id, lost)
        self._waiting = []
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=LAST_WORDS_SECONDS)
        for request_id in list(self._open):
            self._settle(request_id, lost)
        await self.close()

    async def close(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class Coalescing(_Front):
    """Requests of one turn of the event loop go to the engine in one call."""

    async def generate(self, request: GenerationRequest) -> Generation:
        future = self._opened(request)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(request)
        return await future

    def enter(self, episodes: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting)


class Lockstep(_Front):
    """All live episodes ask, then all are sent, ordered by id."""

    def __init__(self, engine: Generates) -> None:
        super().__init__(engine)
        self._live = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        future = self._opened(request)
        self._waiting.append(request)
        self._flush_if_complete()
        return await future

    def enter(self, episodes: int) -> None:
        self._live += episodes

    def leave(self) -> None:
        self._live -= 1
        self._flush_if_complete()

    def _flush_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._live:
            waiting, self._waiting = sorted(self._waiting, key=lambda request: request.id), []
            self._send(waiting)
