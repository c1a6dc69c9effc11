"""Requests over UCX on loopback. Most of it needs ucxx (the extra `ucx`) and is skipped without it."""

import asyncio
import gc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transferqueue.errors import (
    Closed,
    Corrupt,
    InvalidArgument,
    Malformed,
    StorageLost,
    TooLarge,
    UnknownSample,
)
from transferqueue.errors import Timeout as DeadlinePassed
from transferqueue.transport import ucx, ucx_connection
from transferqueue.transport.receive_buffers import ReceiveBuffers
from transferqueue.transport.ucx_connection import layout, pieces

needs_ucx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="ucxx is not installed; pip install relax-transferqueue[ucx]",
)
MIB = 1 << 20
TOKEN = "the token of these tests"


def test_probe_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = ucx.probe()
    assert reason is not None
    assert reason.why == "ucxx is not installed; pip install relax-transferqueue[ucx]"


@pytest.mark.parametrize(
    ("init", "lib", "expected"),
    [
        ("raise ImportError('libucp.so.0: no such file')", "", "ImportError: libucp.so.0: no such file"),
        ("raise RuntimeError('UCX 1.2 is too old')", "", "RuntimeError: UCX 1.2 is too old"),
        ("", "class UCXContext: pass", "AttributeError"),
        (
            "",
            """
            class UCXError(Exception): pass
            class UCXContext:
                def __init__(self, config): raise UCXError("no usable transports")
            class UCXWorker: pass
            class UCXListener: pass
            class UCXEndpoint: pass
            """,
            "UCX does not start here: UCXError: no usable transports",
        ),
    ],
)
def test_probe_gives_the_reason_why_ucx_does_not_work(
    init: str, lib: str, expected: str, tmp_path: Path
) -> None:
    package = tmp_path / "ucxx" / "_lib"
    package.mkdir(parents=True)
    (tmp_path / "ucxx" / "__init__.py").write_text(init)
    (package / "__init__.py").write_text("")
    (package / "libucxx.py").write_text(textwrap.dedent(lib))
    code = "from transferqueue.transport import ucx; print(ucx.probe().why)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert expected in done.stdout


def test_a_server_wants_a_token_since_it_listens_everywhere(arenas: Any) -> None:
    with pytest.raises(InvalidArgument, match="token"):
        ucx.UcxServer(arenas, token="")


@given(st.lists(st.integers(0, 3 * MIB) | st.integers(0, 2000), max_size=200))
def test_ranges_are_laid_out_aligned_and_travel_each_once_in_order(sizes: list[int]) -> None:
    ranges = [(1, 10, 10 + size) for size in sizes]
    starts, total = layout(ranges)
    ends = [*starts[1:], total] if starts else []
    for start, size, end in zip(starts, sizes, ends, strict=True):
        assert start % 64 == 0
        assert start + size <= end < start + size + 64
    cut = pieces(sizes)
    assert [at for first, last in cut for at in range(first, last)] == list(range(len(sizes)))
    for first, last in cut:
        assert last - first == 1 or sum(sizes[first:last]) <= 16 * MIB
    small_alone = [first for first, last in cut if last - first == 1 and sizes[first] < MIB]
    assert len(small_alone) <= 1 + sum(size >= MIB for size in sizes) + total // (8 * MIB)


@needs_ucx
@pytest.mark.parametrize("nbytes", [0, 1, 64, 1000, MIB - 1, MIB, 7 * MIB + 3, 33 * MIB])
def test_what_is_written_is_read_back(transport: ucx.UcxTransport, nbytes: int) -> None:
    block = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    transport.write(1, 7, 4096, 4096 + nbytes, block, timeout=30).result(40)
    [back] = transport.read([(7, 4096, 4096 + nbytes)], timeout=30).result(40)
    assert back.dtype == np.uint8
    assert np.array_equal(back, block)


@needs_ucx
def test_many_ranges_come_in_order_each_aligned(transport: ucx.UcxTransport, arenas: Any) -> None:
    whole = arenas.bytes[40 * MIB :]
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(0, 3000, 300).tolist(), 2 * MIB + 5, 0, 17, MIB]
    starts = [int(rng.integers(0, 20 * MIB)) for _ in sizes]
    ranges = [(7, 40 * MIB + at, 40 * MIB + at + size) for at, size in zip(starts, sizes, strict=True)]
    for at, size, got in zip(starts, sizes, transport.read(ranges, timeout=30).result(40), strict=True):
        assert np.array_equal(got, whole[at : at + size])
        assert not size or got.ctypes.data % 64 == 0


