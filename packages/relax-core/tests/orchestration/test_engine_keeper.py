"""An engine is started again when it is lost: so often, with pauses, and never for a fault of the program."""

import asyncio
from collections.abc import Sequence

import pytest
from relax.backends.inference.errors import EngineFailed, EngineLost
from relax.engine.failover import as_lost
from relax.orchestration.engine_keeper import EngineKeeper


class Life:
    """Each start builds, or fails to, then ends with what is said; after the last it serves on."""

    def __init__(self, ends: Sequence[Exception | None], builds: Sequence[Exception | None] = ()) -> None:
        self.ends, self.builds = list(ends), list(builds)
        self.begun = self.ended = 0
        self.serving = asyncio.Event()
        self.stop = asyncio.Event()

    async def begin(self) -> None:
        self.begun += 1
        if self.builds and (error := self.builds.pop(0)) is not None:
            raise error

    async def serve(self) -> None:
        if self.ends and (error := self.ends.pop(0)) is not None:
            raise error
        self.serving.set()
        await self.stop.wait()

    async def end(self) -> None:
        self.ended += 1

    def loss(self, error: Exception) -> EngineLost | None:
        return as_lost("engine-0", error)


class Told(list[tuple[str, bool | None]]):
    async def engine_lost(self, name: str, reason: str, restarting: bool) -> None:
        self.append((reason, restarting))

    async def engine_back(self, name: str) -> None:
        self.append(("back", None))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.engine.failover.FIRST_PAUSE", 0.01)


def keeper(life: Life, told: Told, restarts: int = 2, start_seconds: float = 5.0) -> EngineKeeper:
    return EngineKeeper("engine-0", life, told, restarts=restarts, start_seconds=start_seconds)


async def test_a_lost_engine_is_started_again_and_that_is_told() -> None:
    life, told = Life([EngineLost("engine-0", "killed"), EngineFailed("its thread ended"), None]), Told()
    kept = keeper(life, told)
    running = asyncio.create_task(kept.run())
    await asyncio.wait_for(life.serving.wait(), 10)
    assert told == [("killed", True), ("back", None), ("its thread ended", True), ("back", None)]
    assert (kept.status.state, kept.away) == ("running", False)
    assert (life.begun, life.ended) == (3, 2)
    kept.close()
    life.stop.set()
    await asyncio.wait_for(running, 10)
    assert kept.status.state == "done"


async def test_restarts_are_used_up() -> None:
    life, told = Life([EngineLost("engine-0", f"loss {n}") for n in range(9)]), Told()
    kept = keeper(life, told)
    await asyncio.wait_for(kept.run(), 10)
    assert life.begun == 3
    assert (kept.status.state, kept.away) == ("lost", True)
    last = "started again 2 times (rollout.engine_restarts), then: loss 2"
    assert told[-1] == (last, False)


async def test_a_start_that_takes_too_long_is_a_loss_but_not_the_first() -> None:
    class Slow(Life):
        async def begin(self) -> None:
            await super().begin()
            if self.begun == 2:
                await asyncio.Event().wait()

    life, told = Slow([EngineLost("engine-0", "killed"), None]), Told()
    kept = keeper(life, told, start_seconds=0.05)
    running = asyncio.create_task(kept.run())
    await asyncio.wait_for(life.serving.wait(), 10)
    assert told == [("killed", True), ("it was not built within 0.05 s", True), ("back", None)]
    kept.close()
    life.stop.set()
    await running


@pytest.mark.parametrize(
    ("ends", "builds"),
    [([ValueError("a fault of the program")], []), ([], [EngineFailed("never built")])],
    ids=["a fault that is no loss", "never built"],
)
async def test_what_another_start_does_not_mend_has_failed(
    ends: list[Exception], builds: list[Exception]
) -> None:
    life, told = Life(ends, builds), Told()
    kept = keeper(life, told)
    await asyncio.wait_for(kept.run(), 10)
    assert kept.status.state == "failed"
    assert str((*ends, *builds)[0]) in kept.status.error
    assert (told, life.begun) == ([], 1)


async def test_it_is_closed_in_the_middle_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.engine.failover.FIRST_PAUSE", 20.0)
    life, told = Life([EngineLost("engine-0", "killed")]), Told()
    kept = keeper(life, told)
    running = asyncio.create_task(kept.run())
    while not told:  # noqa: ASYNC110 - it has no event of its own
        await asyncio.sleep(0.01)
    assert (kept.status.state, kept.away) == ("starting", True)
    kept.close()
    await asyncio.wait_for(running, 5)
    assert life.begun == 1
