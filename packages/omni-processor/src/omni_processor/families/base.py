"""The protocol every model family fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from PIL import Image

from omni_processor.images import ImageHeader
from omni_processor.sample import Budget, ItemPlan, MediaItem


class Family(Protocol):
    """Pixel rules, special tokens and positions of one kind of model. Stateless and thread-safe."""

    @property
    def name(self) -> str:
        """The family's registered name."""
        ...

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        """Modality -> the token id that is repeated for its items. Its keys are the modalities taken."""
        ...

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """Token ids that only media may put into a sequence: a sampler must never emit them."""
        ...

    def placeholder_text(self, kind: str) -> str:
        """What stands for one item in text that goes through no chat template."""
        ...

    def plan(self, header: ImageHeader, budget: Budget) -> ItemPlan:
        """What an item will become: size, grid, tokens; from its header alone."""
        ...

    def tensorize(self, image: Image.Image, plan: ItemPlan) -> MediaItem:
        """Upright RGB pixels to the arrays the model is fed, following the plan."""
        ...

    def item_tokens(self, item: MediaItem) -> int:
        """How many placeholder tokens an item takes, from its arrays."""
        ...

    def positions(self, length: int, spans: Sequence[tuple[int, int, MediaItem]]) -> np.ndarray:
        """Rotary positions int64 [3, length] of a sequence with items at (start, end, item), in order."""
        ...
