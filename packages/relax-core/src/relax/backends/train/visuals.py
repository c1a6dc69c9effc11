"""Pictures and videos of a micro-batch: checked, each different one once, and where their tokens stand.

Only the places that belong to a row's items are pictures. Any other image token, such as a tool may print, is
text that was shown. Qwen3-VL writes a time before every frame of a video, so that a video takes a run of
tokens for each of its frames where an image takes one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from relax.backends.train.errors import BatchError

Grid = tuple[int, int, int]
"""(time, height, width) in patches."""

Media = Sequence[Sequence[Mapping[str, Any]]]
"""`Packed.media`: the items of each row, in the order of their placeholders."""

_FIELDS = {
    frozenset({"pixel_values", "image_grid_thw"}): "image",
    frozenset({"pixel_values_videos", "video_grid_thw"}): "video",
}


@dataclass(frozen=True)
class Visual:
    """An image or a video.

    Attributes:
        kind: which of them.
        pixels: float32 [patches, values of a patch]; a copy.
        grid: of its patches; a video has a time above 1.
    """

    kind: Literal["image", "video"]
    pixels: Tensor
    grid: Grid

    @property
    def patches(self) -> int:
        return len(self.pixels)

    @property
    def frames(self) -> list[Grid]:
        """The grid of each of its runs of tokens."""
        time, height, width = self.grid
        return [self.grid] if self.kind == "image" else [(1, height, width)] * time


@dataclass(frozen=True)
class Shown:
    """A visual where a row shows it.

    Attributes:
        row: which row.
        visual: which of the different ones.
        runs: where each of its runs of tokens begins in the row, ascending.
    """

    row: int
    visual: int
    runs: tuple[int, ...]


@dataclass(frozen=True)
class Marks:
    """How a model marks visuals.

    Attributes:
        image: token id that stands for a part of an image.
        video: token id that stands for a part of a frame; None where the model sees no videos.
        merge: patches, each way, that one token stands for.
        values: of a patch.
    """

    image: int
    video: int | None
    merge: int
    values: int

    @classmethod
    def of(cls, config: Any) -> "Marks":
        """Those of a Hugging Face config with a `vision_config`."""
        return cls(
            int(config.image_token_id),
            getattr(config, "video_token_id", None),
            int(config.vision_config.spatial_merge_size),
            patch_values(config.vision_config),
        )

    def tokens(self, grid: Grid) -> int:
        """How many tokens a grid takes."""
        time, height, width = grid
        return time * height * width // self.merge**2


def read(rows: Sequence[Tensor], media: Media, marks: Marks) -> tuple[list[Visual], list[Shown]]:
    """The different visuals of a micro-batch in the order in which they are first shown, and where all are.

    Args:
        rows: int64 [tokens] of each row, placeholders expanded.
        media: `pixel_values` [patches, values] and `image_grid_thw` [3] or [images, 3] of each item, or
            `pixel_values_videos` and `video_grid_thw` alike.
        marks: of the model.

    Raises:
        BatchError: an item is neither, or a row's placeholders do not hold its items.
    """
    different: list[Visual] = []
    known: dict[tuple[str, bytes, Grid], int] = {}
    shown: list[Shown] = []
    for row, kind, pixels, grid, runs in _placed(rows, media, marks):
        key = (kind, pixels.tobytes(), grid)
        if key not in known:
            known[key] = len(different)
            different.append(Visual(kind, torch.tensor(pixels), grid))
        shown.append(Shown(row, known[key], runs))
    return different, shown


def require(rows: Sequence[Tensor], media: Media, marks: Marks) -> None:
    """See that `read` can read this; no pixel is copied.

    Raises:
        BatchError: it cannot.
    """
    for _ in _placed(rows, media, marks):
        pass


def places(shown: Shown, visual: Visual, marks: Marks) -> Tensor:
    """int64 [tokens of the visual], where they stand in their row."""
    return torch.cat(
        [
            torch.arange(start, start + marks.tokens(grid))
            for start, grid in zip(shown.runs, visual.frames, strict=True)
        ]
    )


def rope_positions(length: int, runs: Sequence[tuple[int, Grid]], merge: int) -> Tensor:
    """int64 [3, length]: time, height and width of each token of a row, as Qwen3-VL counts them.

    Text counts on along all three axes. A run of visual tokens spreads from where the text before it ended,
    and what follows goes on behind its longer side ("Qwen2-VL", Wang et al., 2024, section 2.1).

    Args:
        length: tokens of the row.
        runs: where each begins and the grid it shows, ascending.
        merge: patches, each way, that one token stands for.
    """
    parts: list[Tensor] = []
    cursor = following = 0  # the next token, and the position it gets
    for start, (time, height, width) in runs:
        parts.append(torch.arange(following, following + start - cursor).expand(3, -1))
        following += start - cursor
        height, width = height // merge, width // merge
        axes = torch.meshgrid(torch.arange(time), torch.arange(height), torch.arange(width), indexing="ij")
        parts.append(torch.stack(axes).flatten(1) + following)
        following += max(height, width)
        cursor = start + time * height * width
    parts.append(torch.arange(following, following + length - cursor).expand(3, -1))
    return torch.cat(parts, dim=1)


def patch_values(vision: Any) -> int:
    """The values of a patch, of a `vision_config` of the Qwen families."""
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def require_patches(
    row: int, names: tuple[str, str], pixels: np.ndarray, grids: np.ndarray, marks: "Patches"
) -> None:
    """See that pixels are the patches of whole grids.

    Args:
        row: for messages.
        names: of the pixels and of the grids.
        pixels: numbers [patches, values].
        grids: int64 [visuals, 3]: time, height and width in patches.
        marks: of the model.

    Raises:
        BatchError: they are not.
    """
    listed = grids.tolist()
    if (grids < 1).any() or (grids[:, 1:] % marks.merge).any():
        raise BatchError(
            f"{names[1]} of row {row} is {listed}; expected (time, height, width) above 0, height and "
            f"width in multiples of {marks.merge} patches"
        )
    patches = sum(math.prod(grid) for grid in listed)  # of any size, where int64 would begin anew
    if pixels.shape != (patches, marks.values) or pixels.dtype.kind not in "fiu":
        raise BatchError(
            f"{names[0]} of row {row} has shape {pixels.shape} of {pixels.dtype}; {names[1]} {listed} means "
            f"{patches} patches of {marks.values} numbers"
        )


def grids_of(row: int, name: str, given: np.ndarray) -> np.ndarray:
    """int64 [visuals, 3] of an array of grids.

    Raises:
        BatchError: it is none.
    """
    if given.size == 0 or given.size % 3 or given.dtype.kind not in "iu":
        raise BatchError(
            f"{name} of row {row} is {given.dtype} {given.tolist()}; expected whole numbers, (time, height, "
            "width) for each"
        )
    return given.astype(np.int64).reshape(-1, 3)


class Patches(Protocol):
    """What a model takes for a patch; see `Marks`."""

    @property
    def merge(self) -> int: ...
    @property
    def values(self) -> int: ...


def _placed(
    rows: Sequence[Tensor], media: Media, marks: Marks
) -> Iterator[tuple[int, Literal["image", "video"], np.ndarray, Grid, tuple[int, ...]]]:
    """Every visual: its row, kind, pixels and grid, and where its runs begin."""
    for row, items in enumerate(media):
        found = [visual for item in items for visual in _visuals(row, item, marks)]
        runs = _runs(row, rows[row], [(kind, grid) for kind, _, grid in found], marks)
        for visual, places in zip(found, runs, strict=True):
            yield row, *visual, places


def _visuals(
    row: int, item: Mapping[str, Any], marks: Marks
) -> Iterator[tuple[Literal["image", "video"], np.ndarray, Grid]]:
    """The visuals of one item, each (kind, pixels [patches, values], grid)."""
    arrays = {name: np.asarray(value) for name, value in item.items() if name != "kind"}
    kind = _FIELDS.get(frozenset(arrays))
    if kind is None:
        known = " or ".join(str(sorted(names)) for names in _FIELDS)
        raise BatchError(
            f"a media item of row {row} holds {sorted(arrays)}; this backend trains on images and videos, "
            f"{known}"
        )
    names = (
        ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
    )
    pixels = arrays[names[0]]
    grids = grids_of(row, names[1], arrays[names[1]])
    require_patches(row, names, pixels, grids, marks)
    for part, (time, height, width) in zip(
        np.split(pixels, grids.prod(1).cumsum()[:-1]), grids.tolist(), strict=True
    ):
        yield "image" if kind == "image" else "video", part, (time, height, width)


def _runs(
    row: int, tokens: Tensor, visuals: Sequence[tuple[str, Grid]], marks: Marks
) -> list[tuple[int, ...]]:
    """Where each visual's runs begin: each takes the next run of its tokens that is long enough for it."""
    found: list[tuple[int, ...]] = []
    candidates: dict[str, list[int]] = {}
    next_one = {"image": 0, "video": 0}
    sizes = [(kind, marks.tokens(grid)) for kind, grid in visuals]
    for index, (kind, (time, height, width)) in enumerate(visuals):
        token = marks.image if kind == "image" else marks.video
        if kind not in candidates:
            candidates[kind] = [] if token is None else (tokens == token).nonzero().flatten().tolist()
        frames = [(time, height, width)] if kind == "image" else [(1, height, width)] * time
        starts = []
        for frame in frames:
            size, own, start = marks.tokens(frame), candidates[kind], next_one[kind]
            while start + size <= len(own) and own[start + size - 1] - own[start] != size - 1:
                start += 1
            if start + size > len(own):
                raise BatchError(
                    f"{kind} {[k for k, _ in sizes[:index]].count(kind)} of row {row} needs a run of {size} "
                    f"{kind} tokens (id {token}), but the row has {len(own)} for {kind}s of "
                    f"{[tokens for k, tokens in sizes if k == kind]}; expand the prompt with its processor"
                )
            starts.append(own[start])
            next_one[kind] = start + size
        found.append(tuple(starts))
    return found
