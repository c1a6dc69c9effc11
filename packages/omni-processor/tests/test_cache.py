"""One decode a picture, whoever asks and however often."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from omni_processor import Undecodable
from omni_processor.cache import ItemCache
from PIL import Image


def item(size: int) -> dict:
    return {"kind": "image", "pixel_values": np.zeros(size, np.uint8)}


def test_the_samples_of_a_group_share_one_decode(make_processor, picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    processor = make_processor()
    first, *others = (processor("<image>", images=[file.getvalue()]) for _ in range(8))
    assert all(sample.media[0] is first.media[0] for sample in others)
    other = processor("<image>", images=[picture.transpose(Image.Transpose.ROTATE_180)])
    assert other.media[0] is not first.media[0]


def test_shared_arrays_cannot_be_written(processor, picture):
    media = processor("<image>", images=[picture]).media[0]
    for array in (media["pixel_values"], media["image_grid_thw"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_the_same_pixels_turned_by_exif_are_another_item(make_processor, picture):
    turned = picture.copy()
    turned.getexif()[0x0112] = 3
    processor = make_processor()
    upright = processor("<image>", images=[picture]).media[0]["pixel_values"]
    rotated = processor("<image>", images=[turned]).media[0]["pixel_values"]
    assert not np.array_equal(upright, rotated)


def test_the_least_recently_used_item_leaves_first():
    cache = ItemCache(max_bytes=100)
    made = []

    def get(key: bytes, size: int) -> None:
        cache.get_or_make(key, lambda: made.append(key) or item(size))

    for key, size in ((b"a", 40), (b"b", 40), (b"a", 40), (b"c", 40), (b"a", 40), (b"b", 40)):
        get(key, size)
    assert made == [b"a", b"b", b"c", b"b"]
    assert cache.nbytes == 80
    get(b"huge", 101)
    get(b"huge", 101)
    assert made[-2:] == [b"huge", b"huge"]
    assert cache.nbytes == 80


def test_threads_that_ask_at_once_wait_for_one_decode():
    cache = ItemCache(max_bytes=1000)
    started, release = threading.Event(), threading.Event()
    made = []

    def slow() -> dict:
        made.append(threading.get_ident())
        started.set()
        assert release.wait(20)
        return item(10)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get_or_make, b"k", slow)
        assert started.wait(20)
        others = [pool.submit(cache.get_or_make, b"k", slow) for _ in range(3)]
        release.set()
        results = [future.result(20) for future in (first, *others)]
    assert len(made) == 1
    assert all(result is results[0] for result in results)


def test_a_failure_is_raised_each_time_and_not_kept(make_processor, picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    processor = make_processor()
    for _ in range(2):
        with pytest.raises(Undecodable):
            processor("<image>", images=[file.getvalue()[:4000]])
    assert processor("<image>", images=[file.getvalue()]).token_counts["image"] == 12


def test_a_processor_serves_threads(make_processor, picture):
    processor = make_processor()
    pictures = [picture.rotate(angle) for angle in range(8)]
    expected = [processor("x <image> y", images=[image]) for image in pictures]
    fresh = make_processor()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda image: fresh("x <image> y", images=[image]), pictures * 3))
    for result, reference in zip(results, expected * 3, strict=True):
        np.testing.assert_array_equal(result.tokens, reference.tokens)
        np.testing.assert_array_equal(result.media[0]["pixel_values"], reference.media[0]["pixel_values"])
