"""The `sglang` engine against a real server on CPUs, given by its address; one server for all tests here."""

import asyncio
import runpy
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.models import build_model
from relax.backends.tiny import write_tiny
from relax.config.roles import RolloutSettings

pytestmark = pytest.mark.timeout(600)  # the server starts within the first test

SUITE = Path(__file__).parents[2] / "packages" / "relax-core" / "tests" / "inference"
DRAWN_BY_SEED = (
    "test_a_stop_token_ends_the_generation_and_is_part_of_it",
    "test_the_same_seed_gives_the_same_tokens_in_any_company",
    "test_a_staged_version_changes_nothing_until_its_commit",
)
"""SGLang draws by seeds with `rollout.sglang.deterministic`, which it has on GPUs only."""

CONTEXT = 256
TOLERANCE = 1e-4

torch.set_num_threads(1)
globals().update(
    {
        name: check
        for name, check in runpy.run_path(str(SUITE / "test_conformance.py")).items()
        if name.startswith("test_") and name not in DRAWN_BY_SEED
    }
)
Start = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Logprobs by one full forward of the plain Hugging Face model."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2 * CONTEXT)
    build_model(folder).save_pretrained(folder)
    return runpy.run_path(str(SUITE / "conftest.py"))["Oracle"](folder)


@pytest.fixture(scope="module")
def server(launch_sglang: Callable[..., Any], oracle: Any) -> Any:
    return launch_sglang(
        oracle.folder, "--context-length", str(CONTEXT + 8), "--incremental-streaming-output"
    )


@dataclass
class Factory:
    """Engines over the one server, each at `oracle.weights(version)`."""

    oracle: Any
    server: Any
    run_folder: Path

    def spec(self, **sglang: Any) -> EngineSpec:
        settings = RolloutSettings(
            engine="sglang",
            sglang={"urls": [self.server.url], **sglang},  # pyright: ignore[reportArgumentType]
        )
        return EngineSpec(
            "engine-0",
            self.oracle.folder,
            max_running=16,
            capacity_tokens=CONTEXT,
            run_folder=self.run_folder,
            settings=settings,
        )

    @asynccontextmanager
    async def __call__(self, *, version: int | None = 0, **sglang: Any) -> AsyncIterator[SglangEngine]:
        engine = await SglangEngine.create(self.spec(**sglang))
        try:
            if version is not None:
                await engine.begin_update(version, self.oracle.weights(version))
                await engine.commit_update(version)
            yield engine
        finally:
            await engine.close()


@pytest.fixture
def start_engine(oracle: Any, server: Any, tmp_path: Path) -> Factory:
    return Factory(oracle, server, tmp_path)


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    def make(name: str, seed: int = 0, length: int = 12, **sampling: Any) -> GenerationRequest:
        tokens = np.random.default_rng(seed).integers(7, 100, length).astype(np.int32)
        settings = {"temperature": 0.8, "max_new_tokens": 16} | sampling
        return GenerationRequest(name, tokens, Sampling(**settings), seed)

    return make


@pytest.fixture
def collect() -> Callable[..., Any]:
    async def read(engine: SglangEngine, requests: list[GenerationRequest]) -> dict[str, Any]:
        return {one.id: one.generation async for one in engine.generate(requests)}

    return read


async def test_a_stop_token_ends_a_greedy_generation(start_engine, make_request, collect):
    async with start_engine() as engine:
        free = (await collect(engine, [make_request("free", temperature=0.0, max_new_tokens=30)]))["free"]
        stop = int(free.tokens[10])
        first = int(np.flatnonzero(free.tokens == stop)[0])
        stopped = make_request("stopped", temperature=0.0, max_new_tokens=30, stop_token_ids=(stop,))
        answer = (await collect(engine, [stopped]))["stopped"]
    assert answer.finish_reason == "stop"
    assert answer.tokens.tolist() == free.tokens[: first + 1].tolist()


