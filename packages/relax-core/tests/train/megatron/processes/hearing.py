"""Micro-batches that show a thinker images, video and sound, for `problem.py`. Imports no backend.

Tokens below 10 mark media, the others are text.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import seeing
import torch
from relax.backends.train.base import Packed
from seeing import END, IMAGE, START, VIDEO

AUDIO_START, AUDIO_END, AUDIO = 7, 8, 9
MEL_BINS = 16
SECONDS = {"short": 0.3, "long": 1.2}
STEP = 0.5
"""Seconds that a step in time of the clip takes, half a position more than a whole number of them."""

# Rows of each micro-batch: prompt tokens, response tokens, what the prompt shows, what a tool shows behind
# two response tokens.
_ROWS = [
    [(3, 4, (), ()), (3, 5, ("large", "short"), ()), (2, 3, ("long",), ())],
    [(2, 4, ("clip", "short", "long"), ()), (3, 4, ("long", "wide"), ())],
    [(4, 3, (), ()), (3, 4, (), ())],
    [(3, 3, ("talk",), ()), (2, 5, ("short",), ("wide",)), (2, 2, ("talk", "small"), ())],
]


def hears(folder: str) -> bool:
    return "audio_config" in json.loads((Path(folder) / "config.json").read_text())


@functools.cache
def _sound(name: str) -> dict[str, Any]:
    """A chord in noise, through transformers' own feature extractor."""
    from transformers import WhisperFeatureExtractor

    random = np.random.default_rng(list(SECONDS).index(name))
    time = np.arange(int(SECONDS[name] * 16000)) / 16000
    wave = sum(np.sin(2 * np.pi * tone * time) for tone in random.uniform(100, 3000, 3))
    made = WhisperFeatureExtractor(feature_size=MEL_BINS)(
        (wave + 0.1 * random.standard_normal(len(time))).astype(np.float32),
        sampling_rate=16000,
        padding="longest",
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}


def item(name: str) -> dict[str, Any]:
    """An image, a clip, a sound, or a clip with its own sound; always the same one of this name."""
    if name in SECONDS:
        return {"kind": "audio", **_sound(name)}
    if name in ("clip", "talk"):
        clip = seeing.item("clip") | {"video_second_per_grid": np.asarray([STEP], np.float32)}
        return clip | (_sound("long") if name == "talk" else {})
    return seeing.item(name)


def marked(name: str) -> list[int]:
    """Its tokens, as transformers' processor of the thinker expands them."""
    if name in SECONDS:
        return [AUDIO_START, *[AUDIO] * _tokens(name), AUDIO_END]
    time, height, width = seeing.GRIDS["clip" if name == "talk" else name]
    frame = height * width // 4
    if name == "talk":
        moments = [(step * STEP * 13, VIDEO) for step in range(time) for _ in range(frame)]
        both = sorted([*moments, *((place, AUDIO) for place in range(_tokens("long")))])
        return [START, AUDIO_START, *(token for _, token in both), AUDIO_END, END]
    return [START, *[VIDEO if name == "clip" else IMAGE] * (time * frame), END]


def _tokens(name: str) -> int:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    return int(_get_feat_extract_output_lengths(int(_sound(name)["feature_attention_mask"].sum())))


def batches(seed: int, vocabulary: int, count: int = 4) -> list[Packed]:
    """Micro-batches of rows with and without media; one shows none, one shows a clip with its sound twice."""
    return seeing.made_of(_ROWS, item, marked, seed, vocabulary, count)


def arguments(tokens: torch.Tensor, media: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What transformers' own forward is given for a row int64 [tokens]."""
    found: dict[str, Any] = {"attention_mask": torch.ones_like(tokens)[None]}
    widest = max((one["input_features"].shape[2] for one in media if "input_features" in one), default=0)
    for one in media:
        for name, array in one.items():
            if name == "kind":
                continue
            part = torch.as_tensor(array)
            if name in ("input_features", "feature_attention_mask"):
                part = torch.nn.functional.pad(part, (0, widest - part.shape[-1]))
            found[name] = torch.cat([found[name], part]) if name in found else part
    found["use_audio_in_video"] = any(
        {"input_features", "pixel_values_videos"} <= one.keys() for one in media
    )
    return found


def write_config(text: dict[str, Any], deepstack: list[int]) -> dict[str, Any]:
    """A tiny config of a thinker around a text config."""
    seen = seeing.write_config("qwen3_omni_moe", text, False, deepstack)
    return seen | {
        "audio_start_token_id": AUDIO_START,
        "audio_end_token_id": AUDIO_END,
        "audio_token_id": AUDIO,
        "position_id_per_seconds": 13,
        "vision_config": seen["vision_config"] | {"model_type": "qwen3_omni_moe_vision_encoder"},
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "d_model": 16,
            "downsample_hidden_size": 4,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "encoder_layers": 2,
            "n_window": 50,
            "n_window_infer": 800,
            "num_mel_bins": MEL_BINS,
            "output_dim": text["hidden_size"],
        },
    }
