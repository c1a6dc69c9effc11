"""A delta gives back every bit of the new range, whatever the bits are."""

import threading

import numpy as np
import pytest
from dcs import delta
from dcs.delta import codec
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Bit patterns that arithmetic on values would lose or confuse, by width.
AWKWARD = {
    1: (0x00, 0x80, 0x7F, 0xFF, 0x78, 0x7C, 0xFC),
    2: (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x7C00, 0x7E01),
    4: (0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x00000001),
}


def _bytes_of(seed: int, nbytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@st.composite
def two_ranges(draw: st.DrawFn) -> tuple[Bytes, Bytes, int]:
    """A base, a new range and a unit: a few bits changed or many, by one or by anything."""
    unit = draw(st.sampled_from((1, 2, 4)))
    nbytes = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from((65_536, 140_001))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = rng.integers(0, 256, nbytes, np.uint8)
    units = nbytes // unit
    values = base[: units * unit].view(f"<u{unit}")
    awkward = rng.random(units) < 0.1
    values[awkward] = rng.choice(np.array(AWKWARD[unit], values.dtype), int(awkward.sum()))
    new = base.copy()
    changed = new[: units * unit].view(f"<u{unit}")
    where = np.flatnonzero(rng.random(units) < draw(st.sampled_from((0, 0.0005, 0.01, 0.05, 0.1, 0.5, 0.9))))
    by = draw(st.sampled_from(("ulp", "few", "byte", "any", "awkward")))
    match by:
        case "ulp":
            changed[where] += rng.choice(np.array((1, -1), f"<i{unit}"), len(where)).view(values.dtype)
        case "few":
            changed[where] += rng.integers(-5, 6, len(where)).astype(f"<i{unit}").view(values.dtype)
        case "byte":
            changed[where] += rng.integers(-128, 128, len(where)).astype(f"<i{unit}").view(values.dtype)
        case "any":
            changed[where] = rng.integers(0, 256, (len(where), unit), np.uint8).view(values.dtype).reshape(-1)
        case "awkward":
            changed[where] = rng.choice(np.array(AWKWARD[unit], values.dtype), len(where))
    if nbytes % unit and draw(st.booleans()):
        new[units * unit :] ^= 0xA5
    return base, new, unit


def _encoded(base: Bytes, new: Bytes, unit: int, compress: bool = True) -> bytes:
    payload = delta.encode(base, new, unit, limit=2 * len(base) + 4096, compress=compress)
    assert payload is not None
    return payload


@settings(max_examples=300, deadline=None)
@given(two_ranges(), st.booleans())
def test_every_bit_of_the_new_range_comes_back(ranges: tuple[Bytes, Bytes, int], compress: bool) -> None:
    base, new, unit = ranges
    payload = delta.encode(base, new, unit, limit=2 * len(base) + 4096, compress=compress)
    units = len(base) // unit
    differing = np.count_nonzero(
        base[: units * unit].view(f"<u{unit}") != new[: units * unit].view(f"<u{unit}")
    )
    if payload is None:
        assert differing > 0.94 * units or delta.density(base, new, unit) > 0.94
        return
    target = base.copy()
    changed = delta.apply(payload, target)
    np.testing.assert_array_equal(target, new)
    if differing > 0.06 * units:
        assert changed is None
        return
    assert changed is not None
    older = base.copy()
    delta.copy_changed(changed, older)
    np.testing.assert_array_equal(older, new)
    delta.copy_changed(changed, older, source=base)
    np.testing.assert_array_equal(older, base)


@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [0, 1, 3, 7, 8, 9, 4095, 4096])
def test_a_range_without_changes_costs_no_more_than_a_header(unit: int, nbytes: int) -> None:
    base = _bytes_of(1, nbytes)
    payload = _encoded(base, base.copy(), unit)
    assert len(payload) < 48
    target = base.copy()
    delta.apply(payload, target)
    np.testing.assert_array_equal(target, base)


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_a_single_change_comes_back_wherever_it_is(unit: int) -> None:
    base = _bytes_of(2, 300_000 + unit - 1)
    for place in (0, 1, 7, 255, 256, 257, 65_535, 65_536, 65_537, 200_000, len(base) - 1):
        new = base.copy()
        new[place] += 1
        target = base.copy()
        changed = delta.apply(_encoded(base, new, unit, compress=False), target)
        np.testing.assert_array_equal(target, new)
        assert changed is not None
        older = base.copy()
        delta.copy_changed(changed, older)
        np.testing.assert_array_equal(older, new)


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_a_range_of_which_all_has_changed_is_left_dense(unit: int) -> None:
    base = _bytes_of(3, 1 << 20)
    assert delta.encode(base, ~base, unit, limit=len(base) * 2) is None


def test_ranges_need_no_alignment() -> None:
    memory = _bytes_of(4, 400_003)
    base = memory[3:].copy()[1:]
    new = base.copy()
    new[[5, 90_001, 399_998]] ^= 0x11
    holder = np.empty(len(base) + 5, np.uint8)
    target = holder[5:]
    target[:] = base
    delta.apply(_encoded(base, new, 2), target)
    np.testing.assert_array_equal(target, new)


