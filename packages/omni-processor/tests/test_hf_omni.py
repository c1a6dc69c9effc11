"""The oracle for sound and video: transformers' own Qwen3-Omni processor and model."""

import io
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_processor import OmniProcessor, collate, families
from omni_processor.families.clips import ClipRules, every
from omni_processor.families.patches import PixelRules
from omni_processor.videos import VideoHeader

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="transformers' video processor needs torchvision")

CLOSE = 1e-5


@pytest.fixture(scope="module")
def reference(omni_tokenizer, rules):
    from transformers import Qwen3OmniMoeProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    torch.set_num_threads(1)
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**rules["image"]),
        video_processor=Qwen2VLVideoProcessor(**rules["omni"]),
        feature_extractor=WhisperFeatureExtractor(**rules["mel"]),
        tokenizer=omni_tokenizer,
        chat_template=omni_tokenizer.chat_template,
    )


@pytest.fixture(scope="module")
def thinker(omni_tokenizer):
    """A tiny random thinker, for its get_rope_index and its forward."""
    from transformers.models.qwen3_omni_moe import (
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    make_config: Any = Qwen3OmniMoeThinkerConfig

    tid = omni_tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    config = make_config(
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 8,
            "n_window": 50,
            "n_window_infer": 800,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        text_config={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": rope,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
        },
        audio_token_id=tid("<|audio_pad|>"),
        image_token_id=tid("<|image_pad|>"),
        video_token_id=tid("<|video_pad|>"),
        vision_start_token_id=tid("<|vision_start|>"),
        vision_end_token_id=tid("<|vision_end|>"),
        audio_start_token_id=tid("<|audio_start|>"),
        audio_end_token_id=tid("<|audio_end|>"),
        position_id_per_seconds=13,
    )
    return Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()


def decoded(data: bytes) -> tuple[np.ndarray, float]:
    with av.open(io.BytesIO(data), "r") as container:
        stream: Any = container.streams.video[0]
        rate = float(stream.average_rate)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]), rate


def published(reference, rules, messages, *, images=None, films=(), audio=None, own_sound=False, fps=2.0):
    text = reference.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        chat_template=reference.tokenizer.chat_template,
    )
    videos = [decoded(film) for film in films]
    more = {}
    if videos:
        more = {
            "videos": [frames for frames, _ in videos],
            "videos_kwargs": {
                "video_metadata": [{"fps": rate, "total_num_frames": len(frames)} for frames, rate in videos],
                "do_sample_frames": True,
                "fps": fps,
                "size": rules["omni"]["size"],
                "use_audio_in_video": own_sound,
            },
        }
    return reference(text=[text], images=images, audio=audio, return_tensors="pt", **more)


def ask(*kinds: str) -> list[dict]:
    parts = [{"type": kind} if kind in ("image", "audio", "video") else kind for kind in kinds]
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


def assert_equal(sample, expected, *names: str) -> None:
    np.testing.assert_array_equal(sample.tokens, expected["input_ids"][0].numpy())
    batch = collate([sample])
    assert set(batch) == set(names)
    for name in names:
        theirs = expected[name].numpy()
        assert batch[name].shape == theirs.shape
        assert np.abs(batch[name] - theirs).max() <= CLOSE, name


@pytest.mark.parametrize("seconds", [0.0127, 0.1, 0.99, 1.0, 1.234, 7.5, 31.0])
def test_sound_equals_the_published_processor(omni, reference, rules, make_wave, seconds):
    wave = make_wave(seconds)
    expected = published(reference, rules, ask("listen: ", "audio", "!"), audio=[wave])
    sample = omni(ask("listen: ", "audio", "!"), audios=[wave])
    assert_equal(sample, expected, "input_features", "feature_attention_mask")
    assert sample.media[0]["feature_attention_mask"].dtype == np.int64
    assert omni.plan(wave, "audio").tokens == sample.token_counts["audio"]


