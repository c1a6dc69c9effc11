"""The `sglang` engine against a server that misbehaves: a small one, which says what a test tells it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from aiohttp import web
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineClosed, EngineError, EngineLost, InvalidRequest
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.models import build_model
from relax.backends.tiny import write_tiny
from relax.config.roles import RolloutSettings
from safetensors.torch import save_file

STALL_SECONDS = 0.4
Talk = Callable[["Server", web.StreamResponse, dict[str, Any]], Awaitable[None]]


def piece(index: int, tokens: list[int], total: int, finish: str | None = None, **more: Any) -> str:
    meta: dict[str, Any] = {
        "finish_reason": None if finish is None else {"type": finish},
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "output_token_logprobs_length": total,
        "weight_version": "0",
    } | more
    return f"data: {json.dumps({'index': index, 'meta_info': meta})}\n\n"


@dataclass
class Server:
    """What it is asked is in `calls`; `talk` answers `/generate`, `status` the other posts, by path."""

    url: str = ""
    talk: Talk | None = None
    status: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=lambda: {"max_req_input_len": 66, "tp_size": 1})
    steps: int = 0
    silent: bool = False
    poison: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    async def get(self, request: web.Request) -> web.Response:
        if request.path == "/v1/loads":
            if self.silent:
                await asyncio.sleep(1000)
            return web.json_response(
                {"loads": [{"decode_moments": [self.steps, self.steps], "num_running_reqs": 1}]}
            )
        return web.json_response(self.info)

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append((request.path, body))
        status = self.status.get(request.path, 200)
        if self.poison and any(rid.endswith(self.poison) for rid in body.get("rid", ())):
            status = 500
        if status != 200:
            return web.Response(status=status, text="no")
        if request.path != "/generate":
            return web.json_response({})
        answer = web.StreamResponse()
        await answer.prepare(request)
        assert self.talk is not None
        await self.talk(self, answer, body)
        return answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("GET", "/{path:.*}", found.get)
    app.router.add_route("POST", "/{path:.*}", found.post)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as far as anybody looks into it here."""
    made = tmp_path_factory.mktemp("model")
    save_file({"w": torch.zeros(4, 3)}, made / "model.safetensors")
    (made / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 50, "num_hidden_layers": 1})
    )
    return made


