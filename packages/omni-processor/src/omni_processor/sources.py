"""Sources: every way people hand over an image, resolved in one place to bytes or pixels.

Accepted: a path (`str` or `Path`), a ``file://`` URL (percent-encoded), a data URL, bytes, a PIL image, a
numpy array [height, width, channels], a torch tensor [channels, height, width], a Hugging Face datasets cell
``{"bytes": ..., "path": ...}``. Network addresses are refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image

from omni_processor.errors import Empty, SourceNotAllowed, TooLarge, Undecodable
from omni_processor.sample import Limits

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file's bytes."""

    data: bytes
    label: str


@dataclass(frozen=True, slots=True)
class PixelImage:
    """An image somebody decoded already."""

    image: Image.Image
    label: str


ResolvedImage = EncodedImage | PixelImage


def resolve(source: Any, limits: Limits, item: str = "image") -> ResolvedImage:
    """Bring any accepted source to bytes or pixels without decoding it.

    Raises:
        SourceNotAllowed: a network address, another host's file, or not a regular file.
        Undecodable: no such file, a malformed URL, or an array whose shape or range is not an image's.
        TooLarge: more bytes or pixels than `limits`.
        Empty: no bytes or no pixels.
    """
    match source:
        case bytes() | bytearray() | memoryview():
            return _encoded(bytes(source), f"{len(source)} bytes", limits, item)
        case os.PathLike():
            return _from_path(os.fspath(source), limits, item)
        case str():
            return _from_text(source, limits, item)
        case Image.Image():
            return _pixels(source, f"PIL image {source.mode} {source.width}x{source.height}", limits, item)
        case np.ndarray():
            return _from_array(source, f"numpy {source.dtype} {list(source.shape)}", limits, item)
        case Mapping():
            return _from_cell(source, limits, item)
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
    if isinstance(resolved, EncodedImage):
        hasher.update(resolved.data)
        return hasher.digest()
    image = resolved.image
    hasher.update(f"{image.mode} {image.size} {orientation} {image.info.get('transparency')}".encode())
    if image.mode in ("P", "PA") and image.palette is not None:
        hasher.update(image.palette.tobytes())
    hasher.update(image.tobytes())
    return hasher.digest()


def _encoded(data: bytes, label: str, limits: Limits, item: str) -> EncodedImage:
    if not data:
        raise Empty("the source holds zero bytes", item=item, source=label)
    _check_bytes(len(data), label, limits, item)
    return EncodedImage(data, label)


def _check_bytes(count: int, label: str, limits: Limits, item: str) -> None:
    if count > limits.max_bytes:
        raise TooLarge(
            f"{count} bytes, the limit is {limits.max_bytes}: shrink the file or raise Limits(max_bytes=...)",
            item=item,
            source=label,
        )


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


def _from_text(text: str, limits: Limits, item: str) -> ResolvedImage:
    label = shorten(text)
    scheme = text[: text.index(":")].lower() if _SCHEME.match(text) else ""
    if scheme == "data":
        return _from_data_url(text, label, limits, item)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise SourceNotAllowed(
                f"the file is on another host ({parts.netloc}): copy it here and pass its path, or write "
                "file:///path for a local one",
                item=item,
                source=label,
            )
        return _from_path(os.fsdecode(unquote_to_bytes(parts.path)), limits, item)
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf") or "://" in text[:32]:
        raise SourceNotAllowed(
            f"{scheme}:// is not fetched here: download it yourself and pass the path, the bytes or a data "
            "URL",
            item=item,
            source=label,
        )
    if not text:
        raise Empty("the path is an empty string", item=item)
    return _from_path(text, limits, item)


def _from_data_url(text: str, label: str, limits: Limits, item: str) -> EncodedImage:
    header, comma, payload = text.partition(",")
    if not comma:
        raise Undecodable(
            "a data URL needs a comma before its payload: data:image/png;base64,...", item=item, source=label
        )
    _check_bytes(
        len(payload) * 3 // 4 if header.endswith(";base64") else len(payload) // 3, label, limits, item
    )
    raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("utf-8", "surrogateescape")
    if header.endswith(";base64"):
        # Line breaks are common in pasted base64 and padding is often lost; anything else wrong is an error.
        compact = b"".join(raw.split()).rstrip(b"=")
        try:
            raw = base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
        except binascii.Error as error:
            raise Undecodable(
                f"the data URL's base64 is malformed ({error})", item=item, source=label
            ) from error
    return _encoded(raw, label, limits, item)


def _from_path(path: str | bytes, limits: Limits, item: str) -> EncodedImage:
    label = shorten(os.fsdecode(path))
    try:
        # Non-blocking, so that a FIFO or a device is recognised instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Undecodable(f"the file cannot be opened: {reason}", item=item, source=label) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
            raise SourceNotAllowed(f"this is {kind}, not an image file", item=item, source=label)
        _check_bytes(status.st_size, label, limits, item)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(limits.max_bytes + 1)
    finally:
        os.close(descriptor)
    return _encoded(data, label, limits, item)


def _from_cell(cell: Mapping[str, Any], limits: Limits, item: str) -> ResolvedImage:
    data, path = cell.get("bytes"), cell.get("path")
    if data is not None:
        return _encoded(bytes(data), shorten(str(path)) if path else f"{len(data)} bytes", limits, item)
    if path is not None:
        return _from_text(path, limits, item) if isinstance(path, str) else resolve(path, limits, item)
    raise Empty(
        f'a mapping needs "bytes" or "path" (a Hugging Face datasets cell); this one has {sorted(cell)}',
        item=item,
    )


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


def shorten(text: str, width: int = 80) -> str:
    """At most `width` characters that still name the source, never a whole payload."""
    return text if len(text) <= width else f"{text[: width - 20]}...{text[-12:]}"
