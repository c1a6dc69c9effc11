"""A tiny Omni thinker with weights, and rows that are shown images, video and sound by transformers' own
extractors.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax.backends.models import build_model
from relax.backends.tiny import write_tiny
from relax.backends.train.base import Packed
from relax.backends.train.conformance import make_rows, pack
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor

VISION_START, VISION_END, IMAGE, VIDEO = 3, 4, 5, 6
AUDIO_START, AUDIO_END, AUDIO = 103, 104, 105
TEMPERATURE = 0.8
PATCH_VALUES = 3 * 2 * 16 * 16

Item = dict[str, Any]
Row = dict[str, Any]


class Studio:
    """Makes items and rows, and says what the model itself makes of them."""

    image_token, video_token, audio_token = IMAGE, VIDEO, AUDIO
    unsampled = (IMAGE, VIDEO, AUDIO)
    temperature = TEMPERATURE

    def __init__(self, folder: Path) -> None:
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def image(self, height: int = 4, width: int = 4, seed: int = 0) -> Item:
        return {
            "kind": "image",
            "pixel_values": _pixels(height * width, seed),
            "image_grid_thw": np.asarray([[1, height, width]], np.int64),
        }

    def video(
        self, time: int = 3, height: int = 2, width: int = 4, seconds: float = 0.5, seed: int = 0
    ) -> Item:
        return {
            "kind": "video",
            "pixel_values_videos": _pixels(time * height * width, seed),
            "video_grid_thw": np.asarray([[time, height, width]], np.int64),
            "video_second_per_grid": np.asarray([seconds], np.float32),
        }

    def sound(self, seconds: float, seed: int = 0) -> Item:
        """A chord in noise, through the extractor of the published model."""
        random = np.random.default_rng(seed)
        time = np.arange(int(seconds * 16000)) / 16000
        wave = sum(np.sin(2 * np.pi * tone * time) for tone in random.uniform(100, 3000, 3))
        wave = (wave + 0.1 * random.standard_normal(len(time))).astype(np.float32)
        made = self.extractor(
            wave, sampling_rate=16000, padding="longest", truncation=False, return_attention_mask=True,
            return_tensors="np",
        )  # fmt: skip
        return {
            "kind": "audio",
            "input_features": made["input_features"],
            "feature_attention_mask": made["attention_mask"],
        }

    def talking(self, video: Item, sound: Item) -> Item:
        """A video with its own sound."""
        return {**video, **sound, "kind": "video"}

    def marked(self, item: Item) -> list[int]:
        """An item's tokens as transformers' processor expands them."""
        heard = [AUDIO] * _sound_tokens(item)
        if "pixel_values" in item:
            return [VISION_START, *[IMAGE] * _seen_tokens(item["image_grid_thw"][0]), VISION_END]
        if "pixel_values_videos" not in item:
            return [AUDIO_START, *heard, AUDIO_END]
        grid = item["video_grid_thw"][0]
        if not heard:
            return [VISION_START, *[VIDEO] * _seen_tokens(grid), VISION_END]
        moments = np.repeat(np.arange(grid[0]), _seen_tokens(grid) // grid[0])
        moments = moments * float(item["video_second_per_grid"][0]) * 13.0
        both = sorted([*((m, VIDEO) for m in moments), *((m, AUDIO) for m in range(len(heard)))])
        return [VISION_START, AUDIO_START, *(token for _, token in both), AUDIO_END, VISION_END]

    def show(self, row: Row, items: Sequence[Item], after: int | None = None) -> Row:
        """Show items behind the first prompt token, or let a tool show them after some response tokens."""
        shown = [token for item in items for token in self.marked(item)]
        media = [*row.get("media", []), *items]
        if after is None:
            tokens = np.insert(row["tokens"], 1, shown)
            return row | {
                "tokens": tokens,
                "prompt_length": row["prompt_length"] + len(shown),
                "media": media,
            }
        columns = {
            name: np.insert(row[name], after, np.zeros(len(shown), row[name].dtype))
            for name in ("loss_mask", "rollout_logprobs", "advantages")
        }
        tokens = np.insert(row["tokens"], int(row["prompt_length"]) + after, shown)
        return row | columns | {"tokens": tokens, "media": media}

    def rows(self) -> list[Row]:
        """Text; an image; sound; a short sound beside a long one; video and an image; a video with its sound;
        a short sound alone; an image and then sound that a tool plays.
        """
        image, other = self.image(seed=1), self.image(2, 4, seed=2)
        video, long, short = self.video(seed=3), self.sound(1.3, 4), self.sound(0.3, 5)
        plain = make_rows(90, [(3, 4), (2, 5), (4, 3), (3, 4), (2, 4), (3, 3), (2, 3), (3, 6)])
        media = [
            [],
            [image],
            [long],
            [short, long],
            [video, other],
            [self.talking(video, long)],
            [short],
            [image],
        ]
        rows = [
            self.show(row | {"tokens": row["tokens"] + 10, "media": []}, items)
            for row, items in zip(plain, media, strict=True)
        ]
        rows[-1] = self.show(rows[-1], [long], after=2)
        return rows

    def batch(self, rows: Sequence[Row]) -> Packed:
        return dataclasses.replace(pack(rows), media=[row["media"] for row in rows])

    def arguments(self, row: Row) -> dict[str, Any]:
        """What the model's own forward takes for one row."""
        items = row["media"]
        found: dict[str, Any] = {}
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            parts = [torch.as_tensor(item[name]) for item in items if name in item]
            if parts:
                found[name] = torch.cat(parts)
        seconds = [
            float(item["video_second_per_grid"][0]) for item in items if "video_second_per_grid" in item
        ]
        if seconds:
            found["video_second_per_grid"] = torch.tensor(seconds)
        sounds = [item for item in items if "input_features" in item]
        if sounds:
            widest = max(item["input_features"].shape[2] for item in sounds)
            for name in ("input_features", "feature_attention_mask"):
                found[name] = torch.cat([_padded(torch.as_tensor(item[name]), widest) for item in sounds])
        found["use_audio_in_video"] = any(
            {"input_features", "pixel_values_videos"} <= item.keys() for item in items
        )
        return found

    def plain_logprobs(self, model: Any, row: Row) -> torch.Tensor:
        tokens, prompt = torch.as_tensor(row["tokens"])[None], int(row["prompt_length"])
        logits = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **self.arguments(row)
        ).logits[0, prompt - 1 : -1]
        return self.said(logits, tokens[0, prompt:])

    def said(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logprobs over the tokens that a policy may say; 0 for the others."""
        logits = logits / self.temperature
        logits = logits.index_fill(1, torch.tensor(self.unsampled), -torch.inf)
        found = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return torch.where(torch.isin(targets, torch.tensor(self.unsampled)), 0.0, found)


def _pixels(patches: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((patches, PATCH_VALUES)).astype(np.float32)


def _seen_tokens(grid: np.ndarray) -> int:
    return int(grid.prod()) // 4


def _sound_tokens(item: Item) -> int:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    if "input_features" not in item:
        return 0
    return int(_get_feat_extract_output_lengths(int(item["feature_attention_mask"].sum())))


def _padded(part: torch.Tensor, widest: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, widest - part.shape[-1]))


@pytest.fixture(scope="session")
def omni_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(
        tmp_path_factory.mktemp("omni") / "qwen3_omni", "qwen3_omni", max_position_embeddings=256
    )
    model = build_model(folder, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual initialisation, so that logits are far apart and errors show.
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
            else:
                parameter.add_(
                    0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def whole_folder(omni_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same thinker in a folder that holds what speaks as well."""
    whole = tmp_path_factory.mktemp("omni") / "whole"
    whole.mkdir()
    for path in omni_folder.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (whole / path.name).write_bytes(path.read_bytes())
    thinker = json.loads((omni_folder / "config.json").read_text())
    config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
    (whole / "config.json").write_text(json.dumps(config))
    own = {f"thinker.{name}": tensor for name, tensor in load_file(omni_folder / "model.safetensors").items()}
    spoken = {"talker.model.norm.weight": torch.ones(3), "code2wav.code_offset": torch.arange(2)}
    save_file(own | spoken, whole / "model.safetensors", metadata={"format": "pt"})
    return whole


@pytest.fixture(scope="session")
def studio(omni_folder: Path) -> Studio:
    return Studio(omni_folder)
