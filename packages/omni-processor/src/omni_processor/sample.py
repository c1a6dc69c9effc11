"""The nouns: what an item will cost, what an item became, and a processed sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from omni_processor.errors import ConfigError

MediaItem = dict[str, Any]
"""One item as plain data: ``"kind"`` (``"image"``) and its named numpy arrays, exactly what the model is fed.

For qwen3_vl images: ``"pixel_values"`` float32 [patches, channels * temporal * patch * patch] and
``"image_grid_thw"`` int64 [1, 3] in patches. The arrays are read-only and may be shared between samples.
"""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What one item will become, known from its header alone.

    Attributes:
        kind: the modality, ``"image"``.
        source_size: (height, width) in pixels, upright (EXIF orientation applied).
        size: (height, width) in pixels after the resize.
        grid: (time, height, width) in patches.
        patches: rows of `pixel_values`.
        tokens: placeholder tokens it takes in the sequence.
    """

    kind: str
    source_size: tuple[int, int]
    size: tuple[int, int]
    grid: tuple[int, int, int]
    patches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """Where an item sits: tokens[start:end] are its placeholders, `item` its index in the media."""

    kind: str
    start: int
    end: int
    item: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits in tokens, on top of what the model's own preprocessor config says.

    Attributes:
        min_item_tokens: an image is enlarged to at least this many tokens; None = the model's own minimum.
        max_item_tokens: an image is shrunk to at most this many tokens; None = the model's own maximum.
        max_sample_tokens: all media items of a sample together, else `BudgetExceeded`; None = no limit.
    """

    min_item_tokens: int | None = None
    max_item_tokens: int | None = None
    max_sample_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused from the header, before decoding.

    Attributes:
        max_bytes: encoded size of one item, in bytes.
        max_pixels: width * height of one image as stored.
    """

    max_bytes: int = 64 * 2**20
    max_pixels: int = 64_000_000

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(limits: Budget | Limits) -> None:
    for field in fields(limits):
        value = getattr(limits, field.name)
        if value is not None and value < 1:
            raise ConfigError(f"{field.name} is {value}; at least 1 was expected")


@dataclass(frozen=True, slots=True)
class Sample:
    """A processed conversation (or a piece of one).

    Attributes:
        tokens: int32 [n], placeholders already expanded: exactly the ids the model sees.
        media: the items in the order of their spans.
        spans: one a media item, positions in `tokens`.
        token_counts: tokens by modality: ``{"text": ..., "image": ...}``; they add up to n.
    """

    tokens: np.ndarray
    media: list[MediaItem]
    spans: list[Span]
    token_counts: Mapping[str, int]


def collate(items: Sequence[MediaItem | Sample]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of media items by name, in order, into the tensors of one batch.

    Args:
        items: media items, or samples whose items are taken in order.

    Returns:
        For images: ``pixel_values`` float32 [sum of patches, width] and ``image_grid_thw`` int64 [images, 3].
        An empty dict when there is no media. The arrays are fresh copies.

    Raises:
        ValueError: items whose arrays differ in dtype or trailing shape (they come from different models).
    """
    flat: list[MediaItem] = []
    for item in items:
        flat.extend(item.media if isinstance(item, Sample) else [item])
    columns: dict[str, list[np.ndarray]] = {}
    for index, item in enumerate(flat):
        for name, value in item.items():
            if name == "kind":
                continue
            column = columns.setdefault(name, [])
            if column and (column[0].shape[1:] != value.shape[1:] or column[0].dtype != value.dtype):
                raise ValueError(
                    f"media item {index}: {name} is {value.dtype} {value.shape}, the items before it "
                    f"{column[0].dtype} {column[0].shape}: collate items of one model only"
                )
            column.append(value)
    return {name: np.concatenate(values, axis=0) for name, values in columns.items()}
