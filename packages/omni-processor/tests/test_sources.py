"""Every accepted way of handing over an image gives the same tensors; everything else says how to go on."""

import base64
import io
import os
import pickle

import numpy as np
import pytest
from omni_processor import (
    Empty,
    Limits,
    MediaError,
    SourceNotAllowed,
    TooLarge,
    Undecodable,
)
from omni_processor.encoded import shorten
from omni_processor.sources import resolve
from PIL import Image


@pytest.fixture
def png(picture) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()


def as_path(png, picture, folder):
    path = folder / "plain.png"
    path.write_bytes(png)
    return path


def as_path_text(png, picture, folder):
    return str(as_path(png, picture, folder))


def as_file_url(png, picture, folder):
    path = folder / "with space & ümlaut #1.png"
    path.write_bytes(png)
    url = path.as_uri()
    assert "%20" in url
    return url


def as_localhost_url(png, picture, folder):
    return "file://localhost" + str(as_path(png, picture, folder))


def as_data_url(png, picture, folder):
    return f"data:image/png;base64,{encoded(png)}"


def as_data_url_with_line_breaks_and_no_padding(png, picture, folder):
    text = encoded(png).rstrip("=")
    return "DATA:;base64," + "\n".join(text[i : i + 76] for i in range(0, len(text), 76))


def as_percent_encoded_data_url(png, picture, folder):
    return "data:image/png," + "".join(f"%{byte:02x}" for byte in png)


def as_bytes(png, picture, folder):
    return png


def as_memoryview(png, picture, folder):
    return memoryview(png)


def as_pil(png, picture, folder):
    return picture


def as_lazy_pil(png, picture, folder):
    return Image.open(io.BytesIO(png))


def as_numpy(png, picture, folder):
    return np.asarray(picture)


def as_float_numpy(png, picture, folder):
    return np.asarray(picture, np.float64) / 255


def as_int64_numpy(png, picture, folder):
    return np.asarray(picture, np.int64)


def as_sixteen_bit_big_endian_numpy(png, picture, folder):
    return (np.asarray(picture, np.uint16) * 257).astype(">u2")


def as_flipped_view(png, picture, folder):
    return np.ascontiguousarray(np.asarray(picture)[:, ::-1])[:, ::-1]


def as_cell(png, picture, folder):
    return {"bytes": png, "path": None}


def as_cell_with_path_only(png, picture, folder):
    return {"bytes": None, "path": as_path_text(png, picture, folder)}


