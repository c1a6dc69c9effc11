"""What the transformers engine promises beyond the conformance checks: bits, admission, versions, failure."""

import asyncio
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relax.backends.inference.base import InferenceEngine
from relax.backends.inference.errors import (
    EngineError,
    EngineFailed,
    EngineTimeout,
    NotReady,
    UnknownEngine,
)
from relax.backends.inference.log import EngineLog
from relax.backends.inference.registry import engine_class
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.models import build_model
from torch import nn


def bits(answers):
    return {name: (one.tokens.tobytes(), one.logprobs.tobytes(), one.spans) for name, one in answers.items()}


async def test_the_same_calls_give_the_same_bits_whatever_was_served_before(
    start_transformers, make_request, collect
):
    requests = [make_request(f"r{n}", seed=n, length=4 + 9 * n, max_new_tokens=3 + 5 * n) for n in range(10)]
    history = [make_request(f"h{n}", seed=n, length=190, max_new_tokens=15) for n in range(12)]
    async with start_transformers(max_running=8) as engine:
        fresh = bits(await collect(engine, requests))
    async with start_transformers(max_running=8) as engine:
        await collect(engine, history)
        assert bits(await collect(engine, requests)) == fresh


async def test_more_than_fits_waits_in_order_and_agrees_all_the_same(
    start_transformers, make_request, collect
):
    log = EngineLog()
    requests = [make_request(f"r{n}", seed=n, length=3 + n, max_new_tokens=2 + n % 5) for n in range(11)]
    async with start_transformers(max_running=3, log=log) as engine:
        answers = await collect(engine, requests)
    admitted = [name for kind, what in log.events() if kind == "admit" for name in what]
    assert admitted == [request.id for request in requests]
    assert max(start_transformers.oracle.worst(request, answers[request.id]) for request in requests) <= 1e-4


async def test_equal_prompts_of_a_call_are_prefilled_once(start_transformers, make_request, collect):
    prompts = [make_request("a", seed=1, length=20), make_request("b", seed=2, length=20)]
    group = [
        GenerationRequest(f"{prompt.id}{n}", prompt.tokens, prompt.sampling, seed=n)
        for n in range(8)
        for prompt in prompts
    ]
    shapes = []

    def watch(module, inputs, output):
        if isinstance(module, nn.Embedding):
            shapes.append(tuple(inputs[0].shape))

    async with start_transformers() as engine:
        handle = nn.modules.module.register_module_forward_hook(watch)
        answers = await collect(engine, group)
        handle.remove()
    assert shapes == [(2, 20)] + [(16, 1)] * 15
    assert max(start_transformers.oracle.worst(request, answers[request.id]) for request in group) <= 1e-4
    assert len({answers[request.id].tokens.tobytes() for request in group}) == 16


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.lists(
            st.tuples(st.integers(1, 70), st.integers(1, 40), st.sampled_from([0.0, 0.5, 0.8, 1.3])),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=4,
    ),
    slots=st.integers(1, 7),
)
def test_any_mix_of_lengths_joining_and_leaving_agrees_with_a_fresh_forward(start_transformers, calls, slots):
    rng = np.random.default_rng(len(calls))
    batches = [
        [
            GenerationRequest(
                f"{c}.{n}",
                rng.integers(7, 100, length).astype(np.int32),
                Sampling(temperature, max_new_tokens=new, stop_token_ids=(20, 30, 40)),
                seed=n,
            )
            for n, (length, new, temperature) in enumerate(call)
        ]
        for c, call in enumerate(calls)
    ]

    async def run():
        oracle = start_transformers.oracle
        async with start_transformers(max_running=slots) as engine:

            async def read(batch):
                return {one.id: one.generation async for one in engine.generate(batch)}

            readers = [asyncio.create_task(read(batch)) for batch in batches]
            await engine.begin_update(1, oracle.weights(1))
            await engine.commit_update(1)
            answers = {name: one for found in await asyncio.gather(*readers) for name, one in found.items()}
        for request in (request for batch in batches for request in batch):
            assert oracle.worst(request, answers[request.id]) <= 1e-4

    asyncio.run(run())


