"""From an image's bytes to upright 8-bit RGB, with everything that can be refused refused from the header.

Pictures come out as a person sees them: EXIF orientation applied, palettes and CMYK converted, 16 bits
brought to 8 by range, transparency over white, the first frame of an animation.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from omni_processor.encoded import Encoded
from omni_processor.errors import ConfigError, TooLarge, Undecodable
from omni_processor.sample import Limits
from omni_processor.sources import PixelImage, ResolvedImage, to_eight_bit

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
"""Formats that are opened. Of the others some run programs (EPS) and some accept any bytes (TGA)."""

# What Pillow's decoders are known to raise on damaged input; hostile files reach all of them.
_DECODER_ERRORS = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
)

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUARTER_TURNS = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What is known before decoding: height and width in pixels, upright, and how to get there."""

    height: int
    width: int
    orientation: int
    mode: str
    format: str


@contextmanager
def decoder_errors(item: str, label: str) -> Iterator[None]:
    """Turn whatever a decoder raises on bad input into `Undecodable` or `TooLarge`."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(
            f"Pillow refuses it as a decompression bomb: {error}", item=item, source=label
        ) from error
    except UnidentifiedImageError:
        raise
    except _DECODER_ERRORS as error:
        raise Undecodable(
            f"the image is damaged or cut off: {error or type(error).__name__}", item=item, source=label
        ) from error


def read_header(resolved: ResolvedImage, limits: Limits, item: str = "image") -> ImageHeader:
    """Size and orientation without decoding any pixels.

    Raises:
        Undecodable: not an accepted image format, or a damaged header.
        TooLarge: more pixels than `limits.max_pixels`.
    """
    label = resolved.label
    with decoder_errors(item, label):
        if isinstance(resolved, PixelImage):
            image = resolved.image
            orientation = _orientation(image)
        else:
            image = _open(resolved, item)
            _check_pixels(image, limits, item, label)
            orientation = _encoded_orientation(image, resolved.data)
        _check_pixels(image, limits, item, label)
        if image.width * image.height == 0:
            raise Undecodable(
                f"the header says {image.width} x {image.height} pixels", item=item, source=label
            )
        turned = orientation in _QUARTER_TURNS
        return ImageHeader(
            height=image.width if turned else image.height,
            width=image.height if turned else image.width,
            orientation=orientation,
            mode=image.mode,
            format=image.format or "",
        )


def decode(resolved: ResolvedImage, header: ImageHeader, item: str = "image") -> Image.Image:
    """The upright 8-bit RGB picture.

    Raises:
        Undecodable: damaged or truncated data, or pixels that cannot be brought to RGB.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ConfigError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True, so cut-off images would pass as partly grey ones: "
            "set it back to False in this process"
        )
    label = resolved.label
    with decoder_errors(item, label):
        image = resolved.image if isinstance(resolved, PixelImage) else _open(resolved, item)
        image.load()
        picture = _to_rgb(image, item, label)
        if header.orientation in _UPRIGHT:
            picture = picture.transpose(_UPRIGHT[header.orientation])
    if picture.size != (header.width, header.height):
        raise Undecodable(
            f"the header promises {header.width} x {header.height} pixels, the data holds {picture.width} "
            f"x {picture.height}",
            item=item,
            source=label,
        )
    return picture


def _open(resolved: Encoded, item: str) -> Image.Image:
    data = resolved.data
    opening = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if opening.startswith(b"<svg") or (
        opening.startswith((b"<?xml", b"<!doctype", b"<!--")) and b"<svg" in opening
    ):
        raise Undecodable(
            "SVG is a drawing without pixels: rasterise it at the size you want and pass the PNG",
            item=item,
            source=resolved.label,
        )
    if opening.startswith((b"<!doctype html", b"<html")):
        raise Undecodable(
            "this is an HTML page, not an image (a failed download?)", item=item, source=resolved.label
        )
    try:
        return Image.open(io.BytesIO(data), formats=_available_formats())
    except UnidentifiedImageError as error:
        raise Undecodable(
            f"not an image in a format read here ({', '.join(FORMATS)}), or its header is damaged; "
            f"it starts with {data[:8]!r}",
            item=item,
            source=resolved.label,
        ) from error


@cache
def _available_formats() -> tuple[str, ...]:
    Image.init()  # Pillow can be built without some of them
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _check_pixels(image: Image.Image, limits: Limits, item: str, label: str) -> None:
    if image.width * image.height > limits.max_pixels:
        raise TooLarge(
            f"{image.width} x {image.height} pixels, the limit is {limits.max_pixels}: shrink it or raise "
            "Limits(max_pixels=...)",
            item=item,
            source=label,
        )


def _encoded_orientation(image: Image.Image, data: bytes) -> int:
    if image.format == "PNG" and "exif" not in image.info and b"eXIf" in data:
        image.load()  # its EXIF comes after the pixels; rare, and the pixel limit was checked
    return _orientation(image)


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":
        return 1  # Pillow's reader turns TIFF upright itself and reports the upright size
    try:
        # The base class's method: PNG's own decodes the whole picture to look behind the pixels.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, LookupError, TypeError, struct.error):
        return 1  # an unreadable EXIF block says nothing about orientation; viewers ignore it too
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image, item: str, label: str) -> Image.Image:
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I;16"):
        return Image.fromarray(to_eight_bit(np.asarray(image), item, label)).convert("RGB")
    if mode == "I":
        return Image.fromarray(_wide_grey(image, item, label)).convert("RGB")
    if mode == "F":
        return Image.fromarray(to_eight_bit(np.asarray(image), item, label)).convert("RGB")
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        background = Image.new("RGB", picture.size, (255, 255, 255))
        background.paste(picture, mask=picture.getchannel("A"))
        return background
    return image.convert("RGB")


def _wide_grey(image: Image.Image, item: str, label: str) -> np.ndarray:
    """32-bit grey: image files mean 16 bits by it; an image made in memory may also hold 0..255."""
    array = np.asarray(image)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 65535:
        raise Undecodable(
            f"32-bit grey values span {low}..{high}, whose full range is unknown: convert to 8 or 16 bits",
            item=item,
            source=label,
        )
    if image.format is None and high <= 255:
        return array.astype(np.uint8)
    return to_eight_bit(array.astype(np.uint16), item, label)
