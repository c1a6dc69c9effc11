"""Images through the engine: pixels at prefill, mRoPE positions at decode, both again at an update."""

import numpy as np
import pytest
from agentic import GenerationRequest, Sampling
from PIL import Image
from relax.backends.inference.errors import InvalidRequest
from transformers import AutoImageProcessor


@pytest.fixture
def ask(vision_oracle):
    """A request: text, images of the given sizes between it, text."""
    processor = AutoImageProcessor.from_pretrained(vision_oracle.folder)
    config = vision_oracle.model.config

    def make(name, sizes, seed=0, picture=None, **sampling):
        rng = np.random.default_rng(seed if picture is None else picture)
        tokens, media = list(rng.integers(7, 100, 4 + seed % 5)), []
        for height, width in sizes:
            image = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
            made = processor(images=[image], return_tensors="np")
            media.append({"kind": "image"} | {key: made[key] for key in ("pixel_values", "image_grid_thw")})
            count = int(made["image_grid_thw"].prod()) // 4
            tokens += [
                config.vision_start_token_id,
                *[config.image_token_id] * count,
                config.vision_end_token_id,
            ]
            tokens += list(rng.integers(7, 100, 3))
        settings = {"temperature": 0.8, "max_new_tokens": 20} | sampling
        return GenerationRequest(name, np.array(tokens, np.int32), Sampling(**settings), seed, media)

    return make


async def test_text_and_images_of_many_shapes_decode_together_and_agree(start_vision, ask, collect):
    shapes = [
        [],
        [(32, 32)],
        [(64, 64)],
        [(32, 96)],
        [(64, 32), (32, 32)],
        [],
        [(64, 64), (96, 32), (32, 32)],
    ]
    requests = [ask(f"r{n}", sizes, seed=n, max_new_tokens=5 + 3 * n) for n, sizes in enumerate(shapes)]
    async with start_vision() as engine:
        answers = await collect(engine, requests)
    assert max(start_vision.oracle.worst(request, answers[request.id]) for request in requests) <= 1e-4


async def test_an_update_in_flight_recomputes_images_too(start_vision, ask):
    oracle = start_vision.oracle
    requests = [ask(f"r{n}", [(64, 64)] * (n % 3), seed=n, max_new_tokens=100) for n in range(5)]
    async with start_vision() as engine:
        answers = {}
        async for one in engine.generate([*requests, ask("short", [(32, 32)], max_new_tokens=1)]):
            answers[one.id] = one.generation
            if one.id == "short":
                await engine.begin_update(1, oracle.weights(1))
                assert (await engine.commit_update(1)).retracted == 5
    for request in requests:
        assert [span[0] for span in answers[request.id].spans] == [0, 1]
        assert oracle.worst(request, answers[request.id]) <= 1e-4


async def test_a_response_never_holds_a_placeholder(start_vision, ask, collect):
    config = start_vision.oracle.model.config
    requests = [ask(f"r{n}", [(32, 32)], seed=n, temperature=3.0, max_new_tokens=120) for n in range(20)]
    async with start_vision() as engine:
        answers = await collect(engine, requests)
    sampled = np.concatenate([one.tokens for one in answers.values()])
    assert len(set(sampled.tolist())) > 90
    assert start_vision.oracle.placeholders == [config.image_token_id, config.video_token_id]
    assert not np.isin(sampled, start_vision.oracle.placeholders).any()


async def test_the_picture_matters_and_equal_pictures_share_a_prefill(start_vision, ask, collect):
    same = [ask(f"s{n}", [(64, 64)], seed=0, picture=1) for n in range(3)]
    other = ask("other", [(64, 64)], seed=0, picture=2)
    other = GenerationRequest("other", same[0].tokens, same[0].sampling, 0, other.media)
    async with start_vision() as engine:
        answers = await collect(engine, [*same, other])
    logprobs = [answers[request.id].logprobs.tobytes() for request in same]
    assert len(set(logprobs)) == 1
    assert answers["other"].logprobs.tobytes() not in logprobs
    assert start_vision.oracle.worst(other, answers["other"]) <= 1e-4


async def test_placeholders_and_media_that_do_not_match_are_refused(
    start_vision, start_transformers, ask, collect
):
    good = ask("picture", [(64, 64)])
    short = GenerationRequest("picture", good.tokens[:-6], good.sampling, 0, good.media)
    async with start_vision() as engine:
        with pytest.raises(InvalidRequest, match=r"'picture' has \d image placeholder tokens.*stand for 4"):
            await collect(engine, [short])
        with pytest.raises(InvalidRequest, match="4 image placeholder tokens, its 0 media items stand for 0"):
            await collect(engine, [GenerationRequest("picture", good.tokens, good.sampling, 0)])
        with pytest.raises(InvalidRequest, match="kind 'audio'"):
            await collect(
                engine, [GenerationRequest("a", good.tokens, good.sampling, 0, [{"kind": "audio"}])]
            )
    async with start_transformers() as engine:
        with pytest.raises(InvalidRequest, match="'qwen3' takes text only"):
            await collect(engine, [good])
