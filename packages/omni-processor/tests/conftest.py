"""Tiny local models: a byte-level tokenizer with Qwen's special tokens, and folders for from_pretrained.

Sounds and videos are made here, too: encoded by PyAV and libsndfile.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import av
import numpy as np
import pytest
import soundfile
from omni_processor import OmniProcessor, families
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

AUDIO_SPECIAL = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")

NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""What transformers' Omni processor asks its tokenizer for."""

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- elif message.content -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

PREPROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64},
}


VIDEO_PREPROCESSOR = {
    **PREPROCESSOR,
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64 * 4},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 32,
}

OMNI_VIDEO_PREPROCESSOR = {
    **PREPROCESSOR,
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 16},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 16,
}

MEL = {
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "dither": 0.0,
}


def _make_tokenizer(template: str | None = CHATML, special=SPECIAL, named=None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(special) if named is None else dict(named),
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [token for token in special if token not in tokenizer.get_vocab()]}
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    """A factory: chat template -> tokenizer."""
    return _make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return _make_tokenizer()


@pytest.fixture(scope="session")
def special(tokenizer):
    """Special token -> its id."""
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}


@pytest.fixture(scope="session")
def text_processor(tokenizer) -> OmniProcessor:
    return OmniProcessor(tokenizer)


@pytest.fixture(scope="session")
def preprocessor() -> dict:
    """An image preprocessor config with small bounds: 4 to 64 tokens an image."""
    return dict(PREPROCESSOR)


@pytest.fixture(scope="session")
def make_processor(tokenizer):
    """A factory: options of OmniProcessor -> qwen3_vl processor with small bounds."""

    def make(**options) -> OmniProcessor:
        family = families.create(
            "qwen3_vl", tokenizer, preprocessor=PREPROCESSOR, video_preprocessor=VIDEO_PREPROCESSOR
        )
        return OmniProcessor(tokenizer, family=family, **options)

    return make


@pytest.fixture(scope="session")
def processor(make_processor) -> OmniProcessor:
    return make_processor()


@pytest.fixture(scope="session")
def omni_tokenizer() -> PreTrainedTokenizerFast:
    return _make_tokenizer(special=(*SPECIAL, *AUDIO_SPECIAL), named=NAMED)


@pytest.fixture(scope="session")
def make_omni(omni_tokenizer):
    """A factory: options of OmniProcessor -> qwen3_omni processor with small bounds."""

    def make(**options) -> OmniProcessor:
        family = families.create(
            "qwen3_omni",
            omni_tokenizer,
            preprocessor={**PREPROCESSOR, **MEL},
            video_preprocessor=OMNI_VIDEO_PREPROCESSOR,
        )
        return OmniProcessor(omni_tokenizer, family=family, **options)

    return make


@pytest.fixture(scope="session")
def omni(make_omni) -> OmniProcessor:
    return make_omni()


@pytest.fixture(scope="session")
def rules():
    """The preprocessor configs of the tiny models: image, video (of each family), mel."""
    return {
        "image": dict(PREPROCESSOR),
        "vl": dict(VIDEO_PREPROCESSOR),
        "omni": dict(OMNI_VIDEO_PREPROCESSOR),
        "mel": dict(MEL),
    }


def _make_frames(count: int, height: int = 64, width: int = 96, seed: int = 0) -> np.ndarray:
    """uint8 [frames, height, width, 3]: a bright square that wanders over a noisy ground."""
    frames = np.random.default_rng(seed).integers(0, 80, (count, height, width, 3)).astype(np.uint8)
    for number, frame in enumerate(frames):
        at = (number * 5) % (width - 16)
        frame[8:24, at : at + 16] = (250, 200, 40)
    return frames


def _make_wave(seconds: float, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """float32 [samples]: a chord in noise."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * tone * time) for tone in random.uniform(100, 3000, 3)) / 4
    return (wave + 0.02 * random.standard_normal(len(time))).astype(np.float32)


def _write_video(
    frames,
    fps=8,
    codec="libx264",
    container="mp4",
    pixels="yuv420p",
    sound=None,
    rate=16000,
    rotation=0,
    early_index=False,
) -> bytes:
    """A video file; with `sound` float32 [samples] as a second track, of PCM so that it is not changed."""
    target = io.BytesIO()
    options = {"moov_size": "3000"} if early_index and container == "mp4" else {}
    with av.open(target, "w", format=container, options=options) as file:
        stream: Any = file.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        if rotation:
            stream.set_display_rotation(rotation)
        track: Any = None
        if sound is not None:
            track = file.add_stream("pcm_s16le", rate=rate)
            track.layout = "mono"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
        if track is not None and sound is not None:
            samples = np.rint(sound * 32767).astype(np.int16)[None]
            made = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            made.sample_rate = rate
            file.mux(track.encode(made))
            file.mux(track.encode(None))
    return target.getvalue()


def _write_sound(wave, rate=16000, container="WAV", subtype="FLOAT") -> bytes:
    target = io.BytesIO()
    soundfile.write(target, wave.T if wave.ndim == 2 else wave, rate, format=container, subtype=subtype)
    return target.getvalue()


@pytest.fixture(scope="session")
def make_frames():
    return _make_frames


@pytest.fixture(scope="session")
def make_wave():
    return _make_wave


@pytest.fixture(scope="session")
def write_video():
    return _write_video


@pytest.fixture(scope="session")
def write_sound():
    return _write_sound


@pytest.fixture
def vl_folder(tmp_path, tokenizer) -> Path:
    """A qwen3_vl model folder as the hub has them, without weights."""
    folder = tmp_path / "tiny-vl"
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PREPROCESSOR))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture
def text_folder(tmp_path, tokenizer) -> Path:
    """A text-only model folder, without weights."""
    folder = tmp_path / "tiny-text"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.fixture(scope="session")
def picture() -> Image.Image:
    """A 128 x 96 picture with smooth and noisy parts."""
    rows, columns = np.mgrid[0:96, 0:128]
    smooth = np.stack([rows * 2, columns * 2 - rows, 255 - columns], axis=-1).clip(0, 255)
    noise = np.random.default_rng(0).integers(0, 60, smooth.shape)
    return Image.fromarray((smooth * 0.75 + noise).astype(np.uint8))
