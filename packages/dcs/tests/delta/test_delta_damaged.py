"""A damaged or hostile delta is refused before it has touched anything, or does no harm."""

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from dcs import delta
from dcs.errors import CorruptChunk
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

HEADER = struct.Struct("<BBBBIIIIIIII")
FIELDS = ("version", "unit", "index", "form", "nbytes", "count", "narrow", "wide", "i", "c", "n", "w")


def _case(
    density: float, compress: bool, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], bytes]:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, 40_001, np.uint8)
    new = base.copy()
    values = new[:40_000].view("<u2")
    where = np.flatnonzero(rng.random(len(values)) < density)
    values[where] += rng.choice(np.array((1, -1, 1, -1, 1, -1, 3, 500), "<i2"), len(where)).view("<u2")
    new[-1] ^= 1
    payload = delta.encode(base, new, 2, 1 << 20, compress=compress)
    assert payload is not None
    return base, new, payload


CASES = [_case(density, compress) for density in (0.0005, 0.02, 0.3) for compress in (True, False)]


def _refused_or_harmless(base: NDArray[np.uint8], payload: bytes) -> None:
    """Apply within guarded memory: an error leaves the target as it was; nothing outside is ever written."""
    guarded = np.full(len(base) + 2048, 0x5C, np.uint8)
    target = guarded[1024:-1024]
    target[:] = base
    try:
        delta.apply(payload, target)
    except delta.CorruptDelta:
        np.testing.assert_array_equal(target, base)
    assert (guarded[:1024] == 0x5C).all()
    assert (guarded[-1024:] == 0x5C).all()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(range(len(CASES))), st.data())
