"""A block in an arena: prologue, description, frame; stale and damaged ones are refused."""

import numpy as np
import pytest
import transferqueue as tq
from hypothesis import given, settings
from hypothesis import strategies as st
from transferqueue.values import frame
from transferqueue.values.block import (
    PROLOGUE_BYTES,
    block_nbytes,
    frame_start,
    is_checked,
    read_block,
    write_block,
)
from transferqueue.values.encode import plan_fields

FIELDS = {"tokens": [np.arange(5), None, np.arange(3)], "reward": [0.5, 1.5, 2.5], "text": ["a", "b", None]}


def arena(nbytes: int) -> np.ndarray:
    """Memory as an arena has it: dirty, at a page's start."""
    room = np.full(nbytes + 4096, 0xAA, np.uint8)
    return room[-room.ctypes.data % 4096 :][:nbytes]


def written(grant: int = 7, *, checksum: bool = True) -> np.ndarray:
    rows, plans = plan_fields(FIELDS)
    layout = block_nbytes(frame.layout(rows, plans))
    out = arena(layout.nbytes)
    write_block(out, grant, layout, plans, checksum=checksum)
    return out


@pytest.mark.parametrize("checksum", [True, False])
def test_a_block_comes_back_as_views_of_its_memory(checksum: bool) -> None:
    memory = written(checksum=checksum)
    header, payload = read_block(memory, 7, "arena 0 at 0")
    assert is_checked(memory) is checksum
    assert bool(header.checksum) is checksum
    columns = frame.decode(header, payload, verify=checksum)
    assert all(np.shares_memory(column.values, memory) for column in columns.values())
    assert columns["text"].tolist() == ["a", "b", None]
    assert columns["reward"].tolist() == [0.5, 1.5, 2.5]
    assert columns["tokens"][2].tolist() == [0, 1, 2]


def test_nothing_of_the_dirty_memory_stays() -> None:
    rows, plans = plan_fields(FIELDS)
    layout = block_nbytes(frame.layout(rows, plans))
    memories = []
    for dirt in (0x00, 0xAA):
        memory = arena(layout.nbytes)
        memory[:] = dirt
        write_block(memory, 7, layout, plans, checksum=True)
        memories.append(memory.tobytes())
    assert memories[0] == memories[1]
    assert layout.nbytes % 64 == 0
    assert layout.frame_nbytes == frame.layout(rows, plans).nbytes


def test_a_stale_handle_finds_another_grant_or_none() -> None:
    memory = written(7)
    with pytest.raises(tq.UnknownSample, match="arena 3 at 4096"):
        read_block(memory, 8, "arena 3 at 4096")
    memory[:8] = 0
    with pytest.raises(tq.UnknownSample, match="freed"):
        read_block(memory, 7, "arena 3 at 4096")


def test_a_block_needs_its_size_and_alignment() -> None:
    rows, plans = plan_fields(FIELDS)
    layout = block_nbytes(frame.layout(rows, plans))
    for out in (arena(layout.nbytes + 64), arena(layout.nbytes + 8)[8:]):
        with pytest.raises(tq.InvalidArgument, match="multiple of 64"):
            write_block(out, 7, layout, plans, checksum=False)


def test_the_prologue_alone_tells_where_the_frame_begins() -> None:
    memory = written()
    _, payload = read_block(memory, 7, "here")
    assert frame_start(memory) == payload.ctypes.data - memory.ctypes.data
    assert frame_start(memory) % 64 == 0
    with pytest.raises(tq.Corrupt, match="too few"):
        frame_start(memory[: PROLOGUE_BYTES - 1])
    memory[24:32] = 255
    assert frame_start(memory) == 0  # a false size stays within the block


@settings(deadline=None)
@given(st.data())
def test_a_damaged_block_is_refused(data: st.DataObject) -> None:
    """Any byte changed, any size claimed: an error of ours, or exactly what was written."""
    memory = written()
    before = [column.tolist() for column in decoded(memory).values()]
    at = data.draw(st.integers(0, len(memory) - 1) | st.integers(0, 200))
    memory[at] ^= data.draw(st.integers(1, 255))
    stop = data.draw(st.just(len(memory)) | st.integers(0, len(memory)))
    try:
        after = [column.tolist() for column in decoded(memory[:stop]).values()]
    except (tq.Corrupt, tq.UnknownSample):
        return
    assert len(after) == len(before)  # a byte of a name, a flag or the padding


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(raw: bytes) -> None:
    memory = np.frombuffer(raw, np.uint8)
    with pytest.raises((tq.Corrupt, tq.UnknownSample)):
        decoded(memory)
    prologue = written()[:16].tobytes()  # with the right magic and grant
    with pytest.raises(tq.Corrupt):
        decoded(np.frombuffer(prologue + raw, np.uint8))


def decoded(memory: np.ndarray) -> dict[str, tq.Column]:
    header, payload = read_block(memory, 7, "here")
    return frame.decode(header, payload)
