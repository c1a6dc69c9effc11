"""What every inference engine promises, whatever computes behind it. `start_engine` runs these over each."""

import asyncio

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from relax.backends.inference.errors import EngineClosed, EngineError, InvalidRequest, InvalidUpdate

TOLERANCE = 1e-4


async def test_every_request_of_a_call_is_answered_once_within_its_limit(start_engine, make_request, collect):
    requests = [make_request(f"r{n}", seed=n, length=3 + n, max_new_tokens=1 + n) for n in range(10)]
    async with start_engine() as engine:
        answers = [one async for one in engine.generate(requests)]
    assert sorted(one.id for one in answers) == sorted(request.id for request in requests)
    for one in answers:
        limit = 1 + int(one.id[1:])
        assert one.generation.finish_reason == "length"
        assert len(one.generation.tokens) == len(one.generation.logprobs) == limit
        assert one.generation.spans == [(0, 0, limit)]


async def test_logprobs_agree_with_a_fresh_forward(start_engine, make_request, collect):
    requests = [
        make_request(f"r{n}", seed=n, length=2 + 7 * (n % 5), temperature=temperature)
        for n, temperature in enumerate([0.8, 1.0, 1.5, 0.3, 0.0] * 3)
    ]
    async with start_engine() as engine:
        answers = await collect(engine, requests)
    gaps = [start_engine.oracle.worst(request, answers[request.id]) for request in requests]
    assert max(gaps) <= TOLERANCE


async def test_a_stop_token_ends_the_generation_and_is_part_of_it(start_engine, make_request, collect):
    async with start_engine() as engine:
        free = (await collect(engine, [make_request("free", seed=3, max_new_tokens=30)]))["free"]
        stop = int(free.tokens[10])
        first = int(np.flatnonzero(free.tokens == stop)[0])
        stopped = make_request("stopped", seed=3, max_new_tokens=30, stop_token_ids=(stop, 5))
        answer = (await collect(engine, [stopped]))["stopped"]
    assert answer.finish_reason == "stop"
    assert answer.tokens.tolist() == free.tokens[: first + 1].tolist()


async def test_the_same_seed_gives_the_same_tokens_in_any_company(start_engine, make_request, collect):
    alone = make_request("alone", seed=42, max_new_tokens=25)
    async with start_engine() as engine:
        first = (await collect(engine, [alone]))["alone"]
        crowd = [make_request(f"c{n}", seed=n, length=5 + n, max_new_tokens=5 + n) for n in range(20)]
        twin = GenerationRequest("twin", alone.tokens, alone.sampling, seed=43)
        answers = await collect(engine, [*crowd[:10], alone, twin, *crowd[10:]])
    assert answers["alone"].tokens.tolist() == first.tokens.tolist()
    assert answers["twin"].tokens.tolist() != first.tokens.tolist()


async def test_temperature_zero_is_greedy(start_engine, make_request, collect):
    oracle = start_engine.oracle
    request = make_request("greedy", seed=1, temperature=0.0)
    async with start_engine() as engine:
        answer = (await collect(engine, [request]))["greedy"]
    each = oracle.distributions(oracle.weights(0), request.tokens, answer.tokens, 1.0)
    assert answer.tokens.tolist() == each.argmax(axis=1).tolist()
    assert np.abs(each.max(axis=1) - answer.logprobs).max() <= TOLERANCE


async def test_a_response_ends_at_the_context(start_engine, make_request, collect):
    request = make_request("long", seed=1, length=250, max_new_tokens=100)
    async with start_engine() as engine:
        answer = (await collect(engine, [request]))["long"]
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == 6
    assert start_engine.oracle.worst(request, answer) <= TOLERANCE


@pytest.mark.parametrize(("tokens", "message"), [([7] * 256, "256"), ([7, 4000], "4000")])
async def test_what_can_never_be_served_is_refused_by_name_with_its_whole_call(
    start_engine, make_request, collect, tokens, message
):
    bad = GenerationRequest("bad one", np.array(tokens, np.int32), Sampling(), seed=0)
    async with start_engine() as engine:
        with pytest.raises(InvalidRequest, match=f"'bad one'.*{message}"):
            await collect(engine, [make_request("good"), bad])
        assert (await engine.health()).waiting == 0
        assert (await collect(engine, [make_request("good")]))["good"].finish_reason == "length"


async def test_an_id_in_flight_is_refused(start_engine, make_request, collect):
    async with start_engine() as engine:
        with pytest.raises(InvalidRequest, match="'same'"):
            await collect(engine, [make_request("same"), make_request("same")])
        await collect(engine, [make_request("same")])
        await collect(engine, [make_request("same")])


