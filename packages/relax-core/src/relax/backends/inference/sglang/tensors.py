"""Media of requests as tensors, for a server that runs our processor (`in_server/relax_media`).

SGLang takes files, and makes tensors and tokens of them by its own rules: it picks other frames of a video
than the run's processor did, resizes them to multiples of 28 pixels first, and tokenizes anew. So a request
brings what the run's processor made, where it stands and its rotary positions, and the server looks at just
that. The way in is SGLang's own for processors of others; over HTTP a piece is a string, as a file would be:

    "data:application/x-relax-tensors;base64," + base64(uint32 length of head, head, arrays)

The head is JSON and lists the arrays as (name, dtype, shape). The first piece of a request holds `positions`
(int32 [3, tokens]) and says which `parts` there are; one more follows for each item, with `pixels` (or
`levels` and `values`, where those are of 8 bits: a quarter of the size, and the same bits) and
`input_features`.
"""

import base64
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from agentic import GenerationRequest

from relax.backends.inference.errors import InvalidRequest
from relax.backends.inference.reading import Placed, Reader
from relax.backends.inference.sglang.sharing import Shared

PREFIX = "data:application/x-relax-tensors;base64,"
IN_SERVER = Path(__file__).parent / "in_server"
"""What a server imports from, and nothing else of this environment."""

ENVIRONMENT = {
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "relax_media",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "relax_models",
}
"""Of a server: that it takes tensors, and hears sounds of any lengths beside each other."""

_LENGTHS = ("feature_attention_mask", "audio_feature_lengths")
_CHANNELS = 3
_BLOCK = 64
"""Patches that are looked at together: what is made of them stays in a core's cache."""


@dataclass(frozen=True, eq=False)
class Shown:
    """What a request shows.

    Attributes:
        placed: where it stands.
        items: packed, in order.
    """

    placed: Placed
    items: Sequence[str]

    def pieces(self, length: int, version: int) -> list[str]:
        """All pieces, for a prompt of `length` tokens: the request's, and text behind them.

        Args:
            length: tokens that the server is given.
            version: of the weights. A server keeps what its towers made of a part, and an update of the
                weights does not end that, so a part has another name for each.
        """
        positions, following = self.placed.positions, self.placed.following
        more = following + np.arange(length - positions.shape[1])
        whole = np.concatenate([positions, np.broadcast_to(more, (3, len(more)))], axis=1)
        head = {
            "version": version,
            "following": int(following) + len(more),
            "parts": [asdict(part) for part in self.placed.parts],
        }
        return [_packed(head, {"positions": whole.astype("<i4")}), *self.items]


class Tensors:
    """Packs items; one that several requests share is packed once.

    Args:
        reader: of the model's family.
        mean, std: that pixels were normalised by, for each channel on the scale of 8 bits.
    """

    def __init__(self, reader: Reader, mean: Sequence[float], std: Sequence[float]) -> None:
        self._reader = reader
        self._mean = np.asarray(mean, np.float32)[:, None]
        self._std = np.asarray(std, np.float32)[:, None]
        self._packed: Shared[str] = Shared()

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that cannot be shown to a server.

        Raises:
            InvalidRequest: its placeholders are not those of its items, or a video lies between positions.
        """
        self._reader.check(request)
        placed = self._reader.place(request)
        if (placed.positions != np.rint(placed.positions)).any() or placed.following % 1:
            raise InvalidRequest(
                f"request {request.id!r} shows a video whose steps do not begin at whole positions "
                f"(video_second_per_grid times the model's position_id_per_seconds), and SGLang's rotary "
                f"positions are whole numbers: sample videos at a rate that divides, such as 1, 2 or 13 "
                f"frames a second, or use rollout.engine=transformers"
            )

    def of(self, request: GenerationRequest) -> Shown:
        """Of a request that `check` let pass."""
        return Shown(self._reader.place(request), [self._item(item) for item in request.media])

    def _item(self, item: Mapping[str, Any]) -> str:
        names = ("pixel_values", "pixel_values_videos", "input_features")
        arrays = {name: np.asarray(item[name]) for name in names if name in item}
        # All that is packed depends on: arrays may be shared one by one, such as the frames of a video that
        # is shown with its sound and without.
        told = [*arrays.values(), *(np.asarray(item[name]) for name in _LENGTHS if name in item)]
        return self._packed.of(told, lambda: self._pack(arrays, item))

    def _pack(self, arrays: Mapping[str, np.ndarray], item: Mapping[str, Any]) -> str:
        packed: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            whole = np.ascontiguousarray(array, np.float32)
            if name == "input_features":
                whole = whole if whole.ndim == 3 else whole[None]
                packed[name] = _unmasked(whole, item)
            else:
                packed |= self._levels(whole) or {"pixels": whole}
        digest = hashlib.blake2b(digest_size=16)
        for name, array in packed.items():
            digest.update(f"{name}{array.shape}".encode())
            digest.update(array.data)
        return _packed({"digest": digest.hexdigest()}, packed)

    def _levels(self, pixels: np.ndarray) -> dict[str, np.ndarray] | None:
        """uint8 levels of pixels [patches, values], and the value of each level in each channel; None for
        pixels that are not of 8 bits. Looked up, they are the very bits again.
        """
        parts = pixels.reshape(len(pixels), _CHANNELS, -1)
        levels = np.empty(parts.shape, np.uint8)
        values = np.zeros((_CHANNELS, 256), np.float32)
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(parts), _BLOCK)]
        for block in blocks:
            found = parts[block] * self._std
            found += self._mean
            np.rint(found, out=found)
            if not (found.min() >= 0 and found.max() <= 255):
                return None
            levels[block] = found
            for channel in range(_CHANNELS):
                values[channel, levels[block, channel]] = parts[block, channel]
        for block in blocks:
            for channel in range(_CHANNELS):
                if (values[channel].take(levels[block, channel]) != parts[block, channel]).any():
                    return None
        return {"levels": levels.reshape(pixels.shape), "values": values}


def _unmasked(features: np.ndarray, item: Mapping[str, Any]) -> np.ndarray:
    """float32 [sounds, mel bins, frames] with the frames of every sound at its beginning."""
    if "feature_attention_mask" not in item:
        return features
    mask = np.asarray(item["feature_attention_mask"]).reshape(len(features), -1) != 0
    if (mask[:, 1:] <= mask[:, :-1]).all():  # nothing follows what is masked
        return features
    found = np.zeros_like(features)
    for target, source, kept in zip(found, features, mask, strict=True):
        target[:, : kept.sum()] = source[:, kept]
    return found


def _packed(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    listed = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    text = json.dumps({**head, "arrays": listed}).encode()
    content = b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays.values())])
    return PREFIX + base64.b64encode(content).decode()
