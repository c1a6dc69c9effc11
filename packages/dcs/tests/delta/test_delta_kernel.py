"""The compiled loops and numpy do the same: every bit, and every refusal."""

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dcs import delta
from dcs.delta import codec, kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
MARGIN = 512


@pytest.fixture(autouse=True)
def _installed() -> None:
    if kernel.loaded() is None:
        if shutil.which("cc") or shutil.which("gcc"):
            pytest.fail(f"{kernel.found().why}, though there is a C compiler: install relax-dcs again")
        pytest.skip(kernel.found().why)


@pytest.fixture(scope="module")
def by_numpy() -> Callable[..., object]:
    """Calls a function of the codec as an installation without the loops does."""

    def call(function: Callable[..., object], *arguments: object, **named: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "loaded", lambda: None)
            return function(*arguments, **named)

    return call


def _guarded(range_: Bytes) -> tuple[Bytes, Bytes]:
    """A copy, and the memory around it."""
    memory = np.full(len(range_) + 2 * MARGIN, 0x5C, np.uint8)
    inside = memory[MARGIN : MARGIN + len(range_)]
    inside[:] = range_
    return inside, memory


def _stepped(draw: st.DrawFn, rng: np.random.Generator, base: Bytes, unit: int) -> Bytes:
    new = base.copy()
    values = new[: len(base) // unit * unit].view(f"<u{unit}")
    where = np.flatnonzero(rng.random(len(values)) < draw(st.sampled_from((0, 0.0005, 0.014, 0.05))))
    reach = draw(st.sampled_from((1, 5, 200, 100_000)))
    by = rng.integers(-reach, reach + 1, len(where))
    values[where] += by.astype(f"<i{unit}").view(values.dtype)
    return new


@st.composite
def _two_steps(draw: st.DrawFn) -> tuple[Bytes, bytes, bytes]:
    """A range, a delta of it, and the delta after that, of which some are damaged."""
    unit = draw(st.sampled_from((1, 2, 4)))
    nbytes = draw(st.one_of(st.integers(0, 40), st.integers(0, 9000), st.just(40_003)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = rng.integers(0, 256, nbytes, np.uint8)
    middle = _stepped(draw, rng, base, unit)
    other = draw(st.sampled_from((unit, unit, unit, 1, 2, 4)))
    new = _stepped(draw, rng, middle, other)
    compress = draw(st.booleans())
    first = delta.encode(base, middle, unit, 4 * nbytes + 4096, compress=compress)
    second = delta.encode(middle, new, other, 4 * nbytes + 4096, compress=compress)
    assert first is not None
    assert second is not None
    damaged = bytearray(second)
    for _ in range(draw(st.sampled_from((0, 0, 1, 2, 6)))):
        place = draw(st.one_of(st.integers(0, 60), st.integers(0, len(second) - 1)))
        damaged[place % len(second)] = draw(st.sampled_from((0, 1, 2, 3, 0x7F, 0x80, 0xFF)))
    return base, first, bytes(damaged)


def _fields(changed: delta.Changed | None) -> object:
    if changed is None:
        return None
    found = [getattr(changed, field.name) for field in dataclasses.fields(changed)]
    return [(each.dtype, each.tolist()) if isinstance(each, np.ndarray) else each for each in found]


def _outcome(apply: Callable[..., object], *arguments: object, **named: object) -> object:
    try:
        changed = apply(*arguments, **named)
    except delta.CorruptDelta as error:
        return str(error)
    assert changed is None or isinstance(changed, delta.Changed)
    return _fields(changed)


@settings(max_examples=120, deadline=None)
@given(_two_steps())
def test_both_give_the_same_bits_or_refuse_in_the_same_words(
    by_numpy, steps: tuple[Bytes, bytes, bytes]
) -> None:
    start, first, second = steps
    base = start.copy()
    behind = delta.apply(first, base)
    for held, before in ((base, None), (start, behind)):
        if before is None and held is not base:
            continue
        compiled, around = _guarded(held)
        plain = held.copy()
        outcome = _outcome(delta.apply, second, compiled, behind=before)
        assert outcome == _outcome(by_numpy, delta.apply, second, plain, behind=before)
        np.testing.assert_array_equal(compiled, plain)
        if isinstance(outcome, str):
            np.testing.assert_array_equal(compiled, held)
        assert (around[:MARGIN] == 0x5C).all()
        assert (around[-MARGIN:] == 0x5C).all()


@settings(max_examples=40, deadline=None)
@given(_two_steps(), st.booleans())
def test_both_bring_a_slot_up_and_take_it_back_alike(
    by_numpy, steps: tuple[Bytes, bytes, bytes], back: bool
) -> None:
    start, first, _ = steps
    after = start.copy()
    changed = delta.apply(first, after)
    if changed is None:
        return
    held, source = (after, start) if back else (start, None)
    compiled, plain = held.copy(), held.copy()
    delta.copy_changed(changed, compiled, source=source)
    by_numpy(delta.copy_changed, changed, plain, source=source)
    np.testing.assert_array_equal(compiled, plain)
    np.testing.assert_array_equal(compiled, start if back else after)


def test_what_a_caller_made_up_is_never_followed_out_of_the_range() -> None:
    base = np.zeros(4096, np.uint8)
    payload = delta.encode(base, base, 2, 4096)
    assert payload is not None
    for far, values in ((np.full(64, 255, np.uint8), 64), (np.full(4, 1, np.uint8), 3)):
        forged = delta.Changed(4096, 2, far, np.ones(values, np.uint16), b"")
        target, around = _guarded(base)
        with pytest.raises((IndexError, ValueError)):
            delta.copy_changed(forged, target)
        with pytest.raises((IndexError, ValueError)):
            delta.apply(payload, target, behind=forged)
        assert (around[:MARGIN] == 0x5C).all()
        assert (around[-MARGIN:] == 0x5C).all()


def test_memory_that_may_not_be_written_is_not() -> None:
    base = np.zeros(4096, np.uint8)
    new = base.copy()
    new[100] = 1
    payload = delta.encode(base, new, 2, 4096)
    assert payload is not None
    changed = delta.apply(payload, base.copy())
    assert changed is not None
    base.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        delta.apply(payload, base)
    with pytest.raises(ValueError, match="read-only"):
        delta.copy_changed(changed, base)


def test_it_can_be_told_which_one_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert delta.implementation() == "compiled"
    damaged = tmp_path / "_kernel.so"
    damaged.write_bytes(b"no library")
    for path, why in ((tmp_path / "none.so", "no compiled kernel"), (damaged, "cannot be loaded")):
        monkeypatch.setattr(kernel, "_LIBRARY", path)
        kernel.found.cache_clear()
        with caplog.at_level(logging.INFO, "dcs"):
            assert kernel.loaded() is None
        assert delta.implementation().startswith("numpy (")
        assert why in delta.implementation()
        assert why in caplog.text
    monkeypatch.undo()
    kernel.found.cache_clear()
    assert kernel.loaded() is not None
