"""Work that was given up ends at its next frame; who still wants the item gets it."""

import threading

import numpy as np
import pytest
from omni_processor import Cancelled, MediaError, cancellable, videos
from omni_processor.cache import ItemCache


@pytest.fixture
def film(make_frames, write_video, make_wave):
    return write_video(make_frames(12), 4, container="matroska", sound=make_wave(3.0))


@pytest.mark.parametrize("column", ["images", "audios", "videos"])
def test_nothing_is_begun_once_it_was_given_up(make_omni, film, picture, column):
    source = picture if column == "images" else film
    cancelled = threading.Event()
    cancelled.set()
    omni = make_omni()
    with cancellable(cancelled), pytest.raises(Cancelled):
        omni(f"<{column[:-1]}>", **{column: [source]})
    assert not issubclass(Cancelled, MediaError)  # the item is not to blame
    assert omni(f"<{column[:-1]}>", **{column: [source]}).media  # and outside nothing is


def test_decoding_ends_at_the_next_frame(make_omni, make_frames, film, monkeypatch):
    cancelled, frames = threading.Event(), 0
    decode = videos.decode

    def counted(*arguments):
        nonlocal frames
        for frame in decode(*arguments):
            frames += 1
            if frames == 3:
                cancelled.set()
            yield frame

    monkeypatch.setattr(videos, "decode", counted)
    omni = make_omni()
    with cancellable(cancelled), pytest.raises(Cancelled):
        omni("<video>", videos=[film])
    assert frames == 3
    monkeypatch.undo()
    assert omni("<video>", videos=[film]).media


def test_blocks_nest_and_threads_are_apart(make_omni, film):
    outer, inner, done = threading.Event(), threading.Event(), []
    outer.set()
    omni = make_omni()
    with cancellable(outer):
        with cancellable(inner):
            assert omni("<audio>", audios=[film]).media
        thread = threading.Thread(target=lambda: done.append(omni("<video>", videos=[film])))
        thread.start()
        thread.join(30)
        with pytest.raises(Cancelled):
            omni("<audio>", audios=[film])
    assert done[0].media


def test_another_goes_on_with_what_the_first_gave_up():
    cache = ItemCache(1000)
    begun, cancelled, made = threading.Event(), threading.Event(), []

    def given_up():
        begun.set()
        assert cancelled.wait(30)
        raise Cancelled("given up")

    def first():
        with pytest.raises(Cancelled):
            cache.get_or_make(b"k", given_up)

    one = threading.Thread(target=first)
    one.start()
    assert begun.wait(30)
    item = {"kind": "image", "pixel_values": np.zeros(8, np.uint8)}
    other = threading.Thread(target=lambda: made.append(cache.get_or_make(b"k", lambda: item)))
    other.start()
    cancelled.set()
    one.join(30)
    other.join(30)
    assert made == [item]
