import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from transferqueue.errors import InvalidArgument
from transferqueue.transport.receive_buffers import ReceiveBuffers

MIB = 1 << 20


@given(st.integers(0, 5 * MIB))
def test_a_buffer_has_the_size_asked_for_is_writable_and_aligned(nbytes: int) -> None:
    buffer = ReceiveBuffers().take(nbytes)
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == np.uint8
    assert not nbytes or buffer.ctypes.data % 64 == 0
    buffer[:] = 7
    assert int(buffer.sum(dtype=np.int64)) == 7 * nbytes


def test_memory_is_reused_when_the_last_view_is_gone() -> None:
    pool = ReceiveBuffers()
    buffer = pool.take(5 * MIB)
    at = buffer.ctypes.data
    assert at % (2 * MIB) == 0, "huge pages begin at their own multiple"
    del buffer
    assert pool.idle_bytes == 6 * MIB
    again = pool.take(5 * MIB - 1000)
    assert again.ctypes.data == at
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(
    "view_of",
    [
        lambda buffer: buffer[100:200],
        lambda buffer: buffer.view(np.int64)[3:].reshape(-1, 1),
        lambda buffer: memoryview(buffer)[5:6],
        lambda buffer: np.frombuffer(memoryview(buffer), np.float32),
        lambda buffer: [buffer[i : i + 1] for i in range(3)],
    ],
)
def test_any_view_keeps_the_memory_from_being_reused(view_of: Callable[[np.ndarray], object]) -> None:
    pool = ReceiveBuffers()
    buffer = pool.take(3 * MIB)
    at = buffer.ctypes.data
    view = view_of(buffer)
    del buffer
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take(3 * MIB)
    assert other.ctypes.data != at
    del view
    assert pool.idle_bytes == 4 * MIB


def test_a_message_that_is_not_sent_yet_keeps_the_memory(
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    pool = ReceiveBuffers()
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://here")
        other.connect("inproc://here")
        buffer = pool.take(MIB)
        buffer[:] = 9
        one.send(memoryview(buffer), copy=False)
        del buffer
        gc.collect()
        assert pool.idle_bytes == 0
        assert other.recv() == bytes([9]) * MIB
        eventually(lambda: pool.idle_bytes == MIB)


def test_a_much_larger_buffer_is_not_taken_for_a_small_one() -> None:
    pool = ReceiveBuffers()
    large = pool.take(64 * MIB)
    del large
    assert pool.idle_bytes == 64 * MIB
    small = pool.take(MIB)
    assert pool.idle_bytes == 64 * MIB
    assert len(small) == MIB


def test_the_best_fit_is_taken() -> None:
    pool = ReceiveBuffers()
    held = [pool.take(size * MIB) for size in (16, 8, 12)]
    addresses = [buffer.ctypes.data for buffer in held]
    held.clear()
    assert pool.take(8 * MIB).ctypes.data == addresses[1]


def test_what_is_idle_beyond_the_limit_is_given_back_the_oldest_first() -> None:
    pool = ReceiveBuffers(max_idle_bytes=20 * MIB)
    held = [pool.take(8 * MIB) for _ in range(3)]
    oldest = held[0].ctypes.data
    for _ in range(3):
        held.pop(0)
    assert pool.idle_bytes == 16 * MIB
    taken = [pool.take(8 * MIB) for _ in range(2)]
    assert oldest not in [buffer.ctypes.data for buffer in taken]
    assert pool.idle_bytes == 0


def test_resident_memory_shrinks_when_the_pool_closes_and_a_view_survives_it() -> None:
    pool = ReceiveBuffers()
    idle, used = pool.take(64 * MIB), pool.take(4 * MIB)
    idle[:] = 1
    used[:] = 2
    del idle
    before = _resident()
    pool.close()
    pool.close()
    assert before - _resident() > 60 * MIB
    assert int(used.sum(dtype=np.int64)) == 2 * 4 * MIB
    del used
    assert pool.idle_bytes == 0


def test_threads_never_share_a_buffer() -> None:
    pool = ReceiveBuffers(max_idle_bytes=8 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for turn in range(100):
            buffer = pool.take(MIB // 2 + turn * 1000)
            buffer[::4096] = mark
            if (buffer[::4096] != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert pool.idle_bytes <= 8 * MIB


def test_a_finalizer_that_runs_while_the_pool_is_locked_does_not_hang() -> None:
    pool = ReceiveBuffers()
    buffer = pool.take(MIB)
    with pool._lock:
        del buffer
    assert pool.idle_bytes == MIB


def test_the_pool_itself_can_go_before_its_buffers() -> None:
    pool = ReceiveBuffers()
    buffer = pool.take(MIB)
    gone = weakref.ref(pool)
    del pool
    buffer[:] = 3
    del buffer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("nbytes", [-1, -(1 << 40)])
def test_negative_sizes_are_refused(nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match=str(nbytes)):
        ReceiveBuffers().take(nbytes)
    with pytest.raises(InvalidArgument, match=str(nbytes)):
        ReceiveBuffers(nbytes)


_FAULTS = """
import ctypes, resource, sys
from transferqueue.transport.receive_buffers import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    keep_freed_memory()
def turn():
    blocks = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(1 << 20))) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="the thresholds are glibc's",
)
def test_freed_memory_is_kept_instead_of_faulted_in_again() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _FAULTS, mode], capture_output=True, text=True, timeout=60, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 500 < faults("plain")


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
