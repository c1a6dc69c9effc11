"""Sources of images: every way people hand one over, resolved in one place to bytes or pixels.

Accepted: what `omni_processor.encoded` reads, a PIL image, a numpy array [height, width, channels], a torch
tensor [channels, height, width].
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from omni_processor.encoded import Encoded, Reading
from omni_processor.errors import Empty, SourceNotAllowed, TooLarge, Undecodable
from omni_processor.sample import Limits


@dataclass(frozen=True, slots=True)
class PixelImage:
    """An image somebody decoded already."""

    image: Image.Image
    label: str


ResolvedImage = Encoded | PixelImage


def resolve(source: Any, limits: Limits, item: str = "image") -> ResolvedImage:
    """Bring any accepted source to bytes or pixels without decoding it.

    Raises:
        SourceNotAllowed: a network address, another host's file, or not a regular file.
        Undecodable: no such file, a malformed URL, or an array whose shape or range is not an image's.
        TooLarge: more bytes or pixels than `limits`.
        Empty: no bytes or no pixels.
    """
    reading = Reading(item, "an image", limits.max_bytes, "max_bytes")
    encoded = reading.read(source)
    if encoded is not None:
        return encoded
    match source:
        case Image.Image():
            return _pixels(source, f"PIL image {source.mode} {source.width}x{source.height}", limits, item)
        case np.ndarray():
            return _from_array(source, f"numpy {source.dtype} {list(source.shape)}", limits, item)
        case Mapping():
            return reading.cell(source)
    if type(source).__module__.partition(".")[0] == "torch":
        return _from_tensor(source, limits, item)
    raise SourceNotAllowed(
        f"cannot read an image from {type(source).__name__}: pass a path, file:// or data URL, bytes, "
        'PIL image, numpy HWC, torch CHW or {"bytes": ..., "path": ...}',
        item=item,
    )


def content_digest(resolved: ResolvedImage, orientation: int) -> bytes:
    """A 16-byte hash of what the source holds, equal for equal content turned alike."""
    hasher = hashlib.blake2b(digest_size=16)
    if isinstance(resolved, Encoded):
        hasher.update(resolved.data)
        return hasher.digest()
    image = resolved.image
    hasher.update(f"{image.mode} {image.size} {orientation} {image.info.get('transparency')}".encode())
    if image.mode in ("P", "PA") and image.palette is not None:
        hasher.update(image.palette.tobytes())
    hasher.update(image.tobytes())
    return hasher.digest()


def _pixels(image: Image.Image, label: str, limits: Limits, item: str) -> PixelImage:
    if image.width * image.height == 0:
        raise Empty("the image has no pixels", item=item, source=label)
    if image.width * image.height > limits.max_pixels:
        raise TooLarge(
            f"{image.width} x {image.height} pixels, the limit is {limits.max_pixels}: shrink it or raise "
            "Limits(max_pixels=...)",
            item=item,
            source=label,
        )
    return PixelImage(image, label)


def _from_tensor(tensor: Any, limits: Limits, item: str) -> PixelImage:
    label = f"torch {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.ndim not in (2, 3) or (tensor.ndim == 3 and tensor.shape[0] > 4):
        raise Undecodable(
            "a torch image is [channels, height, width] with 1 to 4 channels (or [height, width]): "
            "permute(2, 0, 1) turns height, width, channels into it",
            item=item,
            source=label,
        )
    if tensor.is_floating_point():
        tensor = tensor.float()  # numpy has no bfloat16
    array = tensor.detach().cpu().numpy()
    return _from_array(array.transpose(1, 2, 0) if array.ndim == 3 else array, label, limits, item)


def _from_array(array: np.ndarray, label: str, limits: Limits, item: str) -> PixelImage:
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] > 4 and array.size):
        raise Undecodable(
            "a numpy image is [height, width, channels] with 1 to 4 channels (or [height, width]); "
            "transpose(1, 2, 0) turns channels, height, width into it",
            item=item,
            source=label,
        )
    if array.size == 0:
        raise Empty("the array has no pixels", item=item, source=label)
    if array.shape[0] * array.shape[1] > limits.max_pixels:
        raise TooLarge(
            f"{array.shape[1]} x {array.shape[0]} pixels, the limit is {limits.max_pixels}: "
            "shrink it or raise Limits(max_pixels=...)",
            item=item,
            source=label,
        )
    pixels = to_eight_bit(array, item, label)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return _pixels(Image.fromarray(np.ascontiguousarray(pixels)), label, limits, item)


def to_eight_bit(array: np.ndarray, item: str, label: str) -> np.ndarray:
    """uint8 from any pixel type of known range: bool, 8 and 16 bit, floats in 0..1, integers in 0..255.

    Raises:
        Undecodable: floats or wide integers whose values show another range.
    """
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    kind = array.dtype
    if kind == np.uint8:
        return array
    if kind == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if kind == np.uint16:
        return _from_sixteen_bit(array)
    if np.issubdtype(kind, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0.0 and high <= 1.0):  # written so that NaN fails too
            raise Undecodable(
                f"float pixels must lie in 0..1 (the values here span {low:g}..{high:g}): divide by their "
                "maximum, or cast to uint8 if they are 0..255",
                item=item,
                source=label,
            )
        return np.rint(array.astype(np.float32) * 255.0).astype(np.uint8)
    if np.issubdtype(kind, np.integer):
        low, high = int(array.min()), int(array.max())
        if low >= 0 and high <= 255:
            return array.astype(np.uint8)
        raise Undecodable(
            f"{kind} pixels span {low}..{high}, whose full range is unknown: cast to uint8 (0..255) or "
            "uint16 (0..65535)",
            item=item,
            source=label,
        )
    raise Undecodable(
        f"{kind} is no pixel type: use uint8, uint16, bool or floats in 0..1", item=item, source=label
    )


def _from_sixteen_bit(array: np.ndarray) -> np.ndarray:
    return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)  # nearest level: 65535 -> 255