async def test_the_models_own_end_token_ends_nothing_that_the_run_does_not_end(
    start_engine, make_request, collect
):
    """The server stops there once there are stop tokens; the engine asks again, and the answer is one."""
    oracle = start_engine.oracle
    own = oracle.model.config.eos_token_id
    weights = oracle.weights(0)
    head = "model.embed_tokens.weight"
    likely = weights | {head: weights[head].clone()}
    likely[head][own] = likely[head].mean(0) * 3  # said now and then
    request = make_request("r", seed=5, max_new_tokens=200, temperature=2.0, stop_token_ids=(3,))
    async with start_engine(version=None) as engine:
        await engine.begin_update(0, likely)
        await engine.commit_update(0)
        answers = [(await collect(engine, [request]))["r"]]
        while own not in answers[-1].tokens[:-1] and len(answers) < 100:  # it draws without a seed
            answers.append((await collect(engine, [request]))["r"])
    assert own in answers[-1].tokens[:-1]
    for answer in answers:
        assert (answer.finish_reason == "stop") == (answer.tokens[-1] == 3)
        assert answer.finish_reason == "stop" or len(answer.tokens) == 200
        expected = oracle.logprobs(likely, request.tokens, answer.tokens, 2.0)
        assert np.abs(expected - answer.logprobs).max() <= TOLERANCE


async def test_a_staged_version_is_not_seen_before_its_commit(start_engine, make_request, collect):
    request = make_request("r", temperature=0.0)
    async with start_engine() as engine:
        before = (await collect(engine, [request]))["r"]
        await engine.begin_update(2, start_engine.oracle.weights(2))
        staged = (await collect(engine, [request]))["r"]
        await engine.commit_update(2)
        after = (await collect(engine, [request]))["r"]
        assert await engine.wait_version(1, 1.0) == 2
    assert before.tokens.tolist() == staged.tokens.tolist()
    assert (staged.spans, after.spans) == ([(0, 0, 16)], [(2, 0, 16)])
    assert start_engine.oracle.worst(request, after) <= TOLERANCE


@pytest.mark.parametrize("way", ["distributed", "tensor", "disk"])
async def test_three_versions_agree_with_the_trainer_by_every_way(
    way, start_engine, make_request, collect, capsys
):
    pauses = []
    async with start_engine(version=None, weights=way) as engine:
        for version in range(4):
            await engine.begin_update(version, start_engine.oracle.weights(version))
            pauses.append((await engine.commit_update(version)).pause_seconds)
            requests = [make_request(f"r{n}", seed=n, length=5 + 20 * n) for n in range(4)]
            answers = await collect(engine, requests)
            assert all(answer.spans == [(version, 0, 16)] for answer in answers.values())
            worst = max(start_engine.oracle.worst(one, answers[one.id]) for one in requests)
            assert worst <= TOLERANCE
    with capsys.disabled():
        print(f"\n{way}: paused for {', '.join(f'{1e3 * pause:.0f}' for pause in pauses)} ms")


@pytest.mark.parametrize("pause", ["retract", "resume", "in_place"])
async def test_a_generation_goes_on_over_an_update_and_keeps_its_spans(pause, start_engine, make_request):
    long = [make_request(f"long{n}", seed=n, length=5 + 9 * n, max_new_tokens=200) for n in range(3)]
    short = make_request("short", max_new_tokens=30)
    answers = {}
    async with start_engine(pause=pause) as engine:
        async for one in engine.generate([*long, short]):
            answers[one.id] = one.generation
            if one.id == "short":
                await engine.begin_update(1, start_engine.oracle.weights(1))
                assert (await engine.commit_update(1)).retracted == 3
    for request in long:
        (first, second) = answers[request.id].spans
        assert (first[0], first[1], second[0], second[2]) == (0, 0, 1, 200)
        if pause != "in_place":  # whose cache is of the old weights
            assert start_engine.oracle.worst(request, answers[request.id]) <= TOLERANCE


async def test_a_reader_that_leaves_ends_its_requests_on_the_server(start_engine, make_request):
    async with start_engine() as engine:
        stream = engine.generate([make_request("a", max_new_tokens=1), make_request("b", max_new_tokens=240)])
        assert (await anext(stream)).id == "a"
        await stream.aclose()
        async with asyncio.timeout(30):
            while (health := await engine.health()).running or health.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_two_engines_of_one_server_do_not_end_each_others_requests(start_engine, make_request, collect):
    async with start_engine() as one, start_engine(version=None) as other:
        long = one.generate([make_request("1", max_new_tokens=200)])
        first = asyncio.ensure_future(anext(long))
        await other.abort("1")
        await other.close()
        assert (await first).generation.finish_reason == "length"


async def test_a_server_that_cannot_do_what_is_asked_is_refused(start_engine):
    for settings, message in (
        ({"deterministic": True}, "enable-deterministic-inference"),
        ({"urls": ["http://127.0.0.1:9"]}, "no SGLang server answers at http://127.0.0.1:9"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
    ):
        with pytest.raises(EngineError, match=message):
            await SglangEngine.create(start_engine.spec(**settings))