@pytest.fixture
def start(server: Server, folder: Path, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def started(**sglang: Any) -> AsyncIterator[SglangEngine]:
        given = {"urls": [server.url], "weights": "tensor", "health_seconds": 0.3, **sglang}
        settings = RolloutSettings(sglang=given, stall_seconds=STALL_SECONDS)  # pyright: ignore[reportArgumentType]
        engine = await SglangEngine.create(
            EngineSpec("engine-0", folder, run_folder=tmp_path, settings=settings)
        )
        try:
            await engine.begin_update(0, {"w": torch.ones(4, 3)})
            await engine.commit_update(0)
            yield engine
        finally:
            await engine.close()

    return started


def ask(*names: str, length: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(n, np.array([1, 2], np.int32), Sampling(max_new_tokens=length), 0) for n in names
    ]


async def read(engine: SglangEngine, requests: list[GenerationRequest]) -> dict[str, Any]:
    async with asyncio.timeout(20):
        return {one.id: one.generation async for one in engine.generate(requests)}


def saying(*messages: str, then: Callable[[web.StreamResponse], Awaitable[Any]] | None = None) -> Talk:
    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        for message in messages:
            await answer.write(message.encode())
        if then is not None:
            await then(answer)

    return talk


async def broken_off(answer: web.StreamResponse) -> None:
    assert answer._req is not None
    assert answer._req.transport is not None
    await asyncio.sleep(0.05)
    answer._req.transport.abort()


async def for_ever(answer: web.StreamResponse) -> None:
    await asyncio.sleep(1000)


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        (saying("data: {nonsense\n\n"), "sent what is no answer"),
        (saying('data: {"index": 0, "meta_info": {"output_token_logprobs": 3}}\n\n'), "what is no answer"),
        (saying(piece(4, [5], 1)), "about request 4 of 1"),
        (saying(piece(0, [5], 1), "data: [DONE]\n\n"), "1 of 1 requests unfinished"),
        (saying(piece(0, [5], 1)), "ended in the middle of a stream"),
        (saying(piece(0, [5], 1), then=broken_off), "generate"),
        (saying(piece(0, [5], 1, "length"), "data: [DONE]\n\n"), "there is room for 8"),
        (saying(piece(0, [5], 3)), "tokens 2 to 3 of its answer, and 0 have come"),
        (saying(piece(0, [], 0, "stop"), "data: [DONE]\n\n"), "was stopped by None"),
        (saying('data: {"error": {"message": "busy", "code": 503}}\n\n'), "answered 503: busy, 8 times"),
        (saying(piece(0, [50], 1)), "token 50 was sampled, and the vocabulary is 0 to 49"),
        (saying(piece(0, [-1], 1)), "token -1 was sampled"),
        (saying(piece(0, list(range(9)), 9)), "has sampled 9 tokens, and 8 were asked for"),
        (saying(piece(0, [5], 1, output_token_logprobs=[[None, 5, None]])), "with the logprob None"),
        (saying(piece(0, [5], 1, output_token_logprobs=[[0.5, 5, None]])), "with the logprob 0.5"),
        (saying(piece(0, [5], 1, output_token_logprobs=[[float("nan"), 5, None]])), "what is no answer"),
        (saying(piece(0, [5], 1, output_token_logprobs=[["-1", 5, None]])), "what is no answer"),
        (saying(piece(0, [5], 1, output_token_logprobs=[[-1.0, 5.5, None]])), "what is no answer"),
        (saying(piece(0, [5], 1, output_token_logprobs=[])), "tokens 1 to 1 of its answer, and 0 have come"),
        (saying(piece(0, [5], -1)), "tokens -2 to -1 of its answer"),
        (saying(piece(0, [5] * 8, 8, "length", weight_version="3")), "answered by version 3, and 0 is"),
        (saying(piece(0, [5] * 8, 8, "length", weight_version="mine")), "the weights 'mine'"),
        (saying(piece(0, [5] * 8, 8, "length"), piece(0, [5] * 8, 8, "length")), "about request 0 of 2"),
    ],
)
async def test_a_server_that_speaks_nonsense_or_breaks_off_is_lost(talk, message, server, start):
    server.talk = talk
    names = "abcdefgh" if "8 times" in message else "ab" if "of 2" in message else "r"
    async with start() as engine:
        with pytest.raises(EngineLost, match=message):
            await read(engine, ask(*names))
        with pytest.raises(EngineLost, match=message):
            engine.generate(ask("r"))
        assert not (await engine.health()).alive


async def test_what_had_come_before_a_loss_is_handed_on(server, start):
    server.talk = saying(piece(1, [7, 8], 2), piece(0, [5], 1), then=broken_off)
    async with start() as engine:
        with pytest.raises(EngineLost) as error:
            await read(engine, ask("a", "b", "c"))
    found = {name: (kept.tokens.tolist(), kept.spans) for name, kept in error.value.partial.items()}
    assert found == {"a": ([5], [(0, 0, 1)]), "b": ([7, 8], [(0, 0, 2)])}


async def test_long_messages_in_pieces_are_read(server, start):
    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        message = piece(0, list(range(8)), 8, "length", padding="x" * 300_000) + "data: [DONE]\n\n"
        for at in range(0, len(message), 70_001):
            await answer.write(message[at : at + 70_001].encode())

    server.talk = talk
    async with start() as engine:
        answers = await read(engine, ask("r"))
    assert answers["r"].tokens.tolist() == list(range(8))


