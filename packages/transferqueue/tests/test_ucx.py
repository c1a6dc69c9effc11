"""UCX over loopback. Most of it needs ucxx (the extra `ucx`) and is skipped without it."""

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
from collections.abc import Callable, Iterator
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
    ProtocolMismatch,
    StorageLost,
    TooLarge,
    Unauthorized,
    UnknownSample,
)
from transferqueue.errors import Timeout as DeadlinePassed
from transferqueue.transport import ucx, ucx_connection
from transferqueue.transport.receive_buffers import ReceiveBuffers
from transferqueue.transport.ucx_connection import layout, pieces

os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_TLS", "tcp,self")

needs_ucx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="ucxx is not installed; pip install relax-transferqueue[ucx]",
)
MIB = 1 << 20
TOKEN = "the token of these tests"


class Arenas:
    """Memory with one arena, 7. Grant 1 is good, 2 ends before its bytes are there, any other is unknown."""

    def __init__(self) -> None:
        self.bytes = np.arange(16 * MIB, dtype=np.uint64).view(np.uint8)[: 64 * MIB].copy()
        self.seen: list[tuple[int, int, int, int]] = []
        self.refused: set[int] = set()

    def room(self, grant: int, arena: int, start: int, stop: int) -> np.ndarray:
        if grant not in (1, 2) or arena != 7 or grant in self.refused:
            raise UnknownSample(f"there is no grant {grant} in arena {arena}", ids=[grant])
        return self.bytes[start:stop]

    def written(self, grant: int, arena: int, start: int, stop: int) -> None:
        if grant == 2:
            raise UnknownSample("grant 2 is over", ids=[2])
        self.seen.append((grant, arena, start, stop))

    def bytes_of(self, arena: int, start: int, stop: int) -> np.ndarray:
        if arena != 7 or not 0 <= start <= stop <= len(self.bytes):
            raise Corrupt(f"there are no bytes {start} to {stop} of arena {arena}")
        return self.bytes[start:stop]


def serve(port: int) -> None:
    """The main function of the server's process: says its port, and serves until stdin ends."""
    server = ucx.UcxServer(Arenas(), token=TOKEN, port=port, max_bytes=48 * MIB)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()
    server.close()
    print("threads", [thread.name for thread in threading.enumerate()], flush=True)


class ServerProcess:
    """A storage unit's stand-in in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        code = f"import runpy; runpy.run_path({__file__!r})['serve']({port})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self) -> str:
        """What it says after an orderly close."""
        said, _ = self.process.communicate(timeout=60)
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def unit() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.kill()


@pytest.fixture
def own_unit() -> Iterator[ServerProcess]:
    """One that the test may stop or kill."""
    process = ServerProcess()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def transport(unit: ServerProcess) -> Iterator[ucx.UcxTransport]:
    one = ucx.UcxTransport("127.0.0.1", unit.port, token=TOKEN, unit=3)
    yield one
    one.close()


# -- everywhere ----------------------------------------------------------------------------------------------


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


def test_a_server_wants_a_token_since_it_listens_everywhere() -> None:
    with pytest.raises(InvalidArgument, match="token"):
        ucx.UcxServer(Arenas(), token="")


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


# -- with ucxx -----------------------------------------------------------------------------------------------


@needs_ucx
@pytest.mark.parametrize("nbytes", [0, 1, 64, 1000, MIB - 1, MIB, 7 * MIB + 3, 33 * MIB])
def test_what_is_written_is_read_back(transport: ucx.UcxTransport, nbytes: int) -> None:
    block = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    transport.write(1, 7, 4096, 4096 + nbytes, block, timeout=30).result(40)
    [back] = transport.read([(7, 4096, 4096 + nbytes)], timeout=30).result(40)
    assert back.dtype == np.uint8
    assert np.array_equal(back, block)


@needs_ucx
def test_many_ranges_come_in_order_each_aligned(transport: ucx.UcxTransport) -> None:
    whole = Arenas().bytes[40 * MIB :]
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
    unit: ServerProcess, eventually: Callable[[Callable[[], bool]], None]
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
def test_a_wrong_token_is_refused_and_others_are_not_disturbed(
    unit: ServerProcess, transport: ucx.UcxTransport
) -> None:
    for wrong in ("", "another", TOKEN + "x"):
        stranger = ucx.UcxTransport("127.0.0.1", unit.port, token=wrong)
        with pytest.raises(Unauthorized, match="token"):
            stranger.ping(timeout=30).result(40)
        stranger.close()
    transport.ping(timeout=30).result(40)


@needs_ucx
def test_a_server_that_does_not_know_the_token_gets_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets everyone in and sends the client's own proof back."""

    async def impostor(self: Any, token: str, until: float) -> None:
        mine, _ = self._hello()
        await self._stream_send(mine, until)
        theirs = await self._stream_receive(len(mine) + 32, until)
        await self._stream_send(theirs[-32:], until)

    monkeypatch.setattr(ucx_connection.Connection, "welcome", impostor)
    server = ucx.UcxServer(Arenas(), token="not the token")
    transport = ucx.UcxTransport("127.0.0.1", server.port, token=TOKEN)
    try:
        with pytest.raises(Unauthorized, match="did not prove"):
            transport.write(1, 7, 0, 100, np.zeros(100, np.uint8), timeout=20).result(40)
    finally:
        transport.close()
        server.close()


