"""Cutting, copying and refusing selections, against byte-by-byte oracles."""

import time

import numpy as np
import pytest
from dcs.errors import ProtocolError
from dcs.plan import blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The same examples everywhere, and no clock: the machine may be busy.
steady = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

row = st.tuples(
    st.integers(0, 300), st.integers(0, 40), st.sampled_from([1, 2, 3, 8, 63, 200, 700]), st.integers(1, 9)
).map(lambda found: (found[0], found[2] + found[1], found[2], found[3]))
selections = st.lists(row, max_size=12).map(lambda rows: np.array(rows, np.int64).reshape(-1, 4))
MEMORY = np.random.default_rng(0).integers(0, 256, 8192, dtype=np.uint8)


def indices(selection: np.ndarray) -> np.ndarray:
    """Every selected byte's address, in packed order."""
    found = [np.empty(0, np.int64)]
    for start, stride, run, count in selection.tolist():
        found += [np.arange(start + k * stride, start + k * stride + run) for k in range(count)]
    return np.concatenate(found)


@steady
@given(selections, st.integers(1, 900))
def test_chunks_are_the_selection_in_order_none_empty_none_too_large(selection, chunk_bytes):
    chunks = blocks.cut(selection, chunk_bytes)
    assert all(0 < blocks.nbytes(chunk) <= chunk_bytes for chunk in chunks)
    joined = np.concatenate([indices(chunk) for chunk in chunks]) if chunks else np.empty(0, np.int64)
    assert np.array_equal(joined, indices(selection))
    for chunk in chunks:
        blocks.check(chunk, MEMORY.nbytes)


@steady
@given(selections, selections, st.integers(1, 900))
def test_both_sides_are_cut_alike(selection, other, chunk_bytes):
    rows = min(len(selection), len(other))
    other = np.column_stack((other[:rows, :1], other[:rows, 1:2] + 700, selection[:rows, 2:]))
    for left, right in zip(
        blocks.cut(selection[:rows], chunk_bytes), blocks.cut(other, chunk_bytes), strict=True
    ):
        assert np.array_equal(left[:, 2:], right[:, 2:])


@steady
@given(selections, st.integers(1, 900))
def test_chunks_are_as_full_as_they_get_without_tearing_short_runs(selection, chunk_bytes):
    chunks = blocks.cut(selection, chunk_bytes)
    whole = np.repeat(selection[:, 2], selection[:, 3]).tolist()
    split = blocks.SPLIT if chunk_bytes >= blocks.SPLIT else 1
    expected: list[int] = []
    for length in whole:  # the greedy rule, run by run
        room = chunk_bytes - expected[-1] if expected else 0
        if length <= chunk_bytes:
            if length > room:
                expected.append(0)
            expected[-1] += length
            continue
        done = 0
        while done < length:
            take = length - done if length - done <= room else (done + room) // split * split - done
            if take <= 0:
                expected.append(0)
            else:
                expected[-1] += take
                done += take
            room = chunk_bytes - expected[-1]
    assert [blocks.nbytes(chunk) for chunk in chunks] == expected


@steady
@given(selections)
def test_gather_packs_and_scatter_puts_back(selection):
    wanted = indices(selection)
    out = np.zeros(len(wanted) + 3, np.uint8)
    assert blocks.gather(selection, MEMORY, out) == len(wanted)
    assert np.array_equal(out[: len(wanted)], MEMORY[wanted])
    assert not out[len(wanted) :].any()

    target = np.zeros_like(MEMORY)
    blocks.scatter(selection, target, out[: len(wanted)])
    expected = np.zeros_like(MEMORY)
    expected[wanted] = MEMORY[wanted]
    assert np.array_equal(target, expected)


@steady
@given(selections, st.integers(0, 60))
def test_spans_are_the_same_bytes_and_none_when_there_are_more_than_the_limit(selection, limit):
    wanted = indices(selection)
    exact = int(np.count_nonzero(np.diff(wanted) != 1)) + 1 if len(wanted) else 0
    found = blocks.spans(selection, limit)
    if exact > limit:
        assert found is None
        return
    assert found is not None
    assert len(found) == exact
    joined = [np.arange(start, start + length) for start, length in found]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *joined]), wanted)


