"""Pictures through a real server: a tiny Qwen3-VL answers as trainer and embedded engine compute it."""

import dataclasses
import json
import os
import runpy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from omni_processor import OmniProcessor
from PIL import Image
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError, InvalidRequest
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import write_tiny
from relax.backends.train.conformance import pack
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.config.roles import RolloutSettings
from safetensors.torch import save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SUITE = Path(__file__).parents[2] / "packages" / "relax-core" / "tests" / "inference"
TOLERANCE = 1e-4
TEMPERATURE = 0.8
SIZES = [[], [(64, 64)], [(32, 32)], [(31, 97)], [(64, 32), (32, 32)], [], [(70, 50), (96, 32), (33, 33)]]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Logprobs by one full forward of the plain Hugging Face model, whose weights a version has."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_vl", max_position_embeddings=256)
    return runpy.run_path(str(SUITE / "conftest.py"))["Oracle"](folder)


Started = Callable[..., Any]


@pytest.fixture
def start(
    oracle: Any,
    sglang_settings: Callable[..., dict[str, Any]],
    vision_on_cpus: dict[str, str],
    tmp_path: Path,
) -> Started:
    @asynccontextmanager
    async def started(**sglang: Any) -> AsyncIterator[SglangEngine]:
        settings = RolloutSettings(
            engine="sglang",
            sglang=sglang_settings(env=vision_on_cpus, **sglang),  # pyright: ignore[reportArgumentType]
        )
        spec = EngineSpec("engine-0", oracle.folder, run_folder=tmp_path, settings=settings, max_running=16)
        engine = await SglangEngine.create(spec)
        try:
            yield engine
        finally:
            await engine.close()

    return started


@pytest.fixture(scope="module")
def ask(oracle: Any) -> Callable[..., GenerationRequest]:
    """A request as the run's processor makes it: a conversation with pictures of such sizes between text."""
    processor = OmniProcessor.from_pretrained(oracle.folder)

    def make(name: str, sizes: Any, seed: int = 0, **sampling: Any) -> GenerationRequest:
        random = np.random.default_rng(seed)
        content: list[dict[str, Any]] = [{"type": "text", "text": f"What is this, {seed}?"}]
        for height, width in sizes:
            levels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            content += [
                {"type": "image", "image": Image.fromarray(levels)},
                {"type": "text", "text": f" and {seed % 7} more"},
            ]
        sample = processor([{"role": "user", "content": content}], add_generation_prompt=True)
        how = Sampling(**({"temperature": TEMPERATURE, "max_new_tokens": 20} | sampling))
        return GenerationRequest(name, sample.tokens, how, seed, list(sample.media))

    return make


async def collect(engine: Any, requests: list[GenerationRequest]) -> dict[str, Any]:
    return {one.id: one.generation async for one in engine.generate(requests)}


async def put(engine: Any, oracle: Any, version: int) -> Any:
    await engine.begin_update(version, oracle.weights(version))
    return await engine.commit_update(version)


