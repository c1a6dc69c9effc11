"""Pool and seats: requests move from a lost replica, which leaves and may come back, and nothing doubles."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from agentic import Generation, GenerationRequest, Sampling
from relax.backends.inference.base import FinishedGeneration, Health
from relax.backends.inference.errors import EngineLost, EngineNotBuilt, InvalidRequest
from relax.distributed.version_clock import VersionClock
from relax.engine.batching import Coalescing, Lockstep
from relax.engine.failover import NoReplicaLeft
from relax.engine.pool import EnginePool
from relax.engine.router import StaticPlacement
from relax.engine.seats import Party, Seat


class Engine:
    """Serves one version; answers with `tokens` when it is let, and can be lost."""

    def __init__(self, version: int = 0, tokens: Sequence[int] = (1, 2, 3, 4), hold: bool = False) -> None:
        self.version, self.tokens = version, list(tokens)
        self.go, self.arrived, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if not hold:
            self.go.set()
        self.fault: Exception | None = None
        self.asked: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.discarded: list[str] = []
        self.steps = 0
        self.answers = True
        self.alive = True
        self.there = asyncio.Event()
        self.there.set()
        self.unbuilt: Exception | None = None

    async def built(self) -> None:
        await self.there.wait()
        if self.unbuilt is not None:
            raise self.unbuilt

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        self.asked += requests
        self.arrived.set()
        await self.go.wait()
        if self.fault is not None:
            raise self.fault
        for request in requests:
            count = min(len(self.tokens), request.sampling.max_new_tokens)
            reason = "abort" if request.id in self.aborted else "length"
            yield FinishedGeneration(request.id, answer(self.tokens[:count], self.version, reason))

    def lose(self, fault: Exception) -> None:
        self.fault = fault
        self.go.set()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.go.set()

    async def wait_version(self, version: int, timeout: float) -> int:
        if self.version >= version:
            return self.version
        await asyncio.sleep(timeout)
        raise TimeoutError

    async def health(self) -> Health:
        if not self.answers:
            await asyncio.Event().wait()
        return Health(self.alive, self.version, 0, 0, 8, self.steps, 10 * self.steps, 0.0)

    async def discard(self, reason: str) -> None:
        self.discarded.append(reason)
        self.gone.set()


def answer(tokens: Sequence[int], version: int = 0, reason: Any = "length") -> Generation:
    count = len(tokens)
    spans = [(version, 0, count)] if count else []
    return Generation(np.array(tokens, np.int32), np.zeros(count, np.float32), spans, reason)


def request(ordinal: int = 0, member: int = 0, new_tokens: int = 4) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=new_tokens)
    return GenerationRequest(f"{ordinal:08d}-{member:03d}/0", np.array([5, 6], np.int32), sampling, seed=3)


class Events(list):
    def __call__(self, event: str, **data: Any) -> None:
        self.append((event, data["engine"]))
        self.last = data


Pooled = Callable[..., Any]


@pytest.fixture
def pooled() -> Pooled:
    """async with pooled(a=Engine(), b=Engine(), stall_seconds=...) as (pool, events): both are serving."""

    @asynccontextmanager
    async def run(
        engines: Mapping[str, Engine], batching: Any = Coalescing, **options: Any
    ) -> AsyncIterator[Any]:
        clock, events = VersionClock(1), Events()
        pool = EnginePool(engines, batching, clock, 0.05, **options)
        pool.events = events
        pool.start()
        try:
            async with asyncio.timeout(20):
                if engines:
                    await pool.wait_all_at(0)
                yield pool, events
        finally:
            await pool.close()

    return run


def seat(pool: EnginePool, ordinal: int = 0, step: int = 0, members: int = 1, **more: Any) -> Seat:
    return Seat(pool, Party(f"{ordinal:08d}", ordinal, step, members), **more)


async def test_a_request_moves_with_its_id_and_seed_when_its_engine_is_lost(pooled: Pooled) -> None:
    a, b = Engine(hold=True), Engine(tokens=[9, 9, 9, 9])
    async with pooled({"a": a, "b": b}) as (pool, events):
        asked = asyncio.create_task(seat(pool).generate(request()))
        await a.arrived.wait()
        a.lose(EngineLost("a", "killed"))
        assert (await asked).tokens.tolist() == [9, 9, 9, 9]
        (first,), (second,) = a.asked, b.asked
        assert (first.id, first.seed) == (second.id, second.seed)
        assert first.tokens.tolist() == second.tokens.tolist()
        assert sorted(pool.replicas) == ["b"]
        assert events == [("engine lost", "a")]
        assert events.last["requests"] == 1
        assert pool.moved == 1


async def test_tokens_that_were_let_out_are_kept_and_only_the_rest_is_asked_for(pooled: Pooled) -> None:
    a, b = Engine(hold=True), Engine(version=1, tokens=[9, 9, 9, 9])
    async with pooled({"a": a, "b": b}) as (pool, _):
        asked = asyncio.create_task(seat(pool).generate(request(new_tokens=4)))
        await a.arrived.wait()
        a.lose(EngineLost("a", "killed", {request().id: answer([7, 8], 0, "abort")}))
        found = await asked
        assert found.tokens.tolist() == [7, 8, 9, 9]
        assert found.spans == [(0, 0, 2), (1, 2, 4)]
        assert found.finish_reason == "length"
        assert b.asked[0].tokens.tolist() == [5, 6, 7, 8]
        assert b.asked[0].sampling.max_new_tokens == 2


async def test_all_requests_of_a_lost_engine_move_and_late_answers_are_not_heard(pooled: Pooled) -> None:
    a, b = Engine(hold=True), Engine(tokens=[9])
    async with pooled({"a": a, "b": b}) as (pool, events):
        seats = [seat(pool, members=4) for _ in range(4)]
        asked = [asyncio.create_task(s.generate(request(0, m))) for m, s in enumerate(seats)]
        await a.arrived.wait()
        pool.engine_lost("a", "its process died", restarting=True)
        await asyncio.sleep(0)
        a.go.set()  # it answers after all, with 4 tokens; that may win, or be left
        found = [len((await one).tokens) for one in asked]
        assert set(found) <= {1, 4}
        assert len(b.asked) == found.count(1)
        assert events == [("engine lost", "a")]
        await a.gone.wait()


async def test_a_fault_of_a_request_is_no_loss(pooled: Pooled) -> None:
    a = Engine()
    a.fault = InvalidRequest("too long")
    async with pooled({"a": a}) as (pool, events):
        with pytest.raises(InvalidRequest, match="too long"):
            await seat(pool).generate(request())
        assert events == []
        assert list(pool.replicas) == ["a"]


@pytest.mark.parametrize("how", ["stands still", "does not answer", "says it has ended"])
async def test_a_replica_that_does_not_get_on_is_found(pooled: Pooled, how: str) -> None:
    a, b = Engine(hold=True), Engine(tokens=[9])
    async with pooled({"a": a, "b": b}, stall_seconds=0.2) as (pool, events):
        b.steps = 1
        a.answers, a.alive = how != "does not answer", how != "says it has ended"
        assert (await seat(pool).generate(request())).tokens.tolist() == [9]
        assert ("engine lost", "a") in events
        await a.gone.wait()
        said = {
            "stands still": "it answers, but has not got on for 0.2 s .* with 1 requests",
            "does not answer": "has not said for 0.2 s how it is",
            "says it has ended": "says that it has ended",
        }[how]
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(a.discarded[0])
        assert list(pool.replicas) == ["b"]


async def test_what_a_start_takes_is_no_standstill(pooled: Pooled) -> None:
    a, b = Engine(hold=True), Engine(version=-1)
    a.answers = False
    a.there.clear()
    async with asyncio.timeout(20):
        clock, events = VersionClock(1), Events()
        pool = EnginePool({"a": a, "b": b}, Coalescing, clock, 0.05, stall_seconds=0.1)
        pool.events = events
        pool.start()
        await asyncio.sleep(0.5)
        assert (events, sorted(pool.replicas)) == ([], ["a", "b"])
        a.there.set()
        await a.gone.wait()
        assert a.discarded == ["it has not said for 0.1 s how it is (rollout.stall_seconds)"]
        assert sorted(pool.replicas) == ["b"]
        await pool.close()


async def test_one_that_is_never_built_is_left_to_its_supervisor(pooled: Pooled) -> None:
    a = Engine()
    a.unbuilt = EngineNotBuilt("a", "no such library")
    async with pooled({"b": Engine()}, stall_seconds=0.1) as (pool, events):
        pool.engine_back("a", a)
        await asyncio.sleep(0.3)
        assert (events, pool.failure, a.discarded) == ([], None, [])


async def test_a_slow_replica_that_gets_on_is_left_alone(pooled: Pooled) -> None:
    a = Engine(hold=True)
    async with pooled({"a": a}, stall_seconds=0.2) as (pool, events):
        asked = asyncio.create_task(seat(pool).generate(request()))
        for _ in range(40):
            await asyncio.sleep(0.02)
            a.steps += 1
        assert events == []
        a.go.set()
        await asked


async def test_one_that_comes_back_is_used_once_it_has_weights(pooled: Pooled) -> None:
    async with pooled({"a": Engine()}) as (pool, events):
        pool.engine_lost("a", "killed", restarting=True)
        asked = asyncio.create_task(seat(pool).generate(request()))
        again = Engine(version=-1)
        pool.engine_back("a", again)
        await asyncio.sleep(0.1)
        assert not asked.done()
        again.version = 4
        assert (await asked).spans == [(4, 0, 4)]
        assert events == [("engine lost", "a"), ("engine back", "a")]
        assert events.last["version"] == 4
        assert events.last["seconds"] > 0.1


async def test_when_none_is_left_whoever_waits_is_told_by_name(pooled: Pooled) -> None:
    async with pooled({"a": Engine(), "b": Engine()}) as (pool, events):
        pool.engine_lost("a", "out of memory", restarting=False)
        assert pool.failure is None
        pool.engine_lost("b", "killed", restarting=True)
        asked = asyncio.create_task(seat(pool).generate(request()))
        await asyncio.sleep(0.05)
        assert not asked.done()
        pool.engine_lost("b", "killed again", restarting=False)
        with pytest.raises(NoReplicaLeft, match="a: out of memory; b: killed again"):
            await asked
        with pytest.raises(NoReplicaLeft):
            await pool.wait_startable(0)
        assert [what for what, _ in events] == ["engine lost", "engine given up"] * 2


async def test_an_episode_is_ended_in_time_wherever_its_request_is(pooled: Pooled) -> None:
    a = Engine(hold=True, tokens=[])
    async with pooled({"a": a}) as (pool, _):
        one, other = seat(pool, 0), seat(pool, 1)
        asked = asyncio.create_task(one.generate(request(0)))
        await a.arrived.wait()
        await one.abort(request(0).id)
        assert a.aborted == [request(0).id]
        assert (await asked).finish_reason == "abort"
        pool.engine_lost("a", "killed", restarting=True)
        asked = asyncio.create_task(other.generate(request(1)))
        await asyncio.sleep(0)
        await other.abort(request(1).id)
        found = await asked
        assert (len(found.tokens), found.finish_reason) == (0, "abort")


async def test_versions_bind_a_moved_request_as_any_other(pooled: Pooled) -> None:
    a, b = Engine(version=3, hold=True), Engine(version=1)
    async with pooled({"a": a, "b": b}) as (pool, _):
        asked = asyncio.create_task(seat(pool, step=4).generate(request()))
        await a.arrived.wait()
        a.lose(EngineLost("a", "killed"))
        await asyncio.sleep(0.1)
        assert not asked.done()  # step 4 may hold nothing older than version 3, and b serves 1
        b.version = 3
        assert (await asked).spans == [(3, 0, 4)]


async def test_lockstep_episodes_sit_down_at_a_replica_that_is_left(pooled: Pooled) -> None:
    a, b = Engine(hold=True), Engine(tokens=[9])
    options = {"batching": Lockstep, "placement": StaticPlacement()}
    async with pooled({"a": a, "b": b}, **options) as (pool, _):
        seats = []
        for ordinal, name in enumerate("abab"):
            pool.replicas[name].front.enter(1)
            seats.append(seat(pool, ordinal, replica=pool.replicas[name]))

        async def episode(ordinal: int) -> list[int]:
            try:
                return (await seats[ordinal].generate(request(ordinal))).tokens.tolist()
            finally:
                seats[ordinal].leave()

        asked = [asyncio.create_task(episode(ordinal)) for ordinal in range(4)]
        await a.arrived.wait()
        a.lose(EngineLost("a", "killed"))
        assert await asyncio.gather(*asked) == [[9]] * 4
        assert len({r.id for r in b.asked}) == len(b.asked) == 4


async def test_a_replay_does_not_go_on_without_an_engine(pooled: Pooled) -> None:
    async with pooled({"a": Engine(), "b": Engine()}, failover=False) as (pool, _):
        pool.engine_lost("a", "killed", restarting=True)
        with pytest.raises(EngineLost, match="a is lost: killed"):
            await seat(pool).generate(request())
