"""Keeps one engine alive: starts it again when it is lost, a limited number of times, after growing pauses.

The same for every launcher; what starting an engine means, and whom to tell, is the launcher's.
"""

import asyncio
import time
import traceback
from typing import Protocol

from relax.backends.inference.errors import EngineLost
from relax.engine.failover import RestartBudget
from relax.orchestration.launcher import State, WorkerStatus


class EngineLife(Protocol):
    """One start of an engine after another."""

    async def begin(self) -> None:
        """Start it; returns when it is built."""
        ...

    async def serve(self) -> None:
        """Follow it until it has ended; raises what it ended with."""
        ...

    async def end(self) -> None:
        """End what is left of it. Idempotent."""
        ...

    def loss(self, error: Exception) -> EngineLost | None:
        """The loss that an error tells of; None when it is a fault that another start does not mend."""
        ...


class Told(Protocol):
    """Whoever deals with the engines: the rollout."""

    async def engine_lost(self, name: str, reason: str, restarting: bool) -> None: ...

    async def engine_back(self, name: str) -> None: ...


class EngineKeeper:
    """Runs the lives of one engine.

    An engine that fails before it was ever built, or with an error that tells of no loss, `failed`: it is
    a fault of the program or of its settings, and ends the run. A later start that takes too long is a loss.

    Args:
        name: of the engine.
        life: how it is started and followed.
        told: hears of each loss and return.
        restarts: how often in a row it is started again.
        start_seconds: longest start.
    """

    def __init__(
        self, name: str, life: EngineLife, told: Told, *, restarts: int, start_seconds: float
    ) -> None:
        self.name = name
        self._life = life
        self._told = told
        self._budget = RestartBudget(restarts)
        self._start_seconds = start_seconds
        self._closing = asyncio.Event()
        self._state: State = "starting"
        self._error = ""

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(self.name, self._state, self._error)

    @property
    def away(self) -> bool:
        """It was built and is not there now."""
        return self._state == "lost" or (self._state == "starting" and bool(self._error))

    async def run(self) -> None:
        """Until it is closed, given up, or failed; `status` says which."""
        built = False
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                await self._begin()
                self._state, self._error = "running", ""
                if built:
                    await self._told.engine_back(self.name)
                built = True
                await self._life.serve()
                self._state = "done"
                return
            except Exception as error:  # noqa: BLE001 - whatever it is ends the run, or this life
                lost = self._life.loss(error) if built else None
                if self._closing.is_set():
                    self._state = "done"
                    return
                if lost is None:
                    self._state, self._error = "failed", _shown(error)
                    return
            await self._life.end()
            await self._again_or_not(lost, time.monotonic() - began)

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._life.begin()
        except TimeoutError:
            raise EngineLost(self.name, f"it was not built within {self._start_seconds:g} s") from None

    async def _again_or_not(self, lost: EngineLost, served: float) -> None:
        pause = self._budget.pause(served)
        self._state, self._error = ("lost" if pause is None else "starting"), lost.reason
        if pause is None:
            used = f"started again {self._budget.limit} times (rollout.engine_restarts), then: {lost.reason}"
            self._closing.set()
            await self._told.engine_lost(self.name, used, restarting=False)
            return
        await self._told.engine_lost(self.name, lost.reason, restarting=True)
        try:
            async with asyncio.timeout(pause):
                await self._closing.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """Start it no more: what it ends with from now on is its end. Idempotent."""
        self._closing.set()


def _shown(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