@needs_ucx
def test_threads_share_a_transport(transport: ucx.UcxTransport) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        at = number * 2 * MIB
        for turn in range(4):
            block = np.full(MIB + number, 16 * number + turn, np.uint8)
            transport.write(1, 7, at, at + len(block), block, timeout=60).result(80)
            [back] = transport.read([(7, at, at + len(block))], timeout=60).result(80)
            if not np.array_equal(back, block):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@needs_ucx
def test_the_memorys_refusal_is_the_clients_error(transport: ucx.UcxTransport) -> None:
    block = np.zeros(100, np.uint8)
    with pytest.raises(UnknownSample, match="no grant 99") as refused:
        transport.write(99, 7, 0, 100, block, timeout=30).result(40)
    assert refused.value.ids == [99]
    with pytest.raises(UnknownSample, match="grant 2 is over"):
        transport.write(2, 7, 0, 100, block, timeout=30).result(40)
    with pytest.raises(Corrupt, match="no bytes 5 to 10 of arena 8"):
        transport.read([(7, 0, 8), (8, 5, 10)], timeout=30).result(40)
    with pytest.raises(Malformed, match="ends before"):
        transport.read([(7, 0, 64), (7, 64, 0)], timeout=30).result(40)
    transport.ping(timeout=30).result(40)


@needs_ucx
def test_a_request_beyond_the_limit_is_refused(transport: ucx.UcxTransport) -> None:
    with pytest.raises(TooLarge, match=str(50 * MIB)) as refused:
        transport.read([(7, 0, 25 * MIB), (7, 0, 25 * MIB)], timeout=30).result(40)
    assert refused.value.limit == 48 * MIB


@needs_ucx
def test_a_block_must_fit_its_range(transport: ucx.UcxTransport) -> None:
    with pytest.raises(Malformed, match="100 bytes"):
        transport.write(1, 7, 0, 101, np.zeros(100, np.uint8), timeout=30)
    with pytest.raises(Malformed, match="float32"):
        transport.write(1, 7, 0, 100, np.zeros(25, np.float32), timeout=30)


@needs_ucx
def test_received_memory_is_reused_when_nobody_looks_at_it(
    unit: Any, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    pool = ReceiveBuffers()
    transport = ucx.UcxTransport("127.0.0.1", unit.port, token=TOKEN, buffers=pool)
    [got] = transport.read([(7, 0, 8 * MIB)], timeout=30).result(40)
    part = got[100:200]
    del got
    gc.collect()
    assert pool.idle_bytes == 0
    del part
    eventually(lambda: pool.idle_bytes == 8 * MIB)
    transport.close()
    assert pool.idle_bytes == 0


@needs_ucx
def test_a_stopped_unit_costs_the_deadline_and_serves_again_afterwards(own_unit: Any, arenas: Any) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN)
    transport.ping(timeout=30).result(40)
    os.kill(own_unit.process.pid, signal.SIGSTOP)
    try:
        before = time.monotonic()
        with pytest.raises(DeadlinePassed, match="in time"):
            transport.read([(7, 0, 8 * MIB)], timeout=1).result(30)
        assert time.monotonic() - before < 15
    finally:
        os.kill(own_unit.process.pid, signal.SIGCONT)
    [got] = transport.read([(7, 0, 8 * MIB)], timeout=30).result(40)
    assert np.array_equal(got, arenas.bytes[: 8 * MIB])
    transport.close()


@needs_ucx
def test_a_killed_unit_is_lost_and_its_successor_is_found(
    own_unit: Any, start_unit: Callable[[int], Any]
) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN, unit=5)
    transport.ping(timeout=30).result(40)
    own_unit.kill()
    with pytest.raises(StorageLost, match=r"storage unit 5 at 127\.0\.0\.1") as lost:
        transport.ping(timeout=30).result(40)
    assert lost.value.unit == 5
    successor = start_unit(own_unit.port)
    try:
        transport.ping(timeout=30).result(40)
        successor.kill()
        successor = start_unit(own_unit.port)
        transport.ping(timeout=30).result(40)  # over a connection that was in use, and is found broken
    finally:
        transport.close()
        successor.kill()


@needs_ucx
def test_nobody_listening_is_a_lost_unit_and_a_reason_for_probe() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    transport = ucx.UcxTransport("127.0.0.1", port, token=TOKEN)
    with pytest.raises(StorageLost, match=f"127.0.0.1:{port}"):
        transport.ping(timeout=20).result(60)
    transport.close()
    reason = ucx.probe("127.0.0.1", port, token=TOKEN)
    assert reason is not None
    assert f"127.0.0.1:{port}" in reason.why


