"""Files as people and attackers have them: the right picture or a typed error, never a crash."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omni_processor import ConfigError, Empty, Limits, MediaError, TooLarge, Undecodable
from omni_processor.images import decode, read_header
from omni_processor.sources import resolve
from PIL import Image, ImageFile

LIMITS = Limits(max_bytes=4 * 2**20, max_pixels=1_000_000)
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encode(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def quarters() -> Image.Image:
    """64 x 32: red, green over blue, white, so that every turn and flip is told apart."""
    image = Image.new("RGB", (64, 32))
    for colour, corner in zip((RED, GREEN, BLUE, WHITE), ((0, 0), (32, 0), (0, 16), (32, 16)), strict=True):
        image.paste(colour, (*corner, corner[0] + 32, corner[1] + 16))
    return image


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    array = np.asarray(image)
    h, w = array.shape[0] // 4, array.shape[1] // 4
    return [tuple(int(v) for v in array[y, x]) for y in (h, 3 * h) for x in (w, 3 * w)]


def open_rgb(source, limits: Limits = LIMITS) -> Image.Image:
    resolved = resolve(source, limits)
    return decode(resolved, read_header(resolved, limits))


def near(actual, expected, tolerance: int = 12) -> bool:
    return np.abs(np.asarray(actual, int) - np.asarray(expected, int)).max() <= tolerance


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, body: bytes, *extra: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [
            png_chunk(b"IHDR", header),
            *extra[:1],
            png_chunk(b"IDAT", zlib.compress(body)),
            *extra[1:],
            png_chunk(b"IEND", b""),
        ]
    )


def noisy(width: int = 96, height: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (height, width, 3)).astype(np.uint8))


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def gif_of(*colours) -> bytes:
    frames = [Image.new("RGB", (40, 40), colour) for colour in colours]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


def webp_of(*colours) -> bytes:
    frames = [Image.new("RGB", (40, 40), colour) for colour in colours]
    return encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=50, lossless=True)


def apng_of(*colours) -> bytes:
    frames = [Image.new("RGB", (40, 40), colour) for colour in colours]
    return encode(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=50)


BAD = {
    "zero length": (b"", Empty, "zero bytes"),
    "one byte": (b"\xff", Undecodable, "not an image"),
    "text": (b"just some text that is no picture", Undecodable, "not an image"),
    "mp4": (b"\x00\x00\x00\x18ftypmp42" + bytes(64), Undecodable, "not an image"),
    "html error page": (b"<!DOCTYPE html><html><body>404</body></html>", Undecodable, "HTML"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', Undecodable, "rasterise"),
    "svg after an xml header": (
        b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- x --><svg/>',
        Undecodable,
        "rasterise",
    ),
    "eps, which would start ghostscript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        Undecodable,
        "not an image",
    ),
    "jpeg magic only": (b"\xff\xd8\xff\xe0", Undecodable, None),
    "half a jpeg": (encode(noisy(), "JPEG")[:1500], Undecodable, "cut off"),
    "half a png": (encode(noisy(), "PNG")[:5000], Undecodable, "cut off"),
    "half a webp": (encode(noisy(), "WEBP", lossless=True)[:4000], Undecodable, None),
    "half a gif": (encode(noisy(), "GIF")[:2500], Undecodable, "cut off"),
    "half a bmp": (encode(noisy(), "BMP")[:5000], Undecodable, "cut off"),
    "half a tiff": (encode(noisy(), "TIFF")[:9000], Undecodable, None),
    "half an avif": (encode(noisy(), "AVIF")[:700], Undecodable, None),
    "png with a wrong checksum": (
        encode(noisy(), "PNG").replace(b"IHDR\x00", b"IHDR\x01", 1),
        Undecodable,
        None,
    ),
    "png whose data is no zlib stream": (
        png(4, 4, 8, 2, b"").replace(zlib.compress(b""), b"garbage!", 1),
        Undecodable,
        None,
    ),
    "png of zero width": (png(0, 9, 8, 2, b"\0" * 9), Undecodable, None),
    "png header bomb": (png(60_000, 60_000, 8, 2, b"\0" * 100), TooLarge, "3600000000|bomb"),
    "real png bomb": (png(20_000, 20_000, 1, 0, bytes(2501 * 20_000)), TooLarge, "20000 x 20000|bomb"),
    "gif header bomb": (
        b"GIF89a\xff\xff\xff\xff\x80\x00\x00" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;",
        TooLarge,
        "bomb",
    ),
    "just over the pixel limit": (encode(Image.new("1", (1001, 1000)), "PNG"), TooLarge, "1001 x 1000"),
    "just over the byte limit": (b"\xff" * (4 * 2**20 + 1), TooLarge, "max_bytes"),
    "png text chunk bomb": (
        png(
            4,
            4,
            8,
            2,
            (b"\0" + bytes(12)) * 4,
            png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80_000_000))),
        ),
        Undecodable,
        None,
    ),
    "float tiff beyond 0..1": (encode(Image.new("F", (8, 8), 300.0), "TIFF"), Undecodable, "0..1"),
}


@pytest.mark.parametrize("name", BAD)
def test_hostile_file_is_a_typed_error_with_item_and_source(name):
    data, error, reason = BAD[name]
    with pytest.raises(error, match=reason) as caught:
        open_rgb(data)
    assert type(caught.value) is error
    assert caught.value.item == "image"
    assert caught.value.source == f"{len(data)} bytes"


GOOD = {
    "cmyk jpeg": (encode(quarters().convert("CMYK"), "JPEG", quality=95), [RED, GREEN, BLUE, WHITE]),
    "grey jpeg": (encode(Image.new("L", (40, 40), 77), "JPEG"), [(77, 77, 77)] * 4),
    "one-bit png": (encode(Image.new("1", (40, 40), 1), "PNG"), [WHITE] * 4),
    "palette png": (
        encode(quarters().convert("P", palette=Image.Palette.ADAPTIVE), "PNG"),
        [RED, GREEN, BLUE, WHITE],
    ),
    "bmp": (encode(quarters(), "BMP"), [RED, GREEN, BLUE, WHITE]),
    "tiff": (encode(quarters(), "TIFF"), [RED, GREEN, BLUE, WHITE]),
    "cmyk tiff": (encode(quarters().convert("CMYK"), "TIFF"), [RED, GREEN, BLUE, WHITE]),
    "webp": (encode(quarters(), "WEBP", lossless=True), [RED, GREEN, BLUE, WHITE]),
    "avif": (encode(quarters(), "AVIF", quality=95), [RED, GREEN, BLUE, WHITE]),
    "jpeg 2000": (encode(quarters(), "JPEG2000"), [RED, GREEN, BLUE, WHITE]),
    "ppm": (encode(quarters(), "PPM"), [RED, GREEN, BLUE, WHITE]),
    "animated gif, first frame": (gif_of(GREEN, RED, BLUE), [GREEN] * 4),
    "animated webp, first frame": (webp_of(BLUE, RED), [BLUE] * 4),
    "animated png, first frame": (apng_of(RED, BLUE), [RED] * 4),
    "float tiff in 0..1": (encode(Image.new("F", (8, 8), 1.0), "TIFF"), [WHITE] * 4),
    "rotated tiff": (encode(quarters(), "TIFF", tiffinfo={274: 3}), [WHITE, BLUE, GREEN, RED]),
    "jpeg with a damaged exif block": (
        encode(quarters(), "JPEG", quality=95, exif=b"Exif\0\0garbage"),
        [RED, GREEN, BLUE, WHITE],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_unusual_file_becomes_the_picture_a_person_sees(name):
    data, expected = GOOD[name]
    picture = open_rgb(data)
    assert picture.mode == "RGB"
    assert near(corners(picture), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_and_known_from_the_header(orientation, kind):
    data = encode(quarters(), kind, exif=exif(orientation), **({"quality": 95} if kind == "JPEG" else {}))
    expected = {
        1: [RED, GREEN, BLUE, WHITE],
        2: [GREEN, RED, WHITE, BLUE],
        3: [WHITE, BLUE, GREEN, RED],
        4: [BLUE, WHITE, RED, GREEN],
        5: [RED, BLUE, GREEN, WHITE],
        6: [BLUE, RED, WHITE, GREEN],
        7: [WHITE, GREEN, BLUE, RED],
        8: [GREEN, WHITE, RED, BLUE],
    }[orientation]
    resolved = resolve(data, LIMITS)
    header = read_header(resolved, LIMITS)
    assert (header.width, header.height) == ((64, 32) if orientation < 5 else (32, 64))
    tolerance = 12 if kind != "WEBP" else 60  # lossy colours
    assert near(corners(decode(resolved, header)), expected, tolerance)


def test_png_exif_behind_the_pixels_is_found():
    body = b"".join(b"\0" + bytes(np.asarray(quarters())[row].tobytes()) for row in range(32))
    late = png(64, 32, 8, 2, body, b"", png_chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")))
    picture = open_rgb(late)
    assert picture.size == (32, 64)
    assert near(corners(picture), [BLUE, RED, WHITE, GREEN], 0)


@pytest.mark.parametrize("level", [0, 255, 256, 12_850, 65_535])
def test_sixteen_bit_grey_png_is_scaled_by_range_and_not_cut_off(level):
    data = encode(Image.fromarray(np.full((20, 20), level, np.uint16)), "PNG")
    assert near(corners(open_rgb(data)), [(round(level / 257),) * 3] * 4, 0)


def test_sixteen_bit_colour_png_keeps_its_colours():
    row = b"\0" + struct.pack(">3H", 65_535, 32_896, 0) * 8
    assert near(corners(open_rgb(png(8, 8, 16, 2, row * 8))), [(255, 128, 0)] * 4, 1)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), WHITE),
        ("RGBA", (255, 0, 0, 255), RED),
        ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
        ("LA", (0, 0), WHITE),
        ("LA", (0, 128), (127, 127, 127)),
    ],
)
def test_transparency_is_laid_over_white(mode, colour, expected):
    image = Image.new(mode, (20, 20), colour)
    assert near(corners(open_rgb(encode(image, "PNG"))), [expected] * 4, 1)
    assert near(corners(open_rgb(image)), [expected] * 4, 1)


def test_palette_png_with_a_transparent_colour_is_laid_over_white():
    image = quarters().convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    transparent = image.getpixel((1, 1))
    data = encode(image, "PNG", transparency=transparent)
    assert near(corners(open_rgb(data)), [WHITE, GREEN, BLUE, WHITE], 0)


def test_rgb_png_with_a_transparent_colour_is_laid_over_white():
    data = encode(quarters(), "PNG", transparency=BLUE)
    assert near(corners(open_rgb(data)), [RED, GREEN, WHITE, WHITE], 0)


def test_wrong_extension_is_no_matter(tmp_path):
    path = tmp_path / "picture.gif"
    path.write_bytes(encode(quarters(), "PNG"))
    assert near(corners(open_rgb(path)), [RED, GREEN, BLUE, WHITE], 0)


@pytest.mark.parametrize("size", [(1, 300), (300, 1), (1, 5000), (7, 1900)])
def test_thin_image_is_clamped_to_one_tokens_side(processor, size):
    width, height = size
    plan = processor.plan(encode(Image.new("RGB", size, RED), "PNG"))
    assert min(plan.size) == 32
    assert plan.source_size == (height, width)
    assert plan.tokens <= 64


def test_bombs_are_refused_before_their_pixels_are_decoded():
    # The pixels are damaged too, which only a decoder would notice.
    damaged = png(5000, 5000, 8, 2, b"").replace(zlib.compress(b""), b"garbage!", 1)
    with pytest.raises(TooLarge, match="5000 x 5000"):
        open_rgb(damaged)


def test_a_process_that_lets_truncated_images_pass_is_refused(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ConfigError, match="LOAD_TRUNCATED_IMAGES"):
        open_rgb(encode(quarters(), "PNG"))


SEEDS = [
    encode(noisy(24, 16), "JPEG", exif=exif(6)),
    encode(noisy(24, 16), "PNG"),
    encode(noisy(24, 16).convert("P"), "GIF"),
    encode(noisy(24, 16), "WEBP"),
    encode(noisy(24, 16), "TIFF", compression="tiff_lzw"),
    encode(noisy(24, 16), "BMP"),
    encode(noisy(24, 16), "JPEG2000"),
    encode(noisy(24, 16), "AVIF"),
]


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), max_size=6),
    cut=st.none() | st.integers(1, 1200),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_files_are_pictures_or_media_errors_and_nothing_else(seed, changes, cut):
    data = bytearray(seed)
    for position, value in changes:
        data[position % len(data)] = value
    try:
        picture = open_rgb(bytes(data[:cut]))
    except MediaError:
        return  # any other exception fails the test
    assert picture.mode == "RGB"
    assert 0 < picture.width * picture.height <= LIMITS.max_pixels
