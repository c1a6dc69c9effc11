"""The oracle for videos: transformers' own Qwen3-VL processor and model."""

import io
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_processor import Budget, OmniProcessor, collate, families
from omni_processor.families.clips import ClipRules, size_together, spread
from omni_processor.families.patches import PixelRules
from omni_processor.videos import VideoHeader

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="transformers' video processor needs torchvision")

CLOSE = 1e-5
ASK = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what moves?"}]}]


@pytest.fixture(scope="module")
def reference(tokenizer, rules):
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    torch.set_num_threads(1)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**rules["image"]),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**rules["vl"]),
    )


def decoded(data: bytes) -> tuple[np.ndarray, float]:
    """Every frame of a file as PyAV gives it, and the average rate."""
    with av.open(io.BytesIO(data), "r") as container:
        stream: Any = container.streams.video[0]
        rate = float(stream.average_rate)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]), rate


def published(reference, messages, data, images=None):
    text = reference.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        chat_template=reference.tokenizer.chat_template,
    )
    videos = [decoded(one) for one in data]
    return reference(
        text=[text],
        images=images,
        videos=[frames for frames, _ in videos],
        videos_kwargs={
            "video_metadata": [{"fps": rate, "total_num_frames": len(frames)} for frames, rate in videos],
            "do_sample_frames": True,
        },
        return_tensors="pt",
    )


@pytest.mark.parametrize(
    ("count", "fps", "height", "width"),
    [
        (24, 8, 64, 96),
        (9, 3, 130, 70),
        (3, 4, 64, 64),
        (2, 1, 96, 32),
        (300, 25, 48, 48),
        (16, 4, 200, 360),
        (25, 12, 16, 24),
    ],
)
def test_tokens_grids_and_pixels_equal_the_published_processor(
    processor, reference, make_frames, write_video, count, fps, height, width
):
    data = write_video(make_frames(count, height, width), fps)
    expected = published(reference, ASK, [data])
    sample = processor(ASK, videos=[data])
    batch = collate(sample.media)
    np.testing.assert_array_equal(sample.tokens, expected["input_ids"][0].numpy())
    np.testing.assert_array_equal(batch["video_grid_thw"], expected["video_grid_thw"].numpy())
    assert batch["pixel_values_videos"].dtype == np.float32
    assert np.abs(batch["pixel_values_videos"] - expected["pixel_values_videos"].numpy()).max() <= CLOSE
    plan = processor.plan(data, "video")
    assert plan.tokens == sample.token_counts["video"]
    assert plan.patches == len(batch["pixel_values_videos"])


def test_the_per_frame_cap_is_followed(tokenizer, rules, reference, make_frames, write_video):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    capped = {**rules["vl"], "cap_pixels_per_frame": True, "max_video_tokens": 6}
    family = families.create("qwen3_vl", tokenizer, preprocessor=rules["image"], video_preprocessor=capped)
    data = write_video(make_frames(24, 160, 256), 8)
    frames, rate = decoded(data)
    expected = Qwen3VLVideoProcessor(**capped)(
        videos=[frames], video_metadata=[{"fps": rate, "total_num_frames": 24}], return_tensors="pt"
    )
    item = OmniProcessor(tokenizer, family=family)("<video>", videos=[data]).media[0]
    np.testing.assert_array_equal(item["video_grid_thw"], expected["video_grid_thw"].numpy())
    assert np.abs(item["pixel_values_videos"] - expected["pixel_values_videos"].numpy()).max() <= CLOSE


def test_two_videos_and_a_picture_between_them(processor, reference, make_frames, write_video, picture):
    films = [write_video(make_frames(12, 64, 96), 4), write_video(make_frames(8, 96, 64, seed=1), 4)]
    messages = [
        {
            "role": "user",
            "content": [
                *({"type": "text", "text": "first "}, {"type": "video"}, {"type": "image"}),
                *({"type": "text", "text": " then "}, {"type": "video"}),
            ],
        }
    ]
    expected = published(reference, messages, films, [picture])
    sample = processor(messages, images=[picture], videos=films)
    batch = collate([sample])
    np.testing.assert_array_equal(sample.tokens, expected["input_ids"][0].numpy())
    for name in ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"):
        assert np.abs(batch[name] - expected[name].numpy()).max() <= CLOSE
    assert [item["kind"] for item in sample.media] == ["video", "image", "video"]
    assert set(batch) == {"pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"}


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 2000),
    fps=st.sampled_from([1.0, 10.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 120.0]),
    wanted=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
)
def test_frames_are_chosen_as_published(total, fps, wanted):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    theirs = Qwen3VLVideoProcessor(min_frames=4, max_frames=64)
    expected = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), fps=wanted)
    rules = ClipRules(PixelRules(), fps=wanted, min_frames=4, max_frames=64)
    assert spread(VideoHeader(1, 1, total, fps, False), rules) == tuple(expected.tolist())


@settings(max_examples=200, deadline=None)
@given(
    frames=st.integers(2, 64),
    height=st.integers(1, 1200),
    width=st.integers(1, 1200),
    longest=st.integers(8, 4000),
)
def test_frames_are_sized_as_published(frames, height, width, longest):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    most = longest * 32 * 32
    least = min(4096, most)
    rules = ClipRules(PixelRules(min_pixels=least, max_pixels=most))
    mine = size_together(VideoHeader(height, width, frames, 2.0, False), frames, rules, Budget())
    assert mine[0] % 32 == mine[1] % 32 == 0
    try:
        expected = smart_resize(frames, height, width, 2, 32, least, most)
    except ValueError:  # too thin for the published processor
        return
    if max(height, width) <= 200 * min(height, width):
        assert mine == expected


def test_a_frame_budget_bounds_the_plan_and_the_result(make_processor, make_frames, write_video):
    data = write_video(make_frames(16, 128, 192), 4)
    plain = make_processor().plan(data, "video")
    small = make_processor(budget=Budget(max_frame_tokens=4))
    plan = small.plan(data, "video")
    assert plan.tokens <= 4 * plan.grid[0] < plain.tokens
    assert small("<video>", videos=[data]).token_counts["video"] == plan.tokens
    grown = make_processor(budget=Budget(min_frame_tokens=32)).plan(data, "video")
    assert grown.tokens >= 32 * grown.grid[0] * 0.9 > plain.tokens


@pytest.mark.parametrize("layout", ["v", "iv", "vv", "viv"])
def test_positions_equal_the_models_get_rope_index(
    processor, special, make_frames, write_video, picture, layout
):
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    films = [write_video(make_frames(10, 64, 128), 4), write_video(make_frames(4, 96, 64), 4)]
    text = "a" + "b".join({"v": "<video>", "i": "<image>"}[kind] for kind in layout) + "c"
    count = layout.count("v")
    sample = processor(text, images=[picture] * layout.count("i"), videos=films[:count])
    batch = collate([sample])
    kinds = (sample.tokens == special["<|image_pad|>"]) + 2 * (sample.tokens == special["<|video_pad|>"])

    class Config:
        class vision_config:
            spatial_merge_size = 2

    class Placing:
        config = Config
        get_vision_position_ids = Qwen3VLModel.get_vision_position_ids

    placing: Any = Placing()
    expected, _ = Qwen3VLModel.get_rope_index(
        placing,
        torch.from_numpy(sample.tokens.astype(np.int64))[None],
        torch.from_numpy(kinds.astype(np.int64))[None],
        *(
            torch.from_numpy(batch[name]) if name in batch else None
            for name in ("image_grid_thw", "video_grid_thw")
        ),
    )
    positions = processor.positions(sample.tokens, sample.media)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