@steady
@given(st.lists(st.tuples(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 4), min_size=1, max_size=4))
def test_rows_of_any_numbers_are_refused_or_lie_within_the_memory(rows):
    selection = np.array(rows, np.int64)
    inside = all(
        start >= 0 and run >= 1 and count >= 1 and stride >= 0 and start + (count - 1) * stride + run <= 8192
        for start, stride, run, count in rows
    )
    with np.errstate(all="raise"):
        if not inside:
            with pytest.raises(ProtocolError):
                blocks.check(selection, 8192)
        else:
            blocks.check(selection, 8192)


@steady
@given(selections, st.integers(0, 9000))
def test_a_selection_is_served_exactly_when_it_fits(selection, size):
    wanted = indices(selection)
    if len(wanted) == 0 or (wanted.max() < size and len(wanted) <= blocks.REPEATS * size):
        blocks.check(selection, size)
    else:
        with pytest.raises(ProtocolError):
            blocks.check(selection, size)


@pytest.mark.parametrize(
    "hostile",
    [
        np.zeros((1, 5), np.int64),
        np.zeros(4, np.int64),
        np.zeros((1, 4), np.float64),
        np.array([[0, 0, 0, 1]]),
        np.array([[0, 1, 1, 0]]),
        np.array([[-1, 1, 1, 1]]),
        np.array([[0, -8, 4, 2]]),
        np.array([[0, 3, 4, 2]]),  # overlapping runs
        np.array([[4090, 8, 8, 1]]),
        np.array([[0, 1 << 62, 4, 5]]),  # wraps around to 4
        np.array([[0, 4, 4, 1 << 62]]),  # RUN * COUNT wraps around to 0
        np.array([[(1 << 63) - 1, 1, 1, 1]]),
        np.array([[0, 0, 1, (1 << 63) - 1]]),
        np.repeat([[0, 4096, 4096, 1]], blocks.REPEATS + 1, axis=0),
        np.repeat([[0, 1, 1, 1]], blocks.MAX_ROWS + 1, axis=0),
    ],
)
def test_hostile_selections_are_refused_by_name(hostile):
    with np.errstate(all="raise"), pytest.raises(ProtocolError, match="selection"):
        blocks.check(hostile, 4096)


def test_the_sum_of_many_rows_cannot_wrap_around():
    size = 1 << 60
    with pytest.raises(ProtocolError, match=str(size * 80)):
        blocks.check(np.repeat([[0, size, size, 1]], 80, axis=0), size)


@pytest.mark.parametrize("bad", [[4090, 8, 8, 1], [0, 4096, 1, 3], [-1, 1, 1, 1], [0, 4096, 600, 2]])
def test_copies_never_leave_the_memory(bad):
    selection = np.array([bad], np.int64)
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match="do not lie within 4096"):
        blocks.gather(selection, memory, np.zeros(4096, np.uint8))
    with pytest.raises(ValueError, match="do not lie within 4096"):
        blocks.scatter(selection, memory, np.zeros(blocks.nbytes(selection), np.uint8))


def test_packed_bytes_of_another_length_are_refused():
    selection = blocks.source_side(blocks.identity(8))
    with pytest.raises(ValueError, match="9 packed bytes for a selection of 8"):
        blocks.scatter(selection, np.zeros(8, np.uint8), np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="7 packed"):
        blocks.gather(selection, np.zeros(8, np.uint8), np.zeros(7, np.uint8))


def test_identity_is_one_row_and_cut_at_multiples_of_the_chunk():
    assert len(blocks.identity(0)) == 0
    assert blocks.cut(blocks.source_side(blocks.identity(0)), 64) == []
    chunks = blocks.cut(blocks.source_side(blocks.identity(10_000)), 4096)
    assert [chunk.tolist() for chunk in chunks] == [
        [[0, 4096, 4096, 1]],
        [[4096, 4096, 4096, 1]],
        [[8192, 1808, 1808, 1]],
    ]
    with pytest.raises(ValueError, match="chunk_bytes is 0"):
        blocks.cut(chunks[0], 0)


def test_a_hundred_thousand_rows_are_cut_and_checked_without_a_loop_over_them():
    count = 100_000
    generator = np.random.default_rng(1)
    run = generator.integers(1, 5000, count)
    many = generator.integers(1, 40, count)
    start = np.cumsum(run * many * 2)
    selection = np.column_stack((start, run * 2, run, many))
    began = time.process_time()
    blocks.check(selection, int(start[-1]) + 1_000_000)
    chunks = blocks.cut(selection, 1 << 20)
    assert time.process_time() - began < 2.0  # 0.07 on an idle machine; a loop takes seconds
    assert sum(blocks.nbytes(chunk) for chunk in chunks) == blocks.nbytes(selection)
