"""Video and sound through real servers: a tiny Qwen3-VL and a tiny Qwen3-Omni thinker answer as the trainer,
a plain forward and the embedded engine compute it, before, across and after an update that moves the towers.
"""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import soundfile
import torch
from agentic import GenerationRequest
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import InvalidRequest
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.models import build_model
from relax.backends.routes import check, routing_of
from relax.backends.tiny import write_tiny
from relax.backends.train.conformance import pack
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.config.roles import RolloutSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

SUITE = runpy.run_path(
    str(Path(__file__).parents[2] / "packages" / "relax-core" / "tests" / "inference" / "conftest.py")
)
TOLERANCE = 1e-4
FPS = {"qwen3_vl": {}, "qwen3_omni": {"fps": 2.0}}
"""SGLang counts positions in whole numbers, so that not every rate of frames will do for an Omni."""

torch.set_num_threads(1)


@dataclasses.dataclass
class World:
    kind: str
    oracle: Any
    shapes: list[tuple[str, ...]]
    maker: Any

    def ask(self, name: str, parts: tuple[str, ...], seed: int = 0, **sampling: Any) -> GenerationRequest:
        return self.maker(name, parts, seed, **FPS[self.kind], **sampling)

    @property
    def routes(self) -> bool:
        return self.kind == "qwen3_omni"


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_omni"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    kind = request.param
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), kind, max_position_embeddings=512)
    oracle = SUITE["Oracle"](folder)
    if kind == "qwen3_vl":
        return World(kind, oracle, SUITE["SEEING"], SUITE["Watched"](folder))
    return World(kind, oracle, SUITE["HEARING"], SUITE["Attended"](folder))


Started = Callable[[World], Any]


@pytest.fixture
def start(
    sglang_settings: Callable[..., dict[str, Any]],
    vision_on_cpus: dict[str, str],
    moe_on_cpus: Path,
    tmp_path: Path,
) -> Started:
    @asynccontextmanager
    async def started(world: World) -> AsyncIterator[SglangEngine]:
        env = dict(vision_on_cpus)
        if world.routes:
            env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(moe_on_cpus)])
        settings = RolloutSettings(
            engine="sglang",
            sglang=sglang_settings(env=env),  # pyright: ignore[reportArgumentType]
        )
        spec = EngineSpec(
            "engine-0",
            world.oracle.folder,
            run_folder=tmp_path,
            settings=settings,
            max_running=16,
            routes=world.routes,
        )
        engine = await SglangEngine.create(spec)
        try:
            yield engine
        finally:
            await engine.close()

    return started


async def collect(engine: Any, requests: list[GenerationRequest]) -> dict[str, Any]:
    return {one.id: one.generation async for one in engine.generate(requests)}


async def put(engine: Any, oracle: Any, version: int) -> Any:
    await engine.begin_update(version, oracle.weights(version))
    return await engine.commit_update(version)


def trained(
    world: World, folder: Path, requests: list[GenerationRequest], answers: dict[str, Any]
) -> list[np.ndarray]:
    """Logprobs of answers as the trainer computes them with the weights of version 0, following routes."""
    model = build_model(world.oracle.folder)
    model.load_state_dict(world.oracle.weights(0), strict=False)
    model.save_pretrained(folder)
    rows, routes = [], []
    for request in requests:
        said = answers[request.id]
        nothing = np.zeros(len(said.tokens), np.float32)
        rows.append(
            {
                "tokens": np.concatenate([request.tokens, said.tokens]).astype(np.int64),
                "prompt_length": np.asarray(len(request.tokens)),
                "loss_mask": np.ones(len(said.tokens), np.uint8),
                "rollout_logprobs": nothing,
                "advantages": nothing,
            }
        )
        if world.routes:
            routes += [*said.routes.astype(np.int64), np.full(said.routes.shape[1:], -1)]
    batch = dataclasses.replace(
        pack(rows),
        media=[request.media for request in requests],
        routes=torch.from_numpy(np.stack(routes)) if world.routes else None,
    )
    settings = TrainerSettings(lr=1e-3, temperature=SUITE["TEMPERATURE"])
    trainer = TorchNative(folder, settings=settings, dtype=torch.float32)
    ends = np.cumsum([len(answers[request.id].tokens) for request in requests])
    return [part.numpy() for part in torch.tensor_split(trainer.forward(batch), ends[:-1].tolist())]


