"""Models that read text only: media is a clear error, positions are 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from omni_processor.errors import UnsupportedModality
from omni_processor.images import ImageHeader
from omni_processor.sample import Budget, ItemPlan, MediaItem

_REFUSAL = "this model reads text only: use a vision model, or leave the media out of the conversation"


@dataclass(frozen=True, slots=True)
class TextOnly:
    """The family without media."""

    name: str = "text"
    reserved_ids: tuple[int, ...] = ()

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        return {}

    def placeholder_text(self, kind: str) -> str:
        raise UnsupportedModality(_REFUSAL, item=kind)

    def plan(self, header: ImageHeader, budget: Budget) -> ItemPlan:
        raise UnsupportedModality(_REFUSAL, item="image")

    def tensorize(self, image: Image.Image, plan: ItemPlan) -> MediaItem:
        raise UnsupportedModality(_REFUSAL, item="image")

    def item_tokens(self, item: MediaItem) -> int:
        raise UnsupportedModality(_REFUSAL, item=str(item.get("kind", "media")))

    def positions(self, length: int, spans: Sequence[tuple[int, int, MediaItem]]) -> np.ndarray:
        return np.tile(np.arange(length, dtype=np.int64), (3, 1))


def create(tokenizer: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> TextOnly:
    """The text family needs nothing from the model's configs."""
    return TextOnly()
