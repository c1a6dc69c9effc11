"""What requests are shown: images, video and sound; checked, through the towers, and where they stand.

Items hold what transformers' processor made, under its names. Engine and trainer read them with the same code
(`relax.backends.train.visuals`, `relax.backends.train.omni`), so that both speak of the same features at the
same positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from agentic import GenerationRequest
from torch import Tensor
from transformers import PreTrainedModel

from relax.backends.inference.contexts import FILE, Context
from relax.backends.inference.errors import InvalidRequest
from relax.backends.train import omni, visuals
from relax.backends.train.errors import BatchError
from relax.backends.train.omni.items import shown_in
from relax.backends.train.omni.placing import Reading, place
from relax.backends.train.omni.towers import SoundKey, different, features_of, longest_chunk
from relax.backends.train.visuals import Marks

Arrays = dict[str, np.ndarray]

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
_IMAGE = frozenset({"pixel_values", "image_grid_thw"})
_VIDEO = frozenset({"pixel_values_videos", "video_grid_thw"})
_TIMED = _VIDEO | {"video_second_per_grid"}
_SOUNDS = tuple(
    frozenset({"input_features", length}) for length in ("feature_attention_mask", "audio_feature_lengths")
)


@dataclass(frozen=True, eq=False)
class Shown:
    """What a prefill of [rows, width] tokens is given beside them.

    Attributes:
        at: int64 [shown tokens], their places among all rows * width.
        features: [shown tokens, hidden], what is there instead of the tokens' embeddings.
        seen: int64 [seen tokens], the places of images and video.
        deep: for each of the first layers, [seen tokens, hidden], added to what it gives.
        positions: [3, rows, width]: time, height and width of every token.
        offsets: of each row, what to add to a later token's index to get its position.
    """

    at: Tensor
    features: Tensor
    seen: Tensor
    deep: Sequence[Tensor]
    positions: Tensor
    offsets: Sequence[float]


class Senses(Protocol):
    """How a model sees and hears."""

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request whose placeholders are not those of its items.

        Raises:
            InvalidRequest: naming the request, and the item.
        """
        ...

    def show(self, contexts: Sequence[Context], pads: Sequence[int], width: int) -> Shown:
        """What contexts are shown that lie behind `pads` tokens of padding each, in rows of `width`."""
        ...


def senses_of(model: PreTrainedModel) -> Senses | None:
    """How the model sees and hears; None for one of another family, or one that does neither."""
    kind = model.config.model_type
    if kind == omni.MODEL_TYPE:
        return OmniSenses(model)
    return VisionSenses(model) if kind in ("qwen3_vl", "qwen3_vl_moe") else None


class VisionSenses:
    """Images and video of Qwen3-VL, where a video takes a run of placeholders for each of its frames."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._marks = Marks.of(model.config)
        self._items = _Items(model.config, (_IMAGE, _VIDEO), "an image or a video with its grid")

    def check(self, request: GenerationRequest) -> None:
        marks, items = self._marks, self._items.checked(request)
        for kind, token, grid in (
            ("image", marks.image, "image_grid_thw"),
            ("video", marks.video, "video_grid_thw"),
        ):
            grids = [item[grid].reshape(-1, 3) for item in items if grid in item]
            _count(request, kind, token, sum(int(each.prod(1).sum()) for each in grids) // marks.merge**2)
        try:
            visuals.require([torch.from_numpy(request.tokens)], [items], marks)
        except BatchError as error:
            raise _refused(request, error) from error

    def show(self, contexts: Sequence[Context], pads: Sequence[int], width: int) -> Shown:
        marks, tower = self._marks, self._model.model
        device = next(self._model.parameters()).device
        rows = [torch.from_numpy(context.tokens) for context in contexts]
        found, shown = visuals.read(rows, [context.media for context in contexts], marks)
        starts = np.cumsum([0, *(marks.tokens(visual.grid) for visual in found)])
        at: list[Tensor] = []
        sources: list[Tensor] = []
        runs: list[list[tuple[int, visuals.Grid]]] = [[] for _ in rows]
        for one in shown:
            visual = found[one.visual]
            at.append(visuals.places(one, visual, marks) + one.row * width + pads[one.row])
            sources.append(torch.arange(int(starts[one.visual]), int(starts[one.visual + 1])))
            runs[one.row] += zip(one.runs, visual.frames, strict=True)
        positions = torch.zeros(3, len(rows), width, dtype=torch.int64)
        offsets: list[float] = []
        for row, tokens in enumerate(rows):
            # One more than there are: the position of the token that comes next.
            places = visuals.rope_positions(len(tokens) + 1, sorted(runs[row]), marks.merge)
            positions[:, row, pads[row] :] = places[:, :-1]
            offsets.append(float(places[0, -1]) - len(tokens))
        features = tower.get_image_features(
            torch.cat([visual.pixels for visual in found]).to(device),
            torch.tensor([visual.grid for visual in found], device=device),
            return_dict=True,
        )
        seen, taken = torch.cat(at).to(device), torch.cat(sources).to(device)
        return Shown(
            at=seen,
            features=torch.cat(features.pooler_output).index_select(0, taken),
            seen=seen,
            deep=[torch.cat(layer).index_select(0, taken) for layer in features.deepstack_features],
            positions=positions.to(device),
            offsets=offsets,
        )


class OmniSenses:
    """Images, video and sound of a Qwen3-Omni thinker."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._reading = Reading.of(model.config)
        self._items = _Items(
            model.config,
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

    def show(self, contexts: Sequence[Context], pads: Sequence[int], width: int) -> Shown:
        reading, device = self._reading, next(self._model.parameters()).device
        rows = [shown_in(number, context.media) for number, context in enumerate(contexts)]
        features = features_of(self._model, different(rows, reading), reading, device)
        positions = torch.zeros(3, len(rows), width)
        offsets: list[float] = []
        seen: list[bytes] = []
        heard: list[SoundKey] = []
        seen_at: list[Tensor] = []
        heard_at: list[Tensor] = []
        for number, (context, row) in enumerate(zip(contexts, rows, strict=True)):
            # One more than there are: the position of the token that comes next. It is no placeholder.
            found = place(number, np.append(context.tokens, -1), row, reading)
            positions[:, number, pads[number] :] = torch.from_numpy(found.positions[:, :-1])
            offsets.append(float(found.positions[0, -1]) - len(context.tokens))
            longest, start = longest_chunk(row, reading), number * width + pads[number]
            for one, placed in zip(row, found.placed, strict=True):
                if one.picture is not None:
                    seen.append(one.picture.key)
                    seen_at.append(torch.from_numpy(placed.picture) + start)
                if one.sound is not None:
                    heard.append((one.sound.key, longest))
                    heard_at.append(torch.from_numpy(placed.sound) + start)
        return Shown(
            at=torch.cat(seen_at + heard_at).to(device),
            features=torch.cat(
                [features.pictures[key] for key in seen] + [features.sounds[key] for key in heard]
            ),
            seen=torch.cat(seen_at).to(device) if seen else torch.empty(0, dtype=torch.int64, device=device),
            deep=[torch.cat([layer[key] for key in seen]) for layer in features.deep],
            positions=positions.to(device),
            offsets=offsets,
        )


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

    def _checked(self, request: GenerationRequest, index: int, item: Mapping[str, Any]) -> Arrays:
        whose = f"media item {index} of request {request.id!r}"
        arrays = {name: np.asarray(value) for name, value in item.items() if name not in ("kind", FILE)}
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
        wanted = (int(sides.prod(1).sum()), self._values)
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
