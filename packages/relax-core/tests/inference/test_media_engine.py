"""Video and sound through the engine, by transformers' own processors: as a plain forward and the trainer
compute them, also across an update, with their routes, and refused by name where they do not fit.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from agentic import Generation, GenerationRequest
from relax.backends.inference.errors import InvalidRequest
from relax.backends.models import build_model
from relax.backends.routes import check, routing_of
from relax.backends.tiny import write_tiny
from relax.backends.train.conformance import pack
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TEMPERATURE = 0.8
TOLERANCE = 1e-5


@pytest.fixture
def start(start_transformers: Any) -> Callable[..., Any]:
    def started(oracle: Any, **options: Any) -> Any:
        return type(start_transformers)(oracle)(**options)

    return started


def trained(
    oracle: Any, folder: Any, requests: list[GenerationRequest], answers: dict[str, Generation], replay: bool
) -> list[np.ndarray]:
    """Logprobs of answers as the trainer computes them, with the weights of version 0."""
    model = build_model(oracle.folder)
    model.load_state_dict(oracle.weights(0), strict=False)
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
        if replay:
            assert said.routes is not None
            routes += [*said.routes.astype(np.int64), np.full(said.routes.shape[1:], -1)]
    batch = dataclasses.replace(
        pack(rows),
        media=[request.media for request in requests],
        routes=torch.from_numpy(np.stack(routes)) if replay else None,
    )
    trainer = TorchNative(
        folder, settings=TrainerSettings(lr=1e-3, temperature=TEMPERATURE), dtype=torch.float32
    )
    ends = np.cumsum([len(answers[request.id].tokens) for request in requests])
    return [part.numpy() for part in torch.tensor_split(trainer.forward(batch), ends[:-1].tolist())]


@pytest.mark.parametrize("capture", [False, True])
async def test_what_is_seen_and_heard_decodes_together_as_a_plain_forward_and_the_trainer_compute_it(
    world, start, collect, tmp_path, capture
):
    oracle, ask, shapes = world
    routing = routing_of(oracle.model.config.to_dict())
    if capture and routing is None:
        pytest.skip("a dense model has no routes")
    requests = [ask(f"r{n}", parts, seed=n, max_new_tokens=4 + 2 * n) for n, parts in enumerate(shapes)]
    async with start(oracle, capture_routes=capture) as engine:
        answers = await collect(engine, requests)
    for request in requests:
        assert oracle.worst(request, answers[request.id]) <= TOLERANCE, request.id
        if routing is not None and capture:
            length = len(request.tokens) + len(answers[request.id].tokens)
            check(answers[request.id].routes, routing, length)
    theirs = trained(oracle, tmp_path / "trained", requests, answers, replay=capture)
    for request, found in zip(requests, theirs, strict=True):
        assert np.abs(found - answers[request.id].logprobs).max() <= TOLERANCE, request.id


async def test_an_update_in_flight_sees_and_hears_again(world, start):
    oracle, ask, shapes = world
    capture = routing_of(oracle.model.config.to_dict()) is not None
    requests = [ask(f"r{n}", parts, seed=n, max_new_tokens=30) for n, parts in enumerate(shapes)]
    requests += [msgspec.structs.replace(requests[-1], id="again", seed=99)]  # of a shared prefill
    async with start(oracle, capture_routes=False) as engine:
        answers = {}
        async for one in engine.generate([*requests, ask("short", shapes[1], max_new_tokens=1)]):
            answers[one.id] = one.generation
            if one.id == "short":
                await engine.begin_update(1, oracle.weights(1))
                assert (await engine.commit_update(1)).retracted == len(requests)
    for request in requests:
        assert [span[0] for span in answers[request.id].spans] == [0, 1]
        assert oracle.worst(request, answers[request.id]) <= TOLERANCE, request.id
    if not capture:
        return
    async with start(oracle, capture_routes=True) as engine:
        async for one in engine.generate([*requests, ask("short", shapes[1], max_new_tokens=1)]):
            answers[one.id] = one.generation
            if one.id == "short":
                await engine.begin_update(1, oracle.weights(1))
                await engine.commit_update(1)
    for request in requests:  # kept from the first sampling on
        routes = answers[request.id].routes
        assert len(routes) == len(request.tokens) + len(answers[request.id].tokens) - 1


async def test_a_file_beside_the_tensors_changes_nothing_and_what_is_shown_does(world, start, collect):
    oracle, ask, shapes = world
    parts = shapes[-2]
    one = ask("one", parts, seed=1)
    filed = msgspec.structs.replace(
        one, id="filed", media=[item | {"file": np.arange(9, dtype=np.uint8)} for item in one.media]
    )
    other = ask("other", parts, seed=2)
    if len(other.tokens) != len(one.tokens):
        other = msgspec.structs.replace(one, id="other", media=[_darker(item) for item in one.media])
    else:
        other = msgspec.structs.replace(one, id="other", media=other.media)
    async with start(oracle) as engine:
        answers = await collect(engine, [one, filed, other])
    assert answers["filed"].logprobs.tobytes() == answers["one"].logprobs.tobytes()
    assert answers["other"].logprobs.tobytes() != answers["one"].logprobs.tobytes()
    assert oracle.worst(other, answers["other"]) <= TOLERANCE


def _darker(item: dict[str, Any]) -> dict[str, Any]:
    names = ("pixel_values", "pixel_values_videos", "input_features")
    return item | {name: item[name] * np.float32(0.5) for name in names if name in item}


async def test_no_placeholder_is_ever_sampled(world, start, collect):
    oracle, ask, shapes = world
    requests = [ask(f"r{n}", shapes[-1], seed=n, temperature=3.0, max_new_tokens=60) for n in range(8)]
    async with start(oracle) as engine:
        answers = await collect(engine, requests)
    sampled = np.concatenate([one.tokens for one in answers.values()])
    assert len(set(sampled.tolist())) > 80
    assert not np.isin(sampled, oracle.placeholders).any()


def _cut(item: dict[str, Any], grid: list[int]) -> dict[str, Any]:
    """The same patches under another grid."""
    assert int(np.prod(grid)) == len(item["pixel_values_videos"])
    return item | {"video_grid_thw": np.array([grid])}


def without(item: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names}


async def test_items_that_do_not_fit_are_refused_by_name(
    watch, attend, vision_oracle, omni_oracle, start, collect
):
    clip = watch("clip", ("video",))
    film = clip.media[0]
    heard = attend("heard", ("talking", "audio"))
    talking, sound = heard.media
    nan = film["pixel_values_videos"].copy()
    nan[3, 5] = np.nan
    cut = film["pixel_values_videos"][1:]
    untimed = without(talking, "video_second_per_grid")
    grid = film["video_grid_thw"]
    for oracle, good, media, message in (
        (vision_oracle, clip, [], r"has \d+ video placeholder tokens, its 0 media items stand for 0"),
        (vision_oracle, clip, [film, film], r"has \d+ video placeholder tokens, its 2 media items stand for"),
        (vision_oracle, clip, [sound], "item 0 of request 'clip' has kind 'audio'"),
        (vision_oracle, clip, [film | {"kind": "image"}], "has kind 'image'"),
        (vision_oracle, clip, [film | {"pixel_values_videos": nan}], "no finite numbers"),
        (vision_oracle, clip, [film | {"video_grid_thw": grid.astype(np.float64)}], "expected integers"),
        (vision_oracle, clip, [film | {"video_grid_thw": grid + 1}], "multiples of 2"),
        (vision_oracle, clip, [film | {"pixel_values_videos": cut}], "means floats"),
        (vision_oracle, clip, [_cut(film, [1, 2, 6])], "'clip': video 0 needs a run"),
        (omni_oracle, heard, [talking], r"has \d+ audio placeholder tokens, its 1 media items stand for"),
        (omni_oracle, heard, [sound, talking], "'heard': item 1, video with sound, needs"),
        (omni_oracle, heard, [untimed, sound], "item 0 .* has kind 'video'"),
        (omni_oracle, heard, [talking, sound | {"input_features": sound["input_features"][:, :64]}], "128"),
        (omni_oracle, heard, [talking, sound | {"feature_attention_mask": np.ones((1, 3))}], "has shape"),
    ):  # fmt: skip
        bad = msgspec.structs.replace(good, media=media)
        async with start(oracle) as engine:
            with pytest.raises(InvalidRequest, match=message):
                await collect(engine, [bad])
            answers = await collect(engine, [good])
        assert oracle.worst(good, answers[good.id]) <= TOLERANCE


async def test_a_mixture_that_sees_tells_its_routes_too(start, collect, tmp_path, vision_oracle, watch):
    folder = write_tiny(tmp_path / "mixture", "qwen3_vl", max_position_embeddings=256)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_vl_moe"
    config["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    (folder / "config.json").write_text(json.dumps(config))
    oracle = type(vision_oracle)(folder)
    routing = routing_of(oracle.model.config.to_dict())
    assert routing is not None
    assert routing.layers[0] == 1
    ask = type(watch)(folder)
    requests = [ask(f"r{n}", parts, seed=n) for n, parts in enumerate([(), ("video",), ("image", "video")])]
    async with start(oracle, capture_routes=True) as engine:
        answers = await collect(engine, requests)
    for request in requests:
        assert oracle.worst(request, answers[request.id]) <= TOLERANCE, request.id
        check(answers[request.id].routes, routing, len(request.tokens) + len(answers[request.id].tokens))