def test_a_flipped_bit_is_found_or_harmless(case: int, data: st.DataObject) -> None:
    base, _, payload = CASES[case]
    place = data.draw(st.one_of(st.integers(0, 60), st.integers(0, len(payload) - 1)))
    damaged = bytearray(payload)
    damaged[place % len(payload)] ^= 1 << data.draw(st.integers(0, 7))
    _refused_or_harmless(base, bytes(damaged))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_bit_of_the_header_can_flip(case: int) -> None:
    base, _, payload = CASES[case]
    for place in range(HEADER.size):
        for bit in range(8):
            damaged = bytearray(payload)
            damaged[place] ^= 1 << bit
            _refused_or_harmless(base, bytes(damaged))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_payload_that_is_cut_off_or_too_long_is_refused(case: int) -> None:
    base, _, payload = CASES[case]
    target = base.copy()
    for length in {0, 1, HEADER.size - 1, HEADER.size, len(payload) // 2, len(payload) - 1}:
        with pytest.raises(delta.CorruptDelta):
            delta.apply(payload[:length], target)
    with pytest.raises(delta.CorruptDelta, match="header says"):
        delta.apply(payload + b"\0", target)
    np.testing.assert_array_equal(target, base)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_are_refused_or_harmless(noise: bytes, with_header: bool) -> None:
    base = CASES[0][0]
    head = HEADER.pack(1, 2, 1 + len(noise) % 3, 1 + len(noise) % 2, len(base), 50, 50, 0, 50, 0, 50, 0)
    _refused_or_harmless(base, head + noise if with_header else noise)


def _made(sections: list[bytes], tail: bytes = b"\0", **fields: int) -> bytes:
    """A payload by hand, for a range of 40,001 bytes in units of 2."""
    values = dict.fromkeys(FIELDS, 0) | {"version": 1, "unit": 2, "index": 1, "form": 2, "nbytes": 40_001}
    values |= dict(zip("icnw", map(len, sections), strict=True)) | fields
    return HEADER.pack(*(values[name] for name in FIELDS)) + b"".join(sections) + tail


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (_made([b"\1\1", b"", b"\1\1", b""], count=2, narrow=2, version=9), "format 9"),
        (_made([b"\1\1", b"", b"\1\1", b""], count=2, narrow=2, unit=3), "unit 3"),
        (_made([b"\1\1", b"", b"\1\1", b""], count=2, narrow=2, nbytes=40_000), "for 40000 bytes"),
        (_made([b"\1\0", b"", b"\1\1", b""], count=2, narrow=2), "same position twice"),
        (_made([b"\xff" * 80, b"", b"\1" * 80, b""], count=80, narrow=80), "position 20400"),
        (_made([b"\xff\xff" * 2, b"", b"\1" * 2, b""], count=2, narrow=2, index=2), "position 131070"),
        (_made([b"\1\1", b"", b"\1\1", b""], count=2**32 - 1, narrow=2), "4294967295 changes"),
        (_made([b"\1\1", b"", b"\1\1", b""], count=2, narrow=2**31), "2147483648"),
        (_made([b"\1\1", b"", b"\1\x80", b""], count=2, narrow=2), "1 escapes to 0 wide"),
        (_made([b"\1\1", b"", b"\1\1", b"\0\0"], count=2, narrow=2, wide=1), "0 escapes to 1 wide"),
        (_made([b"\1\1", b"\x0c", b"", b""], count=2, form=3), "1 escapes to 0 narrow"),
        (_made([b"\1\1", b"", b"\1", b""], count=2, narrow=1), "1 values for 2"),
        (_made([b"\1\1", b"", b"", b"\0\0"], count=2, wide=1, form=1), "1 values for 2"),
        (_made([b"\1" * 2500, b"", b"\1\1", b""], count=2, narrow=2, index=3), "2500 marks"),
        (_made([b"\1\1\1", b"", b"\1\1", b""], count=2, narrow=2), "at most 2"),
        (_made([b"\1", b"", b"\1\1", b""], count=2, narrow=2), "no zstd frame|unpacks to"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_reason(payload: bytes, said: str) -> None:
    base = CASES[0][0]
    target = base.copy()
    with pytest.raises(delta.CorruptDelta, match=said):
        delta.apply(payload, target)
    np.testing.assert_array_equal(target, base)


def test_a_refused_delta_does_not_even_bring_the_target_up() -> None:
    base, new, payload = CASES[2]
    behind = delta.apply(payload, base.copy())
    assert behind is not None
    target = base.copy()
    with pytest.raises(delta.CorruptDelta):
        delta.apply(payload[:-1], target, behind=behind)
    with pytest.raises(ValueError, match="range of 40001 bytes"):
        delta.apply(HEADER.pack(1, 2, 1, 1, 10, *[0] * 7), target[:10], behind=behind)
    np.testing.assert_array_equal(target, base)
    unchanged = delta.encode(new, new.copy(), 2, 1 << 20)
    assert unchanged is not None
    delta.apply(unchanged, target, behind=behind)
    np.testing.assert_array_equal(target, new)


def test_marks_behind_the_end_of_the_range_are_refused() -> None:
    base = np.zeros(20, np.uint8)
    bitmap = b"\0\x04"  # the mark of value 10, of 10
    payload = HEADER.pack(1, 2, 3, 2, 20, 1, 1, 0, 2, 0, 1, 0) + bitmap + b"\1"
    with pytest.raises(delta.CorruptDelta, match="within 10"):
        delta.apply(payload, base)
    assert not base.any()


def test_a_zstd_bomb_is_refused_before_it_is_unpacked() -> None:
    base = CASES[0][0]
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    assert len(bomb) < 19_000
    payload = _made([bomb, b"", b"\1" * 19_000, b""], count=19_000, narrow=19_000)
    tracemalloc.start()
    try:
        with pytest.raises(delta.CorruptDelta, match="unpacks to 268435456 bytes"):
            delta.apply(payload, base.copy())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_hides_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"\1" * 10_000)
    payload = _made([frame, b"", b"\1" * 10_000, b""], count=10_000, narrow=10_000)
    with pytest.raises(delta.CorruptDelta, match="unpacks to -1 bytes"):
        delta.apply(payload, CASES[0][0].copy())


def test_a_damaged_delta_is_a_corrupt_chunk_to_those_who_catch_that() -> None:
    assert issubclass(delta.CorruptDelta, CorruptChunk)
