"""What requests are shown, read without a model: whether items fit their placeholders, and where they stand.

Items hold what transformers' processor made, under its names. They are read with the trainer's own code
(`relax.backends.train.visuals`, `relax.backends.train.omni`), so that engines and trainers agree.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from agentic import GenerationRequest
from numpy.typing import NDArray

from relax.backends.inference.contexts import FILE
from relax.backends.inference.errors import InvalidRequest
from relax.backends.train import omni, visuals
from relax.backends.train.errors import BatchError
from relax.backends.train.omni.items import shown_in
from relax.backends.train.omni.placing import Reading, place
from relax.backends.train.omni.towers import longest_chunk
from relax.backends.train.visuals import Marks

Arrays = dict[str, np.ndarray]
Spans = tuple[tuple[int, int], ...]

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
_IMAGE = frozenset({"pixel_values", "image_grid_thw"})
_VIDEO = frozenset({"pixel_values_videos", "video_grid_thw"})
_TIMED = _VIDEO | {"video_second_per_grid"}
_SOUNDS = tuple(
    frozenset({"input_features", length}) for length in ("feature_attention_mask", "audio_feature_lengths")
)


@dataclass(frozen=True)
class Part:
    """What a tower looks at or hears alone: an image, one step in time of a video, or a sound.

    Attributes:
        item: which of the request's items it belongs to.
        start, end: of an image or a step the patches among its item's; of a sound which of its item's it is,
            and its mel frames.
        grid: (1, height, width) of an image or a step, in patches.
        longest: mel frames that the chunks of a sound are padded to.
        spans: [first, behind the last) of its placeholders, ascending.
    """

    item: int
    kind: Literal["image", "video", "audio"]
    start: int
    end: int
    spans: Spans
    grid: tuple[int, int, int] = (0, 0, 0)
    longest: int = 0


@dataclass(frozen=True, eq=False)
class Placed:
    """Where everything of a request stands.

    Attributes:
        positions: [3, tokens]: time, height and width, whole numbers but for video of a Qwen3-Omni.
        following: the position of the token that comes next.
    """

    parts: Sequence[Part]
    positions: NDArray[Any]
    following: float


class Reader(Protocol):
    """How a family's requests are read."""

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request whose placeholders are not those of its items.

        Raises:
            InvalidRequest: naming the request, and the item.
        """
        ...

    def place(self, request: GenerationRequest) -> Placed:
        """Of a request that `check` let pass."""
        ...


def reader_of(config: Any) -> Reader | None:
    """How requests are read of a model with this configuration, as `load_config` gives it; None for a family
    that is not known here, or that is shown nothing.
    """
    if config.model_type == omni.MODEL_TYPE:
        return OmniReader(config)
    return VisionReader(config) if config.model_type in ("qwen3_vl", "qwen3_vl_moe") else None


class VisionReader:
    """Images and video of Qwen3-VL, where a video takes a run of placeholders for each of its frames."""

    def __init__(self, config: Any) -> None:
        self._marks = Marks.of(config)
        self._items = _Items(config, (_IMAGE, _VIDEO), "an image or a video with its grid")

    def check(self, request: GenerationRequest) -> None:
        marks, items = self._marks, self._items.checked(request)
        for kind, token, grid in (
            ("image", marks.image, "image_grid_thw"),
            ("video", marks.video, "video_grid_thw"),
        ):
            grids = [item[grid].reshape(-1, 3) for item in items if grid in item]
            patches = sum(int(each.prod(1).sum()) for each in grids)  # as many as there are rows of pixels
            _count(request, kind, token, patches // marks.merge**2)
        try:
            visuals.require([torch.from_numpy(request.tokens)], [items], marks)
        except BatchError as error:
            raise _refused(request, error) from error

    def place(self, request: GenerationRequest) -> Placed:
        marks, items = self._marks, self._items.hollow(request)
        found, shown = visuals.read([torch.from_numpy(request.tokens)], [items], marks)
        parts: list[Part] = []
        runs: list[tuple[int, visuals.Grid]] = []
        for one, (item, start) in zip(shown, _starts(items), strict=True):
            visual = found[one.visual]
            for first, grid in zip(one.runs, visual.frames, strict=True):
                end = start + grid[0] * grid[1] * grid[2]
                spans = ((first, first + marks.tokens(grid)),)
                parts.append(Part(item, visual.kind, start, end, spans, grid))
                runs.append((first, grid))
                start = end
        positions = visuals.rope_positions(len(request.tokens) + 1, sorted(runs), marks.merge).numpy()
        return Placed(parts, positions[:, :-1], float(positions[0, -1]))


class OmniReader:
    """Images, video and sound of a Qwen3-Omni thinker."""

    def __init__(self, config: Any) -> None:
        self._reading = Reading.of(config)
        self._items = _Items(
            config,
            (_IMAGE, _TIMED, *_SOUNDS, *(_TIMED | sound for sound in _SOUNDS)),
            "an image, a video with its seconds per grid, a sound with its mask, or a video and its sound",
        )

    def check(self, request: GenerationRequest) -> None:
        reading, items = self._reading, self._items.checked(request)
        try:
            shown = shown_in(0, items)
            sizes = {"image": 0, "video": 0, "audio": 0}
            for one in shown:
                if one.picture is not None:
                    kind = "image" if one.kind == "image" else "video"
                    sizes[kind] += reading.picture_tokens(one.picture)
                if one.sound is not None:
                    sizes["audio"] += reading.sound_tokens(one.sound)
            for kind, token in (("image", reading.image), ("video", reading.video), ("audio", reading.audio)):
                _count(request, kind, token, sizes[kind])
            place(0, request.tokens.astype(np.int64), shown, reading)
        except BatchError as error:
            raise _refused(request, error) from error

    def place(self, request: GenerationRequest) -> Placed:
        reading, items = self._reading, self._items.hollow(request)
        shown = [(index, one) for index, item in enumerate(items) for one in shown_in(0, [item])]
        row = [one for _, one in shown]
        # One token more than there are, which is no placeholder: it tells what comes next.
        found = place(0, np.append(request.tokens.astype(np.int64), -1), row, reading)
        longest = longest_chunk(row, reading)
        parts: list[Part] = []
        patches, sounds = [0] * len(items), [0] * len(items)
        for (item, one), at in zip(shown, found.placed, strict=True):
            if one.picture is not None:
                time, height, width = one.picture.grid
                kind = "image" if one.kind == "image" else "video"
                for step in np.split(at.picture, time):
                    start, patches[item] = patches[item], patches[item] + height * width
                    grid = (1, height, width)
                    parts.append(Part(item, kind, start, patches[item], _spans(step), grid))
            if one.sound is not None:
                frames = one.sound.frames
                spans = _spans(at.sound)
                parts.append(Part(item, "audio", sounds[item], frames, spans, longest=longest))
                sounds[item] += 1
        return Placed(parts, found.positions[:, :-1], float(found.positions[0, -1]))


def _starts(items: Sequence[Arrays]) -> Iterator[tuple[int, int]]:
    """Of every image and video the item, and where its patches begin there."""
    for index, item in enumerate(items):
        (grids,) = (item[grid] for grid in _GRIDS.values() if grid in item)
        start = 0
        for size in grids.reshape(-1, 3).prod(1).tolist():
            yield index, start
            start += size


def _spans(places: NDArray[np.int64]) -> Spans:
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks))


class _Items:
    """Looks at the items of requests before anything is computed.

    Args:
        config: of the model.
        known: what an item may hold.
        wording: the same in words.
    """

    def __init__(self, config: Any, known: Sequence[frozenset[str]], wording: str) -> None:
        vision = config.vision_config
        self._known, self._wording = known, wording
        self._merge = int(vision.spatial_merge_size)
        self._values = int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
        audio = getattr(config, "audio_config", None)
        self._mels = None if audio is None else int(audio.num_mel_bins)

    def checked(self, request: GenerationRequest) -> list[Arrays]:
        """The arrays of every item, pixels without their values, as where they stand follows from the grid.

        Raises:
            InvalidRequest: an item holds other arrays, or ones that do not fit the model or each other.
        """
        return [self._checked(request, index, item) for index, item in enumerate(request.media)]

    def hollow(self, request: GenerationRequest) -> list[Arrays]:
        """The same of a request that has been checked."""
        found: list[Arrays] = []
        for item in request.media:
            arrays = _arrays(item)
            for pixels in _GRIDS:
                if pixels in arrays:
                    arrays[pixels] = np.broadcast_to(np.float32(0), arrays[pixels].shape)
            found.append(arrays)
        return found

    def _checked(self, request: GenerationRequest, index: int, item: Mapping[str, Any]) -> Arrays:
        whose = f"media item {index} of request {request.id!r}"
        arrays = _arrays(item)
        kind = "image" if "pixel_values" in arrays else "video" if arrays.keys() >= _VIDEO else "audio"
        if arrays.keys() not in self._known or item.get("kind", kind) != kind:
            raise InvalidRequest(
                f"{whose} has kind {item.get('kind')!r} and {sorted(arrays)}; the model takes {self._wording}"
            )
        for pixels, grid in _GRIDS.items():
            if pixels in arrays:
                arrays[pixels] = self._visual(whose, pixels, arrays[pixels], grid, arrays[grid])
        if "input_features" in arrays:
            self._sound(whose, arrays["input_features"])
        return arrays

    def _visual(
        self, whose: str, name: str, pixels: np.ndarray, grid_name: str, grids: np.ndarray
    ) -> np.ndarray:
        fits = grids.size and not grids.size % 3 and np.issubdtype(grids.dtype, np.integer)
        sides = grids.reshape(-1, 3) if fits else grids
        if not fits or (sides < 1).any() or (sides[:, 1:] % self._merge).any():
            raise InvalidRequest(
                f"{whose}: {grid_name} is {grids.dtype} {grids.tolist()}; expected integers (time, height, "
                f"width) above 0 in patches, height and width multiples of {self._merge}"
            )
        # With Python's numbers: the product of a grid that lies may be more than int64 holds.
        wanted = (sum(math.prod(grid) for grid in sides.tolist()), self._values)
        if pixels.shape != wanted or not np.issubdtype(pixels.dtype, np.floating):
            raise InvalidRequest(
                f"{whose}: {name} is {pixels.dtype} {list(pixels.shape)}; {grid_name} {sides.tolist()} means "
                f"floats {list(wanted)}"
            )
        _finite(whose, name, pixels)
        return np.broadcast_to(np.float32(0), wanted)

    def _sound(self, whose: str, mel: np.ndarray) -> None:
        if mel.ndim not in (2, 3) or mel.shape[-2] != self._mels or not np.issubdtype(mel.dtype, np.floating):
            raise InvalidRequest(
                f"{whose}: input_features is {mel.dtype} {list(mel.shape)}; expected floats [{self._mels}, "
                f"frames] or [sounds, {self._mels}, frames]"
            )
        _finite(whose, "input_features", mel)


def _arrays(item: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(value) for name, value in item.items() if name not in ("kind", FILE)}


def _finite(whose: str, name: str, values: np.ndarray) -> None:
    if not np.isfinite(values.sum(dtype=np.float64)):
        raise InvalidRequest(f"{whose}: {name} holds values that are no finite numbers")


def _count(request: GenerationRequest, kind: str, token: int | None, need: int) -> None:
    have = 0 if token is None else int((request.tokens == token).sum())
    if have != need:
        raise InvalidRequest(
            f"request {request.id!r} has {have} {kind} placeholder tokens, its {len(request.media)} media "
            f"items stand for {need}; tokens and media must come from one processor call"
        )


def _refused(request: GenerationRequest, error: BatchError) -> InvalidRequest:
    return InvalidRequest(f"request {request.id!r}: {str(error).replace(' of row 0', '')}")