@needs_ucx
def test_a_client_that_skips_the_proof_gets_no_bytes(
    unit: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does as if all were well, and asks."""

    async def intrude(self: Any, token: str, until: float) -> None:
        theirs = await self._stream_receive(len(self._hello()[0]), until)
        mine, tag = self._hello()
        await self._stream_send(mine + b"?" * 32, until)
        self._set_tags(tag, int.from_bytes(theirs[-8:], "little"))

    monkeypatch.setattr(ucx_connection.Connection, "introduce", intrude)
    intruder = Writer(unit.port)
    try:
        with pytest.raises((ucx_connection.Broken, DeadlinePassed)):
            _ask(intruder)
    finally:
        intruder.transport.close()


def _ask(intruder: "Writer") -> None:
    intruder.tell(ucx_connection.ReadRequest([(7, 0, 100)], 5.0))
    intruder.hear(5)


@needs_ucx
def test_another_version_of_the_protocol_is_refused(
    unit: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_connection, "PROTOCOL", 2)
    transport = ucx.UcxTransport("127.0.0.1", unit.port, token=TOKEN)
    try:
        with pytest.raises(ProtocolMismatch, match="version 1") as refused:
            transport.ping(timeout=20).result(40)
        assert (refused.value.got, refused.value.expected) == (1, 2)
    finally:
        transport.close()


@needs_ucx
def test_bytes_that_are_no_ucx_disturb_nobody(own_unit: ServerProcess) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN)
    rng = np.random.default_rng(1)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", rng.bytes(100), bytes(1000), b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", own_unit.port), timeout=10) as stranger:
            stranger.sendall(data)
    transport.ping(timeout=30).result(40)
    transport.close()
    assert "threads ['MainThread']" in own_unit.end()


@needs_ucx
def test_a_stopped_unit_costs_the_deadline_and_serves_again_afterwards(own_unit: ServerProcess) -> None:
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
    assert np.array_equal(got, Arenas().bytes[: 8 * MIB])
    transport.close()


@needs_ucx
def test_a_killed_unit_is_lost_and_its_successor_is_found(own_unit: ServerProcess) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN, unit=5)
    transport.ping(timeout=30).result(40)
    own_unit.kill()
    with pytest.raises(StorageLost, match=r"storage unit 5 at 127\.0\.0\.1") as lost:
        transport.ping(timeout=30).result(40)
    assert lost.value.unit == 5
    successor = ServerProcess(own_unit.port)
    try:
        transport.ping(timeout=30).result(40)
        successor.kill()
        successor = ServerProcess(own_unit.port)
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
def test_probe_finds_no_fault_with_a_unit_that_answers(unit: ServerProcess) -> None:
    assert ucx.probe() is None
    assert ucx.probe("127.0.0.1", unit.port, token=TOKEN) is None
    reason = ucx.probe("127.0.0.1", unit.port, token="wrong")
    assert reason is not None
    assert "refused the token" in reason.why


@needs_ucx
def test_close_ends_requests_and_threads_and_can_be_repeated(own_unit: ServerProcess) -> None:
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
def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as taken,
        pytest.raises(ucx.UcxUnusable, match="cannot listen"),
    ):
        ucx.UcxServer(Arenas(), token=TOKEN, port=taken.getsockname()[1])


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
def test_a_program_that_forgets_to_close_ends_all_the_same(unit: ServerProcess) -> None:
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
def test_a_forked_child_is_told_why_it_cannot_use_ucx(unit: ServerProcess) -> None:
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
def test_a_request_whose_connection_breaks_is_repeated_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = iter([True, True])
    answer = ucx.UcxServer._answer

    async def answer_later(self: Any, connection: Any) -> None:
        if next(breaks, False):
            await connection.hear(None)
            raise ucx_connection.Broken("as if the network had")
        await answer(self, connection)

    monkeypatch.setattr(ucx.UcxServer, "_answer", answer_later)
    arenas = Arenas()
    server = ucx.UcxServer(arenas, token=TOKEN)
    transport = ucx.UcxTransport("127.0.0.1", server.port, token=TOKEN)
    block = np.full(2 * MIB, 9, np.uint8)
    transport.write(1, 7, 0, len(block), block, timeout=30).result(40)
    assert arenas.seen == [(1, 7, 0, len(block))]
    assert next(breaks, None) is None
    transport.close()
    server.close()


# -- a writer that misbehaves --------------------------------------------------------------------------------


class Writer:
    """A client that has proved the token and then does as the test says."""

    def __init__(self, port: int) -> None:
        self.transport = ucx.UcxTransport("127.0.0.1", port, token=TOKEN)
        self.runtime = self.transport._runtime
        self.connection = self.do(lambda: self.transport._connection(self.until()))

    def until(self) -> float:
        return self.runtime.loop.time() + 30

    def do(self, work: Callable[[], Any]) -> Any:
        return self.runtime.submit(work()).result(40)

    def tell(self, message: Any) -> None:
        self.do(lambda: self.connection.tell(message, self.until()))

    def hear(self, seconds: float = 30) -> Any:
        return self.do(lambda: self.connection.hear(self.runtime.loop.time() + seconds))

    def send(self, data: bytes) -> None:
        self.do(lambda: self.connection.send(np.frombuffer(data, np.uint8), self.until()))


def _finish_the_write(writer: Writer, nbytes: int) -> None:
    writer.send(bytes(nbytes))
    writer.tell(ucx_connection.Checksum(0))
    writer.hear()


@pytest.fixture
def served() -> Iterator[tuple[ucx.UcxServer, Arenas, Writer]]:
    """A server in this process, and a writer connected to it."""
    arenas = Arenas()
    server = ucx.UcxServer(arenas, token=TOKEN)
    writer = Writer(server.port)
    yield server, arenas, writer
    writer.transport.close()
    server.close()


@needs_ucx
def test_bytes_that_do_not_match_their_checksum_are_not_reported_written(
    served: tuple[ucx.UcxServer, Arenas, Writer],
) -> None:
    _, arenas, writer = served
    writer.tell(ucx_connection.WriteRequest(1, 7, 0, 3 * MIB, 20.0))
    assert isinstance(writer.hear(), ucx_connection.Go)
    writer.send(bytes(3 * MIB))
    writer.tell(ucx_connection.Checksum(1))
    refused = writer.hear()
    assert (refused.kind, arenas.seen) == ("Corrupt", [])


@needs_ucx
def test_a_writer_that_stalls_is_cut_off_when_its_grant_ends(
    served: tuple[ucx.UcxServer, Arenas, Writer],
) -> None:
    server, arenas, writer = served
    writer.tell(ucx_connection.WriteRequest(1, 7, 0, 3 * MIB, 300.0))
    assert isinstance(writer.hear(), ucx_connection.Go)
    arenas.refused.add(1)
    server.revoke(1, timeout=20)
    server.revoke(1, timeout=20)
    held = arenas.bytes[: 3 * MIB].copy()
    with pytest.raises((ucx_connection.Broken, DeadlinePassed)):
        _finish_the_write(writer, 3 * MIB)
    assert np.array_equal(arenas.bytes[: 3 * MIB], held)
    assert not arenas.seen


@needs_ucx
def test_a_writer_that_stalls_is_cut_off_at_its_own_deadline(
    served: tuple[ucx.UcxServer, Arenas, Writer],
) -> None:
    server, arenas, writer = served
    writer.tell(ucx_connection.WriteRequest(1, 7, 0, 3 * MIB, 0.2))
    assert isinstance(writer.hear(), ucx_connection.Go)
    with pytest.raises(ucx_connection.Broken):
        writer.hear()
    assert not server._writing
    assert not arenas.seen


@needs_ucx
@pytest.mark.parametrize("size", [0, ucx_connection.MAX_BODY + 1, 1 << 63, 3])
def test_a_message_that_is_none_ends_its_connection_only(
    served: tuple[ucx.UcxServer, Arenas, Writer], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    server, _, writer = served
    writer.send(size.to_bytes(8, "little") + b"\xc1" * 504)
    with pytest.raises(ucx_connection.Broken):
        writer.hear()
    assert f"Malformed: a message of {size} bytes" in caplog.text or size == 3
    other = ucx.UcxTransport("127.0.0.1", server.port, token=TOKEN)
    other.ping(timeout=30).result(40)
    other.close()


@needs_ucx
async def test_futures_can_be_awaited_and_cancelled(own_unit: ServerProcess) -> None:
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