@pytest.mark.parametrize("restriction", [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 5, "top_p": 0.7}])
async def test_truncated_sampling_keeps_to_the_most_probable_and_reports_full_logprobs(
    start_transformers, make_request, collect, restriction
):
    oracle = start_transformers.oracle
    request = make_request("r", seed=4, max_new_tokens=40, **restriction)
    async with start_transformers() as engine:
        answer = (await collect(engine, [request]))["r"]
    each = oracle.distributions(oracle.weights(0), request.tokens, answer.tokens, 0.8).astype(np.float64)
    rank = (each > each[np.arange(40), answer.tokens][:, None]).sum(axis=1)
    above = np.where(each > each[np.arange(40), answer.tokens][:, None], np.exp(each), 0).sum(axis=1)
    assert rank.max() < restriction.get("top_k", 103)
    assert above.max() < restriction.get("top_p", 1.0)
    assert len(set(answer.tokens.tolist())) > 2
    assert oracle.worst(request, answer) <= 1e-4


async def test_without_weights_nothing_is_served_until_the_first_commit(
    start_transformers, make_request, collect
):
    async with start_transformers(version=None) as engine:
        assert (await engine.health()).version == -1
        with pytest.raises(NotReady, match="commit a version"):
            await collect(engine, [make_request("early")])
        waiting = asyncio.create_task(engine.wait_version(2, timeout=30))
        await asyncio.sleep(0)
        for version in (1, 2):
            await engine.begin_update(version, start_transformers.oracle.weights(version))
            await engine.commit_update(version)
        assert await waiting == 2
        assert await engine.wait_version(1, timeout=0) == 2
        assert (await collect(engine, [make_request("r")]))["r"].spans == [(2, 0, 16)]


async def test_waiting_for_a_version_ends_at_its_deadline_or_with_the_engine(start_transformers):
    async with start_transformers() as engine:
        with pytest.raises(EngineTimeout, match=r"version 7 was not committed within 0\.01 s"):
            await engine.wait_version(7, timeout=0.01)
        waiting = asyncio.create_task(engine.wait_version(7, timeout=30))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting


async def test_a_folder_with_a_version_serves_at_once(text_oracle, make_request, collect):
    engine = TransformersEngine(text_oracle.folder, version=5, seed=1)
    try:
        answer = (await collect(engine, [make_request("r")]))["r"]
    finally:
        await engine.close()
    assert answer.spans == [(5, 0, 16)]


async def test_a_failure_in_the_compute_thread_reaches_everyone_who_waits(
    start_transformers, make_request, collect
):
    weights = start_transformers.oracle.weights(1)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    async with start_transformers() as engine:
        stream = engine.generate(
            [make_request("short", max_new_tokens=1), make_request("long", max_new_tokens=240)]
        )
        await anext(stream)
        waiting = asyncio.create_task(engine.wait_version(9, timeout=30))
        await engine.begin_update(1, weights)
        await engine.commit_update(1)
        with pytest.raises(EngineFailed, match=r"(?s)Traceback.*'long' got logprob nan.*version 1"):
            await anext(stream)
        with pytest.raises(EngineFailed, match="Traceback"):
            await waiting
        health = await engine.health()
        assert (health.alive, health.version) == (False, 1)
        with pytest.raises(EngineFailed, match="Traceback"):
            await collect(engine, [make_request("late")])


