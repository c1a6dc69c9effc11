"""What a sample shows, as fields of the bus and back: one field an array name, and one for the order.

The arrays of a sample's items are joined name by name along their first axis, so that a group's members can
share them; sounds, whose frames are their last axis, lie end to end without padding. Between kinds that loses
the order, which a thinker's positions depend on, and which sound belongs to which video: `media/order` keeps
both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from omni_processor import collate

from relax import schema

Item = Mapping[str, Any]

_KINDS = ("image", "video", "audio", "video with sound")
"""By their number in `media/order`."""

_FEATURES, _MASK, _LENGTHS = "input_features", "feature_attention_mask", "audio_feature_lengths"


class MediaError(ValueError):
    """A sample shows what the bus has no fields for."""


def fields_of(items: Sequence[Item]) -> dict[str, np.ndarray | None]:
    """The media fields of a sample; None where its items have no such array, all None without items.

    Raises:
        MediaError: an item is of no known kind, or holds an array that is no field.
    """
    if not items:
        return dict.fromkeys(schema.MEDIA_FIELDS)
    order = np.array([_kind(item) for item in items], np.uint8)
    seen = [{name: value for name, value in item.items() if name not in (_FEATURES, _MASK)} for item in items]
    joined = collate(seen) | _sounds([item for item in items if _FEATURES in item])
    arrays = {schema.MEDIA_PREFIX + name: array for name, array in joined.items()}
    unknown = arrays.keys() - set(schema.MEDIA_FIELDS)
    if unknown:
        raise MediaError(
            f"media items hold {', '.join(sorted(unknown))}; the bus carries {', '.join(schema.MEDIA_FIELDS)}"
        )
    arrays[schema.MEDIA_ORDER] = order
    return {name: arrays.get(name) for name in schema.MEDIA_FIELDS}


def media_of(batch: Any, row: int) -> list[dict[str, Any]]:
    """The items of a row of a batch in their order; empty for none. Arrays are views where they can be."""
    if schema.MEDIA_ORDER not in batch.fields or batch[schema.MEDIA_ORDER][row] is None:
        return []
    cut = _Cut(
        {
            name.removeprefix(schema.MEDIA_PREFIX): batch[name][row]
            for name in schema.MEDIA_FIELDS
            if batch[name][row] is not None
        }
    )
    return [cut.item(_KINDS[number]) for number in batch[schema.MEDIA_ORDER][row]]


def _sounds(items: Sequence[Item]) -> dict[str, np.ndarray]:
    """Their frames end to end, and how many each has; nothing where there is no sound."""
    if not items:
        return {}
    frames = [item[_FEATURES][0][:, item[_MASK][0] != 0].T for item in items]
    return {_FEATURES: np.concatenate(frames), _LENGTHS: np.array([len(one) for one in frames], np.int64)}


def _kind(item: Item) -> int:
    kind = item.get("kind", "image")
    if kind == "video" and "input_features" in item:
        kind = "video with sound"
    if kind not in _KINDS:
        raise MediaError(f"a media item is of kind {kind!r}; the bus carries {', '.join(_KINDS[:3])}")
    return _KINDS.index(kind)


class _Cut:
    """Joined arrays, from which items are cut one after the other."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._taken: dict[str, int] = {}

    def item(self, kind: str) -> dict[str, Any]:
        match kind:
            case "image":
                return {"kind": "image", **self._seen("pixel_values", "image_grid_thw")}
            case "audio":
                return {"kind": "audio", **self._heard()}
        item = {"kind": "video", **self._seen("pixel_values_videos", "video_grid_thw")}
        if "video_second_per_grid" in self._arrays:
            item |= self._next("video_second_per_grid")
        return item | self._heard() if kind == "video with sound" else item

    def _seen(self, pixels: str, grids: str) -> dict[str, np.ndarray]:
        grid = self._next(grids)
        start = self._taken.get(pixels, 0)
        self._taken[pixels] = start + int(grid[grids].prod())
        return {pixels: self._arrays[pixels][start : self._taken[pixels]], **grid}

    def _heard(self) -> dict[str, np.ndarray]:
        frames = int(self._next(_LENGTHS)[_LENGTHS][0])
        start = self._taken.get(_FEATURES, 0)
        self._taken[_FEATURES] = start + frames
        features = np.ascontiguousarray(self._arrays[_FEATURES][start : start + frames].T)
        return {_FEATURES: features[None], _MASK: np.ones((1, frames), np.int64)}

    def _next(self, name: str) -> dict[str, np.ndarray]:
        row = self._taken.get(name, 0)
        self._taken[name] = row + 1
        return {name: self._arrays[name][row : row + 1]}