async def test_an_abort_ends_a_request_with_what_it_has(start_engine, make_request):
    long = make_request("long", seed=1, max_new_tokens=240)
    async with start_engine() as engine:
        answers = {}
        async for one in engine.generate([long, make_request("short", max_new_tokens=2)]):
            answers[one.id] = one.generation
            await engine.abort("long")
        await engine.abort("never seen")
    assert answers["long"].finish_reason == "abort"
    assert 1 <= len(answers["long"].tokens) < 240
    assert start_engine.oracle.worst(long, answers["long"]) <= TOLERANCE


async def test_an_update_in_flight_recomputes_and_splits_the_spans(start_engine, make_request):
    oracle = start_engine.oracle
    steps = [make_request(f"step{n}", seed=n, max_new_tokens=1 + 40 * n) for n in range(4)]
    long = [make_request(f"long{n}", seed=10 + n, length=5 + 9 * n, max_new_tokens=190) for n in range(3)]
    async with start_engine() as engine:
        version, answers, retracted = 0, {}, []
        async for one in engine.generate([*steps, *long]):
            answers[one.id] = one.generation
            if one.id.startswith("step"):
                version += 1
                await engine.begin_update(version, oracle.weights(version))
                report = await engine.commit_update(version)
                assert report.version == version
                assert report.pause_seconds > 0
                retracted.append(report.retracted)
        assert (await engine.health()).version == 4
    # A commit right after the last short one finds at least the long ones in flight.
    assert all(count >= 3 for count in retracted)
    for request in [*steps, *long]:
        assert oracle.worst(request, answers[request.id]) <= TOLERANCE
    for request in long:
        spans = answers[request.id].spans
        assert [span[0] for span in spans] == [0, 1, 2, 3, 4]
        assert (spans[0][1], spans[-1][2]) == (0, 190)


async def test_a_staged_version_changes_nothing_until_its_commit(start_engine, make_request, collect):
    oracle = start_engine.oracle
    request = make_request("r", seed=2)
    async with start_engine() as engine:
        before = (await collect(engine, [request]))["r"]
        await engine.begin_update(1, oracle.weights(1))
        staged = (await collect(engine, [request]))["r"]
        await engine.begin_update(2, oracle.weights(2))
        with pytest.raises(InvalidUpdate, match="version 1"):
            await engine.commit_update(1)
        await engine.commit_update(2)
        after = (await collect(engine, [request]))["r"]
    assert before.tokens.tolist() == staged.tokens.tolist()
    assert staged.spans == [(0, 0, 16)]
    assert after.spans == [(2, 0, 16)]
    assert oracle.worst(request, after) <= TOLERANCE


async def test_weights_that_do_not_fit_are_refused_by_name_and_serving_goes_on(
    start_engine, make_request, collect
):
    weights = start_engine.oracle.weights(1)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {
        "lacks": {key: tensor for key, tensor in weights.items() if key != name},
        "float64": weights | {name: weights[name].double()},
        r"\[3, 3\]": weights | {name: torch.zeros(3, 3)},
        "layers.9": weights | {name.replace("layers.1", "layers.9"): weights[name]},
    }
    async with start_engine() as engine:
        for message, tensors in broken.items():
            with pytest.raises(InvalidUpdate, match=message) as error:
                await engine.begin_update(1, tensors)
            assert "up_proj" in str(error.value)
        with pytest.raises(InvalidUpdate, match="version 0"):
            await engine.begin_update(0, weights)
        with pytest.raises(InvalidUpdate, match="begin_update"):
            await engine.commit_update(1)
        answer = (await collect(engine, [make_request("r")]))["r"]
    assert answer.spans == [(0, 0, 16)]


async def test_health_counts_progress(start_engine, make_request, collect):
    async with start_engine() as engine:
        fresh = await engine.health()
        await collect(engine, [make_request(f"r{n}", seed=n, max_new_tokens=9) for n in range(5)])
        busy = await engine.health()
    assert (fresh.alive, fresh.version, fresh.running, fresh.waiting) == (True, 0, 0, 0)
    assert fresh.capacity >= 1
    assert busy.generated_tokens - fresh.generated_tokens == 45
    assert busy.decode_steps > fresh.decode_steps
    assert busy.busy_seconds > fresh.busy_seconds
    assert (busy.running, busy.waiting) == (0, 0)


async def test_closing_fails_what_is_unfinished_and_is_idempotent(start_engine, make_request, collect):
    async with start_engine() as engine:
        stream = engine.generate(
            [make_request("short", max_new_tokens=1), make_request("long", max_new_tokens=240)]
        )
        assert (await anext(stream)).id == "short"
        await asyncio.gather(engine.close(), engine.close())
        await engine.close()
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass
        assert not (await engine.health()).alive
        with pytest.raises(EngineError, match="closed"):
            await collect(engine, [make_request("late")])
        with pytest.raises(EngineError, match="closed"):
            await engine.begin_update(1, start_engine.oracle.weights(1))