async def test_what_is_seen_and_heard_is_answered_as_trainer_and_embedded_engine_compute_it_over_updates(
    world: World, start: Started, tmp_path: Path
) -> None:
    oracle, ask = world.oracle, world.ask
    requests = [ask(f"r{n}", parts, n, max_new_tokens=5 + 3 * n) for n, parts in enumerate(world.shapes)]
    greedy = [ask(f"g{n}", parts, n, temperature=0.0) for n, parts in enumerate(world.shapes)]
    running = [ask(f"l{n}", parts, n, max_new_tokens=120) for n, parts in enumerate(world.shapes)]
    routing = routing_of(oracle.model.config.to_dict())
    async with start(world) as engine:
        assert engine.weights().keys() == oracle.weights(0).keys()
        await put(engine, oracle, 0)
        answers = await collect(engine, requests)
        theirs = trained(world, tmp_path / "trained", requests, answers)
        for request, found in zip(requests, theirs, strict=True):
            assert np.abs(found - answers[request.id].logprobs).max() <= TOLERANCE, request.id
            assert oracle.worst(request, answers[request.id]) <= TOLERANCE, request.id
            if routing is not None:
                check(
                    answers[request.id].routes, routing, len(request.tokens) + len(answers[request.id].tokens)
                )

        # Each has its own place in the server: one by one, and together, of what it has embedded before.
        alone = {}
        for request in greedy:
            alone |= await collect(engine, [request])
        together = await collect(engine, greedy)
        embedded = TransformersEngine(oracle.folder)
        try:
            await put(embedded, oracle, 0)
            expected = await collect(embedded, greedy)
        finally:
            await embedded.close()
        for request in greedy:
            assert alone[request.id].tokens.tolist() == expected[request.id].tokens.tolist()
            assert together[request.id].tokens.tolist() == expected[request.id].tokens.tolist()

        # The towers of the new version see and hear the same again.
        short = ask("short", world.shapes[1], max_new_tokens=1)
        async for one in engine.generate([*running, short]):
            answers[one.id] = one.generation
            if one.id == "short":
                assert (await put(engine, oracle, 1)).retracted == len(running)
        for request in running:
            assert [span[0] for span in answers[request.id].spans] == [0, 1]
            assert oracle.worst(request, answers[request.id]) <= TOLERANCE, request.id
        answers = await collect(engine, requests)
        for request in requests:
            assert {span[0] for span in answers[request.id].spans} == {1}
            assert oracle.worst(request, answers[request.id]) <= TOLERANCE, request.id

        # What it cannot be shown is refused by name, and the server lives.
        good = requests[2]
        for media, message in (
            ([], "media items stand for"),
            ([{"kind": "audio", "input_features": np.zeros((1, 3, 3), np.float32)}], "item 0 of request"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await collect(engine, [requests[0], msgspec.structs.replace(good, media=media)])
        if world.kind == "qwen3_omni":
            odd = world.maker("odd", ("video",), 0, fps=4.0)
            with pytest.raises(InvalidRequest, match="SGLang's rotary positions are whole numbers"):
                await collect(engine, [odd])
        answer = (await collect(engine, [good]))[good.id]
        assert oracle.worst(good, answer) <= TOLERANCE
        assert (await engine.health()).alive


def shown(folder: Path) -> Path:
    """Rows with sounds, a video with its sound, and text."""
    for number in range(3):
        time = np.arange(4000 * (number + 1)) / 16000
        wave = np.sin(2 * np.pi * 300 * (number + 1) * time)
        soundfile.write(folder / f"{number}.wav", wave.astype(np.float32), 16000)
    with av.open(str(folder / "film.mkv"), "w") as file:
        stream: Any = file.add_stream("ffv1", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "bgr0"
        track: Any = file.add_stream("pcm_s16le", rate=16000)
        track.layout = "mono"
        for level in range(0, 128, 16):
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), level, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        tone = (9000 * np.sin(np.arange(16000) / 8)).astype(np.int16)
        heard = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
        heard.sample_rate = 16000
        file.mux(track.encode(heard))
        file.mux(track.encode(None))
    rows = [
        {"prompt": "<audio>or<audio>?", "audios": ["0.wav", "2.wav"], "videos": []},
        {"prompt": "<video>then<audio>", "audios": ["1.wav"], "videos": ["film.mkv"]},
        {"prompt": "nothing", "audios": [], "videos": []},
        {"prompt": "<video>?", "audios": [], "videos": ["film.mkv"]},
    ]
    places = ("audios", "videos")
    whole = [row | {name: [str(folder / one) for one in row[name]] for name in places} for row in rows]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "answer": "77"}) + "\n" for row in whole))
    return path


@pytest.mark.timeout(1500)
def test_a_run_shows_and_plays_its_data_to_sglang_and_replays_the_routes(
    sglang_settings: Callable[..., dict[str, Any]],
    vision_on_cpus: dict[str, str],
    moe_on_cpus: Path,
    tmp_path: Path,
) -> None:
    path = os.pathsep.join([vision_on_cpus["PYTHONPATH"], str(moe_on_cpus)])
    settings = sglang_settings(env=vision_on_cpus | {"PYTHONPATH": path})
    words = [
        *("model=tiny_omni", "steps=3", "max_staleness=0", "launcher=local", "log.progress=plain"),
        *("rollout.engine=sglang", "rollout.replicas=1", f"rollout.sglang={json.dumps(settings)}"),
        *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "actor.micro_batch_size=4"),
        *("rollout.max_new_tokens=8", "actor.routing_replay=true", "data.answer_column=answer"),
        *(f"data.path={shown(tmp_path)}", "data.audio_column=audios", "data.video_column=videos"),
        *("data.audio_in_video=true", f"run.root={tmp_path}", "run.name=run"),
    ]
    relax = str(Path(sys.executable).with_name("relax"))
    root = Path(__file__).parents[2]
    command = [relax, "train", "configs/quickstart.yaml", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3
    assert max(step["loss/ratio_gap_max"] for step in metrics) <= TOLERANCE
    (accounts,) = map(json.loads, (tmp_path / "run" / "accounting.jsonl").read_text().splitlines())
    assert not accounts.get("faults")