def trainers(
    oracle: Any, version: int, requests: list[GenerationRequest], answers: dict[str, Any], folder: Path
) -> list[np.ndarray]:
    """Logprobs of the answers as the trainer computes them in its own forward."""
    model = build_model(oracle.folder)
    model.load_state_dict(oracle.weights(version), strict=False)
    model.save_pretrained(folder)
    rows = []
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
    batch = dataclasses.replace(pack(rows), media=[request.media for request in requests])
    trainer = TorchNative(
        folder, settings=TrainerSettings(lr=1e-3, temperature=TEMPERATURE), dtype=torch.float32
    )
    found = trainer.forward(batch)
    ends = np.cumsum([len(answers[request.id].tokens) for request in requests])
    return [part.numpy() for part in torch.tensor_split(found, ends[:-1].tolist())]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The oracle of a mixture, in a folder as published ones are: its experts together, input by output."""
    folder = write_tiny(tmp_path_factory.mktemp("mixed"), "qwen3_vl", max_position_embeddings=256)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_vl_moe"
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
    }
    config["text_config"] |= {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": True, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in named_weights(build_model(folder))
    }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return runpy.run_path(str(SUITE / "conftest.py"))["Oracle"](folder)


@pytest.mark.parametrize("weights", ["distributed", "disk"])
async def test_a_published_mixture_that_sees_takes_versions_the_way_round_that_its_folder_has(
    weights: str,
    mixed: Any,
    ask: Callable[..., GenerationRequest],
    sglang_settings: Callable[..., dict[str, Any]],
    vision_on_cpus: dict[str, str],
    moe_on_cpus: Path,
    tmp_path: Path,
) -> None:
    path = os.pathsep.join([vision_on_cpus["PYTHONPATH"], str(moe_on_cpus)])
    made = sglang_settings(env=vision_on_cpus | {"PYTHONPATH": path}, weights=weights)
    settings = RolloutSettings(engine="sglang", sglang=made)  # pyright: ignore[reportArgumentType]
    spec = EngineSpec("engine-0", mixed.folder, run_folder=tmp_path, settings=settings, max_running=16)
    engine = await SglangEngine.create(spec)
    try:
        assert engine.weights().keys() == mixed.weights(0).keys()
        for version in range(2):
            await put(engine, mixed, version)
            requests = [ask(f"v{version}-{n}", sizes, n) for n, sizes in enumerate(SIZES)]
            answers = await collect(engine, requests)
            for request in requests:
                assert mixed.worst(request, answers[request.id]) <= TOLERANCE
    finally:
        await engine.close()


async def test_answers_about_pictures_are_those_of_trainer_and_embedded_engine_over_updates(
    start: Started, oracle: Any, ask: Callable[..., GenerationRequest], tmp_path: Path
) -> None:
    requests = [ask(f"r{n}", sizes, n, max_new_tokens=5 + 3 * n) for n, sizes in enumerate(SIZES)]
    greedy = [ask(f"g{n}", sizes, n, temperature=0.0) for n, sizes in enumerate(SIZES)]
    running = [ask(f"l{n}", [(64, 64)] * (n % 3), n, max_new_tokens=100) for n in range(5)]
    async with start() as engine:
        assert engine.weights().keys() == oracle.weights(0).keys()
        assert sum(".visual." in name for name in engine.weights()) > 20
        await put(engine, oracle, 0)
        answers = await collect(engine, requests)
        for request, found in zip(
            requests, trainers(oracle, 0, requests, answers, tmp_path / "trained"), strict=True
        ):
            assert np.abs(found - answers[request.id].logprobs).max() <= TOLERANCE
            assert oracle.worst(request, answers[request.id]) <= TOLERANCE

        # Each has its own place in the server: the same again, one by one, of the pictures' cache.
        alone = {}
        for request in greedy:
            alone |= await collect(engine, [request])
        embedded = TransformersEngine(oracle.folder)
        try:
            await put(embedded, oracle, 0)
            theirs = await collect(embedded, greedy)
        finally:
            await embedded.close()
        together = await collect(engine, greedy)
        for request in greedy:
            expected = theirs[request.id].tokens.tolist()
            assert alone[request.id].tokens.tolist() == expected
            assert together[request.id].tokens.tolist() == expected

        # The vision tower of the new version looks at the same pictures again.
        async for one in engine.generate([*running, ask("short", [(32, 32)], max_new_tokens=1)]):
            answers[one.id] = one.generation
            if one.id == "short":
                assert (await put(engine, oracle, 1)).retracted == len(running)
        for request in running:
            assert [span[0] for span in answers[request.id].spans] == [0, 1]
            assert oracle.worst(request, answers[request.id]) <= TOLERANCE
        answers = await collect(engine, requests)
        for request in requests:
            assert {span[0] for span in answers[request.id].spans} == {1}
            assert oracle.worst(request, answers[request.id]) <= TOLERANCE


async def test_what_cannot_be_shown_is_refused_by_name_and_the_server_lives(
    start: Started, oracle: Any, ask: Callable[..., GenerationRequest]
) -> None:
    good = ask("picture", [(64, 64), (32, 32)])

    def other(media: list[Any], tokens: Any = None) -> list[GenerationRequest]:
        tokens = good.tokens if tokens is None else tokens
        return [ask("text", []), GenerationRequest("picture", tokens, good.sampling, 0, media)]

    first, second = good.media
    noisy = first | {"pixel_values": first["pixel_values"] + np.float32(0.5 / 255)}
    with pytest.raises(EngineError, match=r"set rollout\.sglang\.pause=auto"):
        async with start(pause="retract"):
            pass
    # This server's processor makes more of a picture than the run's did.
    wide = '{"image": {"size": {"shortest_edge": 16384, "longest_edge": 16384}}}'
    async with start(extra={"mm_process_config": wide}) as engine:
        await put(engine, oracle, 0)
        for media, tokens, message in (
            ([first], None, "5 image placeholder tokens, its 1 media items stand for 4"),
            ([second, first], None, r"'picture': image 1 needs a run of 4 .* images of \[1, 4\]"),
            ([noisy, second], None, "item 0 of request 'picture': its pixel_values are no picture of 8 bits"),
            ([first, {"kind": "audio", "input_features": np.zeros(3)}], None, "item 1 .* has kind 'audio'"),
            ([first, second], good.tokens[:40], "'picture' has"),
            ([first, second], None, r"makes \d+ tokens of its prompt: it processes pictures otherwise"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await collect(engine, other(media, tokens))
        answer = (await collect(engine, [ask("text", [])]))["text"]
        assert oracle.worst(ask("text", []), answer) <= TOLERANCE
        assert (await engine.health()).alive