async def test_a_refusal_fails_its_call_and_the_engine_serves_on(server, start):
    server.status["/generate"] = 400
    async with start(health_seconds=10.0) as engine:  # a slow machine is no lost server
        with pytest.raises(InvalidRequest, match=r"'r' was refused.*answered 400: no"):
            await read(engine, ask("r"))
        server.status.clear()
        server.talk = saying(piece(0, [5], 1), 'data: {"error": {"message": "too long", "code": 400}}\n\n')
        with pytest.raises(InvalidRequest, match="too long"):
            await read(engine, ask("a", "b"))
        server.talk = saying(piece(0, list(range(8)), 8, "length"), "data: [DONE]\n\n")
        assert len((await read(engine, ask("r")))["r"].tokens) == 8
        async with asyncio.timeout(5):
            while not [path for path, _ in server.calls if path == "/abort_request"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the other of the call that failed half way


async def answered(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    for index, _ in enumerate(body["rid"]):
        await answer.write(piece(index, list(range(8)), 8, "length").encode())
    await answer.write(b"data: [DONE]\n\n")


def of(body: dict[str, Any]) -> list[str]:
    return [rid.rpartition(".")[2] for rid in body["rid"]]


async def test_an_error_of_the_server_is_asked_again_each_request_alone(server, start):
    """Nobody knows whose error it was: what came of the call is forgotten, and the rest of it ended there."""
    calls: list[list[str]] = []

    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        calls.append(of(body))
        if len(calls) > 1:
            await answered(answer, body)
        else:
            fault = {"error": {"message": "out of memory", "code": 500}}
            await answer.write((piece(1, [7], 1) + f"data: {json.dumps(fault)}\n\n").encode())

    server.talk = talk
    async with start(health_seconds=10.0) as engine:
        answers = await read(engine, ask("a", "b", "c"))
        assert (await engine.health()).alive
    assert calls[0] == ["a", "b", "c"]
    assert sorted(calls[1:]) == [["a"], ["b"], ["c"]]
    assert {name: one.tokens.tolist() for name, one in answers.items()} == {
        name: [*range(8)] for name in "abc"
    }
    first = next(body["rid"] for path, body in server.calls if path == "/generate")
    ended = [body["rid"] for path, body in server.calls if path == "/abort_request"]
    assert sorted(ended) == sorted(first)


@pytest.mark.parametrize("how", ["a message", "a status", "an end"])
async def test_a_request_that_a_server_cannot_serve_fails_alone(how, server, start):
    """Neither is the engine lost for it, again and again, nor is the request asked for without an end."""
    tries = []

    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        if "poison" not in of(body):
            await answered(answer, body)
            return
        tries.append(body)
        if how == "a message":
            await answer.write(b'data: {"error": {"message": "no room", "code": 500}}\n\n')
        else:
            reason = {"type": "abort", "message": "no room", "status_code": 500}
            await answer.write(piece(0, [5], 1, finish_reason=reason).encode() + b"data: [DONE]\n\n")

    server.talk = talk
    server.poison = "poison" if how == "a status" else ""
    async with start(health_seconds=10.0) as engine:
        for _ in range(4):  # more faults than lose an engine, but with answers between
            with pytest.raises(InvalidRequest, match=r"'poison' was refused .*, 3 times: .* 500: no"):
                await read(engine, ask("poison"))
            assert len((await read(engine, ask("good")))["good"].tokens) == 8
        assert (await engine.health()).alive
    assert len(tries) == (0 if how == "a status" else 12)


async def test_a_server_that_drips_without_a_token_is_lost(server, start):
    async def dripping(answer: web.StreamResponse) -> None:
        while True:
            await answer.write(piece(0, [], 1).encode() + b": still there\n\n")
            await asyncio.sleep(STALL_SECONDS / 20)

    server.talk = saying(piece(0, [5], 1), then=dripping)
    async with start() as engine:
        with pytest.raises(EngineLost, match="has 1 requests and has not got on for"):
            await read(engine, ask("r"))


@pytest.mark.parametrize("silent", [False, True])
async def test_a_server_that_does_not_get_on_is_lost_whether_or_not_it_answers(silent, server, start):
    server.talk = saying(piece(0, [5], 1), then=for_ever)
    async with start() as engine:
        server.silent = silent
        with pytest.raises(EngineLost, match="has 1 requests and has not got on for"):
            await read(engine, ask("r"))


async def test_a_server_that_gets_on_without_a_word_is_left_alone(server, start):
    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        for _ in range(15):
            server.steps += 1
            await asyncio.sleep(STALL_SECONDS / 5)
        await answer.write(piece(0, list(range(8)), 8, "length").encode() + b"data: [DONE]\n\n")

    server.talk = talk
    async with start() as engine:
        before = await engine.health()
        answers = await read(engine, ask("r"))
        after = await engine.health()
    assert answers["r"].finish_reason == "length"
    assert after.decode_steps - before.decode_steps == 15
    assert after.generated_tokens == 8


async def test_health_of_a_silent_server_keeps_its_numbers(server, start):
    async with start() as engine:
        server.steps = 4
        assert (await engine.health()).decode_steps == 4
        server.silent, server.steps = True, 9
        silent = await engine.health()
    assert (silent.alive, silent.decode_steps) == (True, 4)


@pytest.mark.parametrize(
    ("weights", "path"),
    [
        ("tensor", "/update_weights_from_tensor"),
        ("tensor", "/end_weight_update"),
        ("disk", "/update_weights_from_disk"),
        ("disk", "/continue_generation"),
    ],
)
async def test_a_version_that_did_not_go_in_whole_loses_the_engine(weights, path, server, start):
    async with start(weights=weights) as engine:
        server.status[path] = 500
        await engine.begin_update(1, {"w": torch.ones(4, 3)})
        waiting = asyncio.ensure_future(engine.wait_version(1, 20.0))
        with pytest.raises(EngineLost, match="version 1 failed half way"):
            await engine.commit_update(1)
        with pytest.raises(EngineLost):
            await waiting


async def test_requests_wait_for_a_version_that_ends_what_runs(server, start):
    """`resume`: what the server ended for the version is asked again with what it has, of the new version."""
    paused = asyncio.Event()

    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        if len(body["input_ids"][0]) == 2:  # the first time
            await answer.write(piece(0, [5, 6], 2).encode())
            await paused.wait()
            await answer.write(piece(0, [7], 3, "abort").encode() + b"data: [DONE]\n\n")
        else:
            entry = piece(0, [1] * 5, 5, "length", weight_versions=[{"version": "1", "start": 0, "end": 5}])
            await answer.write(entry.encode() + b"data: [DONE]\n\n")

    server.talk = talk
    async with start(pause="resume") as engine:
        reading = asyncio.ensure_future(read(engine, ask("r")))
        async with asyncio.timeout(10):
            while (await engine.health()).generated_tokens < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await engine.begin_update(1, {"w": torch.ones(4, 3)})
        committing = asyncio.ensure_future(engine.commit_update(1))
        async with asyncio.timeout(10):
            while ("/pause_generation", {"mode": "abort"}) not in server.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        paused.set()
        assert (await committing).retracted == 1
        (generation,) = (await reading).values()
    assert generation.tokens.tolist() == [5, 6, 7, 1, 1, 1, 1, 1]
    assert generation.spans == [(0, 0, 3), (1, 3, 8)]
    again = [body for path, body in server.calls if path == "/generate"][1]
    assert again["input_ids"] == [[1, 2, 5, 6, 7]]
    assert again["extra_key"] == ["v1"]


async def test_closing_ends_requests_on_a_server_that_goes_on(server, start):
    server.talk = saying(piece(0, [5], 1), then=for_ever)
    async with start() as engine:
        reading = asyncio.ensure_future(read(engine, ask("r")))
        async with asyncio.timeout(10):
            while (await engine.health()).generated_tokens < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineClosed):
            await reading
    (ended,) = [body["rid"] for path, body in server.calls if path == "/abort_request"]
    assert ended.endswith(".r")


@pytest.mark.parametrize(
    ("info", "settings", "message"),
    [
        ({"dp_size": 2}, {}, "set rollout.sglang.weights=disk"),
        ({"max_req_input_len": 3}, {}, "has no room for a prompt and an answer"),
        ({"tp_size": "two"}, {}, "answered what no SGLang server answers"),
        ({}, {"deterministic": True}, "--enable-deterministic-inference"),
    ],
)
async def test_a_server_of_another_kind_is_refused(info, settings, message, server, start):
    server.info |= info
    with pytest.raises(EngineError, match=message):
        async with start(**settings):
            pass


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that sees, with weights."""
    made = write_tiny(tmp_path_factory.mktemp("vision"), "qwen3_vl")
    build_model(made).save_pretrained(made)
    return made


@pytest.fixture
async def shown(server: Server, seeing: Path, tmp_path: Path) -> AsyncIterator[SglangEngine]:
    """An engine of it, at version 0."""
    settings = RolloutSettings(sglang={"urls": [server.url], "weights": "tensor"}, stall_seconds=30.0)  # pyright: ignore[reportArgumentType]
    engine = await SglangEngine.create(EngineSpec("engine-0", seeing, run_folder=tmp_path, settings=settings))
    await put(engine, 0)
    yield engine
    await engine.close()


async def put(engine: SglangEngine, version: int) -> None:
    weights = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in engine.weights().items()}
    await engine.begin_update(version, weights)
    await engine.commit_update(version)


PROMPT = [9, 3, *[5] * 4, 4]


def showing() -> GenerationRequest:
    picture = {"pixel_values": np.ones((16, 1536), np.float32), "image_grid_thw": np.array([[1, 4, 4]])}
    return GenerationRequest("r", np.array(PROMPT, np.int32), Sampling(max_new_tokens=2), 0, [picture])


def told(prompt: list[int] | None, version: int = 0, tokens: tuple[int, int] = (7, 8)) -> str:
    """An answer of two tokens, by weights of that version, to that prompt."""
    spans = [{"version": str(version), "start": 0, "end": 2}]
    message = json.loads(piece(0, list(tokens), 2, "length", weight_versions=spans)[6:])
    return f"data: {json.dumps(message | {'prompt_token_ids': prompt})}\n\ndata: [DONE]\n\n"


async def test_a_server_that_makes_another_prompt_of_a_picture_is_told_of_and_serves_on(server, shown):
    """Whatever it makes of a picture: no answer to another prompt than the trainer's gets through."""
    for prompt, message in (
        ([9, 3, *[5] * 6, 4], "has 7 tokens, and .* makes 9 tokens of its prompt"),
        ([8, 3, *[5] * 4, 4], "makes 7 tokens of its prompt"),
        (None, "does not tell its prompt"),
    ):
        server.talk = saying(told(prompt))
        with pytest.raises(InvalidRequest, match=message):
            await read(shown, [showing()])
    server.talk = saying(told(PROMPT))
    assert (await read(shown, [showing()]))["r"].tokens.tolist() == [7, 8]
    bodies = [body for path, body in server.calls if path == "/generate"]
    assert [body["input_ids"] for body in bodies] == [[[9, 3, 5, 4]]] * 4
    assert all(len(files) == 1 for body in bodies for files in body["image_data"])


async def test_an_answer_by_a_version_that_its_pictures_do_not_name_is_asked_again(server, shown):
    """A call that reaches the server while it stands still for a version is answered by that one."""
    asked, there = asyncio.Event(), asyncio.Event()

    async def talk(server: Server, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        again = asked.is_set()
        asked.set()
        await there.wait()
        await answer.write(told(PROMPT, 1, (5, 6) if again else (7, 8)).encode())

    server.talk = talk
    reading = asyncio.ensure_future(read(shown, [showing()]))
    async with asyncio.timeout(20):
        await asked.wait()
        await put(shown, 1)
        there.set()
        generation = (await reading)["r"]
    assert generation.tokens.tolist() == [5, 6]
    assert generation.spans == [(1, 0, 2)]
    files = [body["image_data"] for path, body in server.calls if path == "/generate"]
    assert len(files) == 2
    assert files[0] != files[1]


async def test_weights_that_nobody_here_put_in_lose_an_engine_that_shows_pictures(server, shown):
    server.talk = saying(told(PROMPT, 3))
    with pytest.raises(EngineLost, match=r"answered by version 3, and 0 is served"):
        await read(shown, [showing()])