@pytest.mark.parametrize(
    ("count", "fps", "height", "width"),
    [(24, 8, 64, 96), (5, 3, 130, 70), (61, 25, 48, 48), (80, 4, 40, 300)],
)
def test_video_equals_the_published_processor(
    omni, reference, rules, make_frames, write_video, count, fps, height, width
):
    film = write_video(make_frames(count, height, width), fps)
    expected = published(reference, rules, ask("video", "?"), films=[film])
    sample = omni(ask("video", "?"), videos=[film])
    assert_equal(sample, expected, "pixel_values_videos", "video_grid_thw", "video_second_per_grid")
    assert omni.plan(film, "video").tokens == sample.token_counts["video"]


@pytest.mark.parametrize(
    ("count", "fps", "seconds"), [(24, 8, 3.0), (24, 8, 1.1), (16, 8, 4.0), (90, 10, 9.0), (4, 4, 0.3)]
)
def test_a_video_with_its_own_sound_equals_the_published_processor(
    omni, reference, rules, make_frames, make_wave, write_video, count, fps, seconds
):
    wave = np.rint(make_wave(seconds) * 32767).astype(np.int16) / np.float32(32768)
    film = write_video(make_frames(count), fps, container="matroska", sound=wave * (32768 / 32767))
    expected = published(reference, rules, ask("a", "video", "b"), films=[film], audio=[wave], own_sound=True)
    sample = omni(ask("a", "video", "b"), videos=[film], use_audio_in_video=True)
    assert_equal(
        sample,
        expected,
        *("pixel_values_videos", "video_grid_thw", "video_second_per_grid"),
        *("input_features", "feature_attention_mask"),
    )
    (item,) = sample.media
    assert item["kind"] == "video"
    assert bytes(item["file"]) == film
    plan = omni.plan(film, "video", use_audio_in_video=True)
    assert plan.tokens == sample.token_counts["video"] + sample.token_counts["audio"]
    assert plan.sound_tokens == sample.token_counts["audio"]
    short = omni.collapse(sample.tokens, sample.media)
    np.testing.assert_array_equal(omni.expand(short, sample.media), sample.tokens)
    assert len(short) < len(sample.tokens) - plan.tokens + 2


def test_all_kinds_together_equal_the_published_processor(
    omni, reference, rules, make_frames, make_wave, write_video, picture
):
    film, wave = write_video(make_frames(12), 4), make_wave(1.5)
    other = make_wave(1.5, seed=1)
    messages = ask("one ", "image", "two ", "audio", "three ", "video", "four ", "audio", "image")
    small = picture.resize((64, 64))
    expected = published(
        reference, rules, messages, images=[picture, small], audio=[wave, other], films=[film]
    )
    sample = omni(messages, images=[picture, small], audios=[wave, other], videos=[film])
    assert_equal(
        sample,
        expected,
        *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
        *("video_second_per_grid", "input_features", "feature_attention_mask"),
    )
    assert [item["kind"] for item in sample.media] == ["image", "audio", "video", "audio", "image"]
    assert [span.kind for span in sample.spans] == ["image", "audio", "video", "audio", "image"]


def test_a_sound_does_not_depend_on_those_beside_it(omni, make_wave):
    short, long = make_wave(0.7), make_wave(2.0, seed=1)
    alone = omni("<audio>", audios=[short]).media[0]["input_features"]
    beside = omni("<audio><audio>", audios=[short, long])
    np.testing.assert_array_equal(beside.media[0]["input_features"], alone)
    batch = collate([beside])
    assert batch["input_features"].shape == (2, 128, 200)
    np.testing.assert_array_equal(batch["feature_attention_mask"].sum(1), [70, 200])