@needs_ucx
def test_probe_finds_no_fault_with_a_unit_that_answers(unit: Any) -> None:
    assert ucx.probe() is None
    assert ucx.probe("127.0.0.1", unit.port, token=TOKEN) is None
    reason = ucx.probe("127.0.0.1", unit.port, token="wrong")
    assert reason is not None
    assert "refused the token" in reason.why


@needs_ucx
def test_close_ends_requests_and_threads_and_can_be_repeated(own_unit: Any) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN)
    transport.ping(timeout=30).result(40)
    os.kill(own_unit.process.pid, signal.SIGSTOP)
    pending = transport.read([(7, 0, MIB)], timeout=300)
    transport.close()
    transport.close()
    os.kill(own_unit.process.pid, signal.SIGCONT)
    assert pending.cancelled() or pending.exception(10) is not None
    with pytest.raises(Closed):
        transport.ping(timeout=1)


@needs_ucx
def test_a_port_that_is_taken_is_said(arenas: Any) -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as taken,
        pytest.raises(ucx.UcxUnusable, match="cannot listen"),
    ):
        ucx.UcxServer(arenas, token=TOKEN, port=taken.getsockname()[1])


@needs_ucx
def test_threads_end_with_the_last_user_and_start_again() -> None:
    code = """
    import os, threading
    from transferqueue.transport import ucx
    def threads(): return len(os.listdir("/proc/self/task"))
    assert ucx.probe() is None
    before, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one, other = [ucx.UcxTransport("127.0.0.1", 1, token="x") for _ in range(2)]
        one.close()
        assert threads() > before
        other.close()
        assert threads() == before, threading.enumerate()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


@needs_ucx
def test_a_program_that_forgets_to_close_ends_all_the_same(unit: Any) -> None:
    code = f"""
    from transferqueue.transport import ucx
    transport = ucx.UcxTransport("127.0.0.1", {unit.port}, token={TOKEN!r})
    transport.ping(timeout=30).result(40)
    waiting = transport.read([(7, 0, 1 << 20)], timeout=100)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_ucx
def test_a_forked_child_is_told_why_it_cannot_use_ucx(unit: Any) -> None:
    code = f"""
    import os
    from transferqueue.transport import ucx
    transport = ucx.UcxTransport("127.0.0.1", {unit.port}, token={TOKEN!r})
    transport.ping(timeout=30).result(40)
    child = os.fork()
    if not child:
        print(ucx.probe().why, flush=True)
        transport.close()
        os._exit(0)  # as multiprocessing's children do
    else:
        assert os.waitpid(child, 0)[1] == 0
        transport.ping(timeout=30).result(40)
        transport.close()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "forked" in done.stdout


@needs_ucx
def test_a_request_whose_connection_breaks_is_repeated_on_another(
    monkeypatch: pytest.MonkeyPatch, arenas: Any
) -> None:
    breaks = iter([True, True])
    answer = ucx.UcxServer._answer

    async def answer_later(self: Any, connection: Any) -> None:
        if next(breaks, False):
            await connection.hear(None)
            raise ucx_connection.Broken("as if the network had")
        await answer(self, connection)

    monkeypatch.setattr(ucx.UcxServer, "_answer", answer_later)
    server = ucx.UcxServer(arenas, token=TOKEN)
    transport = ucx.UcxTransport("127.0.0.1", server.port, token=TOKEN)
    block = np.full(2 * MIB, 9, np.uint8)
    transport.write(1, 7, 0, len(block), block, timeout=30).result(40)
    assert arenas.seen == [(1, 7, 0, len(block))]
    assert next(breaks, None) is None
    transport.close()
    server.close()


@needs_ucx
async def test_futures_can_be_awaited_and_cancelled(own_unit: Any) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN)
    await asyncio.wrap_future(transport.ping(timeout=30))
    os.kill(own_unit.process.pid, signal.SIGSTOP)
    waiting = asyncio.wrap_future(transport.read([(7, 0, MIB)], timeout=300))
    await asyncio.wait({waiting}, timeout=0.2)
    waiting.cancel()
    os.kill(own_unit.process.pid, signal.SIGCONT)
    [got] = await asyncio.wrap_future(transport.read([(7, 0, MIB)], timeout=30))
    assert len(got) == MIB
    await asyncio.to_thread(transport.close)