def test_the_payload_may_be_any_buffer_and_is_not_referred_to_afterwards(training) -> None:
    steps = training(200_000, seed=5)
    base, new = next(steps), next(steps)
    arrived = bytearray(_encoded(base, new, 2, compress=False))
    target = base.copy()
    changed = delta.apply(memoryview(arrived), target)
    arrived[:] = bytes(len(arrived))
    assert changed is not None
    older = base.copy()
    delta.copy_changed(changed, older)
    np.testing.assert_array_equal(older, new)


def test_a_delta_is_never_larger_than_its_limit(training) -> None:
    steps = training(100_000, seed=6)
    base, new = next(steps), next(steps)
    for compress in (True, False):
        size = len(_encoded(base, new, 2, compress))
        assert delta.encode(base, new, 2, limit=size, compress=compress) is not None
        for limit in (size - 1, size // 2, 35, 1, 0):
            assert delta.encode(base, new, 2, limit=limit, compress=compress) is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.3, 0.8, 0.93])
def test_a_sampled_density_is_near_the_true_one(share: float) -> None:
    rng = np.random.default_rng(7)
    base = rng.integers(0, 256, 4 << 20, np.uint8)
    new = base.copy()
    values = new.view("<u2")
    values[rng.random(len(values)) < share] += 1
    assert delta.density(base, new, 2) == pytest.approx(share, abs=0.02)


def test_one_step_of_training_is_45_times_smaller_plain_and_65_times_with_zstd(training) -> None:
    steps = training(2 << 20, seed=8)
    base, new = next(steps), next(steps)
    share = np.count_nonzero(base.view(np.uint16) != new.view(np.uint16)) / len(base.view(np.uint16))
    assert 0.012 < share < 0.015
    assert len(base) >= 45 * len(_encoded(base, new, 2, compress=False))
    assert len(base) >= 65 * len(_encoded(base, new, 2))


def test_what_is_kept_of_a_step_is_a_few_percent_of_the_range(training) -> None:
    steps = training(2 << 20, seed=9)
    base, new = next(steps), next(steps)
    changed = delta.apply(_encoded(base, new, 2), base.copy())
    assert changed is not None
    assert changed.memory < 0.025 * len(base)


def test_a_range_that_samples_show_to_be_beyond_the_limit_is_not_even_compared(monkeypatch) -> None:
    rng = np.random.default_rng(12)
    base = rng.integers(0, 256, 4 << 20, np.uint8)
    new = base.copy()
    values = new.view("<u2")
    where = rng.random(len(values)) < 0.5
    values[where] = rng.integers(0, 1 << 16, int(where.sum()), np.uint16)
    whole = delta.encode(base, new, 2, limit=len(base))
    assert whole is not None
    compared: list[int] = []  # bytes of the ranges that a delta is made of
    encoded = codec._encoded

    def count(old: np.ndarray, *rest) -> bytes | None:
        compared.append(len(old))
        return encoded(old, *rest)

    monkeypatch.setattr(codec, "_encoded", count)
    assert delta.encode(base, new, 2, limit=len(whole) // 2) is None
    assert 0 < sum(compared) < len(base) / 16
    assert delta.encode(base, new, 2, limit=len(whole)) == whole
    assert compared[-1] == len(base)


def _follow(training, steps: int, count: int) -> None:
    """Two slots in turn, as a receiver has them: bring the older one up, apply, and compare every bit."""
    versions = training(count, seed=10)
    before = next(versions)
    slots = [before.copy(), before.copy()]
    last: delta.Changed | None = None
    for step in range(steps):
        new = next(versions)
        target = slots[step % 2]
        payload = _encoded(before, new, 2, compress=step % 3 > 0)
        if last is not None and step % 5 == 0:
            delta.copy_changed(last, target)
            np.testing.assert_array_equal(target, before)
            last = delta.apply(payload, target)
        else:
            last = delta.apply(payload, target, behind=last)
        assert last is not None
        np.testing.assert_array_equal(target, new)
        before = new


def test_sixty_chained_steps_are_bit_exact(training) -> None:
    _follow(training, steps=60, count=200_001)


@pytest.mark.slow
def test_a_thousand_chained_steps_are_bit_exact(training) -> None:
    _follow(training, steps=1000, count=400_001)


def test_threads_encode_and_apply_at_once(training) -> None:
    failures: list[int] = []

    def work(seed: int) -> None:
        steps = training(100_000, seed=seed)
        base, new = next(steps), next(steps)
        for _ in range(20):
            target = base.copy()
            delta.apply(_encoded(base, new, 2), target)
            if not np.array_equal(target, new):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_ranges_that_have_no_delta_are_refused() -> None:
    base = _bytes_of(11, 64)
    with pytest.raises(ValueError, match="64 and 32 bytes"):
        delta.encode(base, base[:32], 2, 100)
    with pytest.raises(ValueError, match="unit of 3"):
        delta.encode(base, base, 3, 100)
    with pytest.raises(ValueError, match="contiguous"):
        delta.encode(base[::2], base[::2], 2, 100)
    with pytest.raises(ValueError, match="uint8"):
        delta.encode(base.view(np.int8), base.view(np.int8), 2, 100)  # pyright: ignore[reportArgumentType]
    changed = delta.apply(_encoded(base, base.copy(), 2), base.copy())
    assert changed is not None
    with pytest.raises(ValueError, match="range of 64 bytes"):
        delta.copy_changed(changed, base[:32].copy())