@pytest.mark.parametrize("fps", [2, 3, 4])
@pytest.mark.parametrize("layout", ["a", "v", "s", "ia", "va", "as", "svia", "iss"])
def test_positions_equal_the_models_get_rope_index(
    omni_tokenizer, thinker, rules, make_frames, make_wave, write_video, picture, layout, fps
):
    family = families.create(
        "qwen3_omni",
        omni_tokenizer,
        preprocessor={**rules["image"], **rules["mel"]},
        video_preprocessor={**rules["omni"], "fps": fps},
    )
    omni = OmniProcessor(omni_tokenizer, family=family)
    film = write_video(make_frames(25, 64, 128), 8, container="matroska", sound=make_wave(2.5))
    wave = make_wave(0.8)
    parts = {
        "a": {"type": "audio", "audio": wave},
        "i": {"type": "image", "image": picture},
        "v": {"type": "video", "video": film, "use_audio_in_video": False},
        "s": {"type": "video", "video": film, "use_audio_in_video": True},
    }
    content = [part for kind in layout for part in (parts[kind], {"type": "text", "text": "and"})]
    sample = omni([{"role": "user", "content": content}])
    batch = collate([sample])
    if "s" in layout and "v" in layout:
        # The model counts videos either all with or all without their sound.
        with_sound = [item for item in sample.media if "input_features" in item]
        assert len(with_sound) == layout.count("s") + layout.count("a")
        return
    lengths = batch["feature_attention_mask"].sum(1) if "feature_attention_mask" in batch else None
    expected, _ = thinker.get_rope_index(
        torch.from_numpy(sample.tokens.astype(np.int64))[None],
        *(
            torch.from_numpy(batch[name]) if name in batch else None
            for name in ("image_grid_thw", "video_grid_thw")
        ),
        torch.ones(1, len(sample.tokens), dtype=torch.int64),
        "s" in layout,
        None if lengths is None else torch.from_numpy(lengths),
        torch.from_numpy(batch["video_second_per_grid"]) if "video_second_per_grid" in batch else None,
    )
    positions = omni.positions(sample.tokens, sample.media)
    assert positions.dtype == np.float32
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())


def test_the_thinker_runs_on_what_comes_out(
    omni, thinker, reference, rules, make_frames, make_wave, write_video
):
    wave = np.rint(make_wave(1.4) * 32767).astype(np.int16) / np.float32(32768)
    film = write_video(make_frames(12), 6, container="matroska", sound=wave * (32768 / 32767))
    messages = ask("video", "what is said?")
    expected = published(reference, rules, messages, films=[film], audio=[wave], own_sound=True)
    sample = omni(messages, videos=[film], use_audio_in_video=True)
    batch = {name: torch.from_numpy(value) for name, value in collate([sample]).items()}
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    with torch.no_grad():
        mine = thinker(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_audio_in_video=True, **batch
        ).logits
        theirs = thinker(**expected, use_audio_in_video=True).logits
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 3000),
    fps=st.sampled_from([1.0, 10.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 120.0]),
    wanted=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
)
def test_frames_are_chosen_as_published(total, fps, wanted):
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    rules = ClipRules(PixelRules(), fps=wanted, min_frames=4, max_frames=64)
    mine = every(VideoHeader(1, 1, total, fps, False), rules)
    if total < 2:  # the published one divides by nothing
        assert mine == (0,)
        return
    theirs = Qwen2VLVideoProcessor(min_frames=4, max_frames=64)
    expected = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), fps=wanted).tolist()
    # Rounding makes the published one ask for the frame behind the last one now and then.
    assert mine == tuple(min(number, total - 1) for number in expected)


def test_without_a_video_config_the_published_bounds_hold(omni_tokenizer, rules, make_frames, write_video):
    family = families.create("qwen3_omni", omni_tokenizer, preprocessor={**rules["image"], **rules["mel"]})
    film = write_video(make_frames(4, 64, 96), 4)
    plan = OmniProcessor(omni_tokenizer, family=family).plan(film, "video")
    assert plan.size == (320, 448)  # as transformers' Omni processor sizes it: at least 128 tokens a frame
    assert plan.grid == (2, 20, 28)


def test_a_whole_models_config_is_read_as_its_thinkers(omni_tokenizer, rules):
    tid = omni_tokenizer.convert_tokens_to_ids
    thinker = {"audio_token_id": tid("<|audio_pad|>"), "position_id_per_seconds": 25}
    made: list[Any] = [
        families.create("qwen3_omni", omni_tokenizer, config, {**rules["image"], **rules["mel"]})
        for config in (thinker, {"thinker_config": thinker})
    ]
    assert made[0] == made[1]
    assert made[0].positions_per_second == 25
    assert families.family_of({"model_type": "qwen3_omni_moe", "thinker_config": {}}) == "qwen3_omni"
    assert families.family_of({"model_type": "qwen3_omni_moe_thinker"}) == "qwen3_omni"
