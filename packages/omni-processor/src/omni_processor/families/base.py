"""The protocol every model family fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from PIL import Image

from omni_processor.images import ImageHeader
from omni_processor.sample import Budget, ItemPlan, MediaItem
from omni_processor.sounds import SoundHeader
from omni_processor.videos import Clip, VideoHeader

Header = ImageHeader | VideoHeader | SoundHeader

Decoded = Image.Image | Clip | np.ndarray
"""Upright RGB pixels, a clip, or mono samples float32 [samples] at the family's rate."""


class Family(Protocol):
    """Media rules, special tokens and positions of one kind of model. Stateless and thread-safe."""

    @property
    def name(self) -> str:
        """The family's registered name."""
        ...

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        """Modality -> the token id that stands for its items. Its keys are the modalities taken."""
        ...

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """Token ids that only media may put into a sequence: a sampler must never emit them."""
        ...

    @property
    def sampling_rate(self) -> int:
        """Samples a second that the model hears; 0 for a model without ears."""
        ...

    @property
    def fps(self) -> float:
        """Frames a second that the model is shown of a video; 0 for a model that sees none."""
        ...

    @property
    def hears_videos(self) -> bool:
        """Whether a video can come with its own sound."""
        ...

    def placeholder_text(self, kind: str) -> str:
        """What stands for one item in text that goes through no chat template."""
        ...

    def plan(self, header: Header, budget: Budget, sound: SoundHeader | None = None) -> ItemPlan:
        """What an item will become: size, grid, tokens; from its header alone.

        Args:
            header: of the image, video or sound.
            budget: in tokens.
            sound: of a video that comes with its own.
        """
        ...

    def tensorize(self, decoded: Decoded, plan: ItemPlan, item: str) -> MediaItem:
        """What was decoded to the arrays the model is fed, following the plan; `item` is for messages."""
        ...

    def placeholders(self, item: MediaItem) -> np.ndarray:
        """The placeholder ids an item takes, int32, from its arrays; without what stands between them."""
        ...

    def runs(self, item: MediaItem) -> Sequence[int]:
        """How many of its placeholders stand directly behind each other, run by run."""
        ...

    def expansion(self, item: MediaItem) -> np.ndarray:
        """The ids, int32, that take the place of the one placeholder of an item."""
        ...

    def positions(self, length: int, shown: Sequence[tuple[np.ndarray, MediaItem]]) -> np.ndarray:
        """Rotary positions [3, length] of a sequence, the places of each item's placeholders given in order.

        int64; float32 where the model counts fractions of a position.
        """
        ...
