"""The fronts of an engine: what arrives together is sent together, and lockstep sends in one order only."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from agentic import Generation, GenerationRequest, Sampling
from relax.backends.inference.base import FinishedGeneration, Health, UpdateReport
from relax.backends.inference.errors import InvalidRequest
from relax.engine.batching import Coalescing, Lockstep


class Recorder:
    """An engine that notes its calls and answers each request with its own first token."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.fault: Exception | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        self.calls.append([request.id for request in requests])
        for request in reversed(requests):
            await asyncio.sleep(0)
            if self.fault is not None:
                raise self.fault
            yield FinishedGeneration(
                request.id,
                Generation(request.tokens[:1], np.zeros(1, np.float32), [(0, 0, 1)], "stop"),
            )

    async def abort(self, request_id: str) -> None: ...

    def weights(self) -> Mapping[str, Any]:
        return {}

    async def begin_update(self, version: int, tensors: Mapping[str, Any]) -> None: ...

    async def commit_update(self, version: int) -> UpdateReport:
        return UpdateReport(version, 0.0, 0)

    async def health(self) -> Health:
        return Health(True, 0, 0, 0, 1, 0, 0, 0.0)

    async def close(self) -> None: ...


def request(name: str, token: int = 1) -> GenerationRequest:
    return GenerationRequest(name, np.array([token], np.int32), Sampling(max_new_tokens=1), seed=0)


async def test_requests_of_one_loop_turn_are_one_call() -> None:
    engine = Recorder()
    front = Coalescing(engine)
    answers = await asyncio.gather(*(front.generate(request(f"r{i}", i + 5)) for i in range(4)))
    assert engine.calls == [["r0", "r1", "r2", "r3"]]
    assert [int(answer.tokens[0]) for answer in answers] == [5, 6, 7, 8]


async def test_a_request_that_cannot_be_served_fails_alone() -> None:
    """The others of its call, which may be of other groups, are asked again."""

    class Picky(Recorder):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
            if len(requests) > 1:
                async for finished in super().generate(requests[-1:]):
                    yield finished
            if any(request.id == "bad" for request in requests):
                raise InvalidRequest("too long")
            async for finished in super().generate(requests):
                yield finished

    engine = Picky()
    front = Coalescing(engine)
    asked = [front.generate(request(name, token)) for token, name in enumerate(("a", "bad", "b", "c"), 5)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in answers if isinstance(error, InvalidRequest)] == ["too long"]
    assert [int(one.tokens[0]) for one in answers if isinstance(one, Generation)] == [5, 7, 8]
    assert engine.calls == [["c"], ["a"], ["b"]]  # and not c again, which was there already
    await front.close()


async def test_lockstep_waits_for_every_live_episode_and_sends_by_id() -> None:
    engine = Recorder()
    front = Lockstep(engine)
    front.enter(3)
    asked = [asyncio.create_task(front.generate(request(name))) for name in ("c", "a")]
    await asyncio.sleep(0.01)
    assert engine.calls == []
    front.leave()
    await asyncio.gather(*asked)
    assert engine.calls == [["a", "c"]]


async def test_an_engine_fault_reaches_every_caller() -> None:
    engine = Recorder()
    engine.fault = RuntimeError("gone")
    front = Coalescing(engine)
    answers = await asyncio.gather(
        *(front.generate(request(f"r{i}")) for i in range(3)), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["gone"] * 3


async def test_an_id_that_is_running_is_refused() -> None:
    front = Coalescing(Recorder())
    first = asyncio.create_task(front.generate(request("same")))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="already running"):
        await front.generate(request("same"))
    await first
