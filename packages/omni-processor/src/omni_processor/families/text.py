"""Models that read text only: media is a clear error, positions are 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_processor.errors import UnsupportedModality
from omni_processor.families.base import Decoded, Header
from omni_processor.sample import Budget, ItemPlan, MediaItem
from omni_processor.sounds import SoundHeader

_REFUSAL = "this model reads text only: use a vision model, or leave the media out of the conversation"


@dataclass(frozen=True, slots=True)
class TextOnly:
    """The family without media."""

    name: str = "text"
    reserved_ids: tuple[int, ...] = ()
    sampling_rate: int = 0
    fps: float = 0.0
    hears_videos: bool = False

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        return {}

    def placeholder_text(self, kind: str) -> str:
        raise UnsupportedModality(_REFUSAL, item=kind)

    def plan(self, header: Header, budget: Budget, sound: SoundHeader | None = None) -> ItemPlan:
        raise UnsupportedModality(_REFUSAL, item="media")

    def tensorize(self, decoded: Decoded, plan: ItemPlan, item: str) -> MediaItem:
        raise UnsupportedModality(_REFUSAL, item=item)

    def placeholders(self, item: MediaItem) -> np.ndarray:
        raise UnsupportedModality(_REFUSAL, item=str(item.get("kind", "media")))

    def runs(self, item: MediaItem) -> Sequence[int]:
        raise UnsupportedModality(_REFUSAL, item=str(item.get("kind", "media")))

    def expansion(self, item: MediaItem) -> np.ndarray:
        raise UnsupportedModality(_REFUSAL, item=str(item.get("kind", "media")))

    def positions(self, length: int, shown: Sequence[tuple[np.ndarray, MediaItem]]) -> np.ndarray:
        return np.tile(np.arange(length, dtype=np.int64), (3, 1))


def create(
    tokenizer: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video: Mapping[str, Any]
) -> TextOnly:
    """The text family needs nothing from the model's configs."""
    return TextOnly()
