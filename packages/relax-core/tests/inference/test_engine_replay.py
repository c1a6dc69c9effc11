"""A run whose timing was accidental is replayed bit for bit from the engine's log."""

import asyncio
import json

import numpy as np
import pytest
from relax.backends.inference.errors import EngineFailed, ReplayMismatch
from relax.backends.inference.log import EngineLog


async def jitter(rng):
    for _ in range(int(rng.integers(0, 400))):
        await asyncio.sleep(0)


async def test_a_run_with_jitter_updates_and_aborts_replays_bit_for_bit(start_transformers, make_request):
    oracle = start_transformers.oracle
    requests = [
        make_request(f"r{n}", seed=n, length=3 + 4 * (n % 9), max_new_tokens=5 + 11 * (n % 7))
        for n in range(40)
    ]
    aborted = {"r6", "r13", "r20"}

    async def accidental(engine):
        rng = np.random.default_rng()

        async def ask(request):
            await jitter(rng)
            async for one in engine.generate([request]):
                return one

        async def end(name):
            await jitter(rng)
            await engine.abort(name)

        async def update():
            for version in (1, 2, 3):
                await jitter(rng)
                await engine.begin_update(version, oracle.weights(version))
                await engine.commit_update(version)

        others = [asyncio.create_task(call) for call in (update(), *map(end, aborted))]
        found = [one for one in await asyncio.gather(*map(ask, requests)) if one is not None]
        await asyncio.gather(*others)
        return {one.id: one.generation for one in found}

    async def replayed(engine):
        async def update():
            for version in (1, 2, 3):
                await engine.begin_update(version, oracle.weights(version))
                await engine.commit_update(version)

        updating = asyncio.create_task(update())
        answers = {one.id: one.generation async for one in engine.generate(requests[::-1])}
        await updating
        return answers

    recorded, again = EngineLog(), EngineLog()
    async with start_transformers(max_running=6, log=recorded) as engine:
        first = await accidental(engine)
    events = json.loads(json.dumps(recorded.events()))
    async with start_transformers(max_running=6, log=again, replay=events) as engine:
        second = await replayed(engine)
    assert again.events() == recorded.events()
    for name, one in first.items():
        assert one.tokens.tobytes() == second[name].tokens.tobytes()
        assert one.logprobs.tobytes() == second[name].logprobs.tobytes()
        assert (one.spans, one.finish_reason) == (second[name].spans, second[name].finish_reason)
    # It was worth replaying: several admissions, and versions that changed in flight.
    assert sum(kind == "admit" for kind, _ in events) > 3
    assert {version for one in first.values() for version, _, _ in one.spans} > {3}


async def test_after_its_last_event_a_replay_goes_on_live(start_transformers, make_request, collect):
    log = EngineLog()
    async with start_transformers(log=log) as engine:
        first = await collect(engine, [make_request("a")])
    events = log.take()
    assert events == [["commit", 0], ["admit", ["a"]], ["decode", 15]]
    assert log.events() == []
    async with start_transformers(log=log, replay=events) as engine:
        # The log knows nothing of b: it waits for the end of the log, whatever the order of arrival.
        both = await collect(engine, [make_request("b", seed=1), make_request("a")])
    assert both["a"].logprobs.tobytes() == first["a"].logprobs.tobytes()
    assert log.events() == [*events, ["admit", ["b"]], ["decode", 15]]


async def test_a_version_that_the_log_skips_is_refused(start_transformers):
    events = [["commit", 0], ["admit", ["a"]], ["decode", 15], ["commit", 4]]
    async with start_transformers(replay=events) as engine:
        await engine.begin_update(2, start_transformers.oracle.weights(2))
        with pytest.raises(ReplayMismatch, match=r"version 2 .* commits \[0, 4\]"):
            await engine.commit_update(2)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([["admit", ["a"]], ["decode", 15]], "nothing runs"),
        ([["admit", ["a", "b"]]], "1 slots are free"),
        ([["sing", "a"]], "unknown kind 'sing'"),
    ],
)
async def test_a_replay_that_diverges_fails_instead_of_hanging(
    start_transformers, make_request, collect, events, message
):
    requests = [make_request("a", max_new_tokens=3), make_request("b", max_new_tokens=3)]
    async with start_transformers(max_running=1, replay=[["commit", 0], *events]) as engine:
        with pytest.raises(EngineFailed, match=message):
            await collect(engine, requests)