async def test_a_reader_that_leaves_early_frees_its_slots(start_transformers, make_request, collect):
    log = EngineLog()
    async with start_transformers(max_running=2, log=log) as engine:
        left = engine.generate([make_request("a", max_new_tokens=240), make_request("b", max_new_tokens=1)])
        assert (await anext(left)).id == "b"
        await left.aclose()
        await left.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(left)
        cancelled = engine.generate([make_request("c", max_new_tokens=240)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(cancelled)
        await collect(
            engine, [make_request("d", seed=1, max_new_tokens=240), make_request("e", max_new_tokens=1)]
        )
        health = await engine.health()
    assert [what for kind, what in log.events() if kind == "abort"] == ["a", "c"]
    assert (health.running, health.waiting) == (0, 0)


async def test_close_leaves_no_thread(start_transformers, make_request, collect):
    before = set(threading.enumerate())
    async with start_transformers() as engine:
        await collect(engine, [make_request("r")])
        assert any(thread.name == "relax-engine" for thread in set(threading.enumerate()) - before)
    assert not any(thread.name == "relax-engine" for thread in set(threading.enumerate()) - before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running is 0"),
        ({"capacity_tokens": 1000}, "capacity_tokens is 1000; expected 2 to 256"),
        ({"version": -2}, "version is -2"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(text_oracle, options, message):
    with pytest.raises(EngineError, match=message):
        TransformersEngine(text_oracle.folder, **options)


async def test_bfloat16_agrees_with_a_bfloat16_forward_to_its_precision(text_oracle, make_request, collect):
    requests = [make_request(f"r{n}", seed=2**64 - 1 - n, length=5 + n) for n in range(4)]
    model = build_model(text_oracle.folder, "bfloat16", seed=2)
    engine = TransformersEngine(text_oracle.folder, version=0, seed=2, dtype="bfloat16")
    try:
        answers = await collect(engine, requests)
    finally:
        await engine.close()
    for request in requests:
        answer = answers[request.id]
        tokens = torch.from_numpy(np.concatenate([request.tokens, answer.tokens]).astype(np.int64))[None]
        with torch.inference_mode():
            each = torch.log_softmax(model(input_ids=tokens).logits[0].float() / 0.8, dim=-1).numpy()
        expected = each[len(request.tokens) - 1 : -1][np.arange(16), answer.tokens]
        assert np.abs(expected - answer.logprobs).max() < 0.03


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2"},
        {"attention_bias": True, "tie_word_embeddings": False},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ],
    ids=["llama", "qwen2", "qwen3-biases-untied", "qwen3-dynamic-rope"],
)
async def test_other_models_of_plain_attention_agree_too(tmp_path, text_oracle, make_request, changes):
    config = json.loads((text_oracle.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    oracle = type(text_oracle)(tmp_path)
    requests = [make_request(f"r{n}", seed=n, length=5 + 20 * n, max_new_tokens=10 * n + 1) for n in range(4)]
    engine = TransformersEngine(tmp_path)
    try:
        for version in (0, 1):
            await engine.begin_update(version, oracle.weights(version))
            await engine.commit_update(version)
            answers = [one async for one in engine.generate(requests)]
            for one in answers:
                assert oracle.worst(requests[int(one.id[1:])], one.generation) <= 1e-4
    finally:
        await engine.close()


def test_a_model_with_sliding_windows_is_refused(tmp_path, text_oracle):
    config = json.loads((text_oracle.folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="sliding_attention"):
        TransformersEngine(tmp_path, version=0)


def test_the_engine_is_an_inference_engine_and_names_its_weights(text_oracle):
    engine: InferenceEngine = TransformersEngine(text_oracle.folder)
    assert isinstance(engine, TransformersEngine)
    weights = text_oracle.weights(0)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in engine.weights().items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()
    }
    asyncio.run(engine.close())


def test_roles_that_speak_to_an_engine_need_not_import_torch():
    names = [f"relax.backends.inference.{name}" for name in ("base", "errors", "log", "registry", "streams")]
    program = f"import sys, {', '.join(names)}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_engines_are_found_by_name_or_import_path():
    path = "relax.backends.inference.transformers_engine:TransformersEngine"
    assert engine_class("transformers") is engine_class(path) is TransformersEngine
    for wrong in ("transformer", "no_such_package:Engine", "relax.backends.inference.log:Nothing", "math:pi"):
        with pytest.raises(UnknownEngine, match=wrong):
            engine_class(wrong)
