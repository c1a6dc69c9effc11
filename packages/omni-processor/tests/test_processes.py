"""A processor in other processes: pickled to them, or there when they are forked."""

import copy
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest
from omni_processor.cache import ItemCache


def test_a_processor_is_pickled_without_what_it_decoded(make_omni, make_wave, picture):
    omni = make_omni()
    expected = omni("<image><audio>", images=[picture], audios=[make_wave(0.3)])
    content = pickle.dumps(omni)
    assert len(content) < 2_000_000
    for again in (pickle.loads(content), copy.deepcopy(omni)):  # noqa: S301
        sample = again("<image><audio>", images=[picture], audios=[make_wave(0.3)])
        np.testing.assert_array_equal(sample.tokens, expected.tokens)
        assert sample.media[0] is not expected.media[0]
        np.testing.assert_array_equal(sample.media[0]["pixel_values"], expected.media[0]["pixel_values"])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_an_item_is_made_makes_its_own():
    cache = ItemCache(1000)
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(30)
        return {"kind": "image", "pixel_values": np.zeros(8, np.uint8)}

    maker = threading.Thread(target=cache.get_or_make, args=(b"k", slow))
    maker.start()
    assert begun.wait(30)
    with cache._lock:  # held by a thread that the child does not have
        child = multiprocessing.get_context("fork").Process(
            target=lambda: os._exit(len(cache.get_or_make(b"k", lambda: {"kind": "made here"})["kind"]))
        )
        child.start()
    child.join(20)
    go_on.set()
    maker.join(30)
    code = child.exitcode
    if code is None:
        child.kill()
        child.join(10)
    assert code == len("made here")
    assert cache.get_or_make(b"k", slow)["kind"] == "image"