KINDS = [value for name, value in sorted(globals().items()) if name.startswith("as_")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_source_gives_the_same_tensors(make_processor, picture, png, tmp_path, kind):
    expected = make_processor()("<image>", images=[picture]).media[0]
    item = make_processor()("<image>", images=[kind(png, picture, tmp_path)]).media[0]
    np.testing.assert_array_equal(item["image_grid_thw"], expected["image_grid_thw"])
    np.testing.assert_array_equal(item["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_torch_chw_gives_the_same_tensors(make_processor, dtype):
    torch = pytest.importorskip("torch")
    levels = np.random.default_rng(0).choice([0, 51, 255], (64, 96, 3)).astype(np.uint8)
    tensor = torch.from_numpy(levels).permute(2, 0, 1)
    if dtype != "uint8":
        tensor = (tensor.float() / 255).to(getattr(torch, dtype))
    expected = make_processor()("<image>", images=[levels]).media[0]
    item = make_processor()("<image>", images=[tensor]).media[0]
    np.testing.assert_array_equal(item["pixel_values"], expected["pixel_values"])


def test_grey_arrays_of_two_and_three_axes_are_equal(processor):
    grey = np.random.default_rng(0).integers(0, 256, (64, 64)).astype(np.uint8)
    flat = processor("<image>", images=[grey]).media[0]["pixel_values"]
    deep = processor("<image>", images=[grey[:, :, None]]).media[0]["pixel_values"]
    boolean = processor("<image>", images=[grey > 127]).media[0]["pixel_values"]
    np.testing.assert_array_equal(flat, deep)
    assert set(np.unique(boolean)) == {-1.0, 1.0}


@pytest.mark.parametrize(
    "url", ["http://example.com/a.png", "HTTPS://example.com/a.png", "s3://bucket/a.png", "gopher://x/a.png"]
)
def test_network_sources_are_refused_with_the_way_out(processor, url):
    with pytest.raises(SourceNotAllowed, match="download it yourself and pass the path"):
        processor.plan(url)


@pytest.mark.parametrize(
    ("source", "error", "reason"),
    [
        ("file://server/share/a.png", SourceNotAllowed, "another host"),
        ("/dev/zero", SourceNotAllowed, "device"),
        ("/no/such/picture.png", Undecodable, "No such file"),
        ("nul\0byte.png", Undecodable, "null byte"),
        ("data:image/png;base64", Undecodable, "comma"),
        ("data:image/png;base64,a?b", Undecodable, "base64"),
        ("data:image/png;base64,AAAAA", Undecodable, "base64"),
        ("data:image/png;base64,", Empty, "zero bytes"),
        ("", Empty, "empty string"),
        ({"bytes": None, "path": None}, Empty, "bytes"),
        (np.zeros((0, 4, 3), np.uint8), Empty, "no pixels"),
        (np.zeros((3, 32, 64), np.uint8), Undecodable, "height, width, channels"),
        (np.zeros((2, 2, 2, 2), np.uint8), Undecodable, "height, width, channels"),
        (np.full((8, 8, 3), 200.0), Undecodable, "0..1"),
        (np.full((8, 8, 3), np.nan), Undecodable, "0..1"),
        (np.full((8, 8), 70_000), Undecodable, "full range is unknown"),
        (np.zeros((8, 8), complex), Undecodable, "no pixel type"),
        (Image.new("I", (8, 8), 70_000), Undecodable, "full range is unknown"),
        (Image.new("F", (8, 8), 2.0), Undecodable, "0..1"),
        (3.5, SourceNotAllowed, "cannot read an image from float"),
        (None, SourceNotAllowed, "NoneType"),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, type) else None,
)
def test_unusable_sources_are_typed_errors(processor, source, error, reason):
    with pytest.raises(error, match=reason) as caught:
        processor("<image>", images=[source])
    assert caught.value.item == "image 0"


def test_folders_and_pipes_are_refused_without_waiting(processor, tmp_path):
    with pytest.raises(SourceNotAllowed, match="folder"):
        processor.plan(tmp_path)
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with pytest.raises(SourceNotAllowed, match="pipe"):
        processor.plan(pipe)


def test_refused_files_leave_no_descriptor_open(processor, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    for source in [tmp_path, "/dev/zero", bad] * 20:
        with pytest.raises(MediaError):
            processor.plan(source)
    assert len(os.listdir("/proc/self/fd")) == before


def test_limits_hold_for_every_kind_of_source(make_processor, picture, png, tmp_path):
    small_bytes = make_processor(limits=Limits(max_bytes=100))
    for kind in (as_path, as_bytes, as_data_url, as_cell):
        with pytest.raises(TooLarge, match="max_bytes"):
            small_bytes.plan(kind(png, picture, tmp_path))
    small_area = make_processor(limits=Limits(max_pixels=100))
    for kind in (as_path, as_bytes, as_pil, as_numpy):
        with pytest.raises(TooLarge, match="max_pixels"):
            small_area.plan(kind(png, picture, tmp_path))


def test_a_lazily_opened_truncated_picture_is_a_typed_error(processor, png):
    with pytest.raises(Undecodable, match="cut off"):
        processor("<image>", images=[Image.open(io.BytesIO(png[:3000]))])


def test_sources_in_messages_are_shortened():
    shortened = shorten("data:image/png;base64," + "A" * 10_000)
    assert shortened == "data:image/png;base64," + "A" * 38 + "..." + "A" * 12


def test_media_errors_survive_a_process_boundary():
    with pytest.raises(MediaError) as caught:
        resolve("https://example.com/a.png", Limits(), "image 3")
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own object
    assert type(copy) is SourceNotAllowed
    assert (copy.item, copy.source) == ("image 3", "https://example.com/a.png")
    assert copy.reason == caught.value.reason
    assert str(copy) == str(caught.value)
