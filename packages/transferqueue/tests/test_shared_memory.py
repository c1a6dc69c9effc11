"""Memory is never given to two, is kept for as long as anybody looks at it, and comes back afterwards."""

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import transferqueue as tq
from transferqueue.wire.messages import (
    Goodbye,
    Granted,
    Locate,
    Located,
    Read,
    Reserve,
)

Eventually = Callable[[Callable[[], bool]], None]


def filled(value: int, rows: int = 4, length: int = 20_000) -> dict[str, list[np.ndarray]]:
    """Rows of 160 KB of one number each: several rows get memory of their own."""
    return {"x": [np.full(length, value + row, np.int64) for row in range(rows)]}


def rows_of(rows: int) -> dict[str, list[np.ndarray]]:
    return {"x": [np.arange(2)] * rows}


def hammer(part: tq.Partition, times: int) -> None:
    """Puts, takes and acks so much that freed memory is written again."""
    for number in range(times):
        part.put(filled(1_000_000 + number))
        part.put({"x": [np.full(7, -number)] * 3})
        part.fetch("t", 7, timeout=20).ack()


def is_filled(rows: Any, value: int) -> bool:
    return all(np.array_equal(row, np.full(20_000, value + at)) for at, row in enumerate(rows))


def test_views_keep_their_bytes_after_ack_lapse_drop_and_the_end_of_their_client(
    store: tq.Server, name: str, eventually: Eventually
) -> None:
    with tq.connect(store) as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        reader = tq.connect(store, transport="shm")
        theirs = reader.partition(name)
        views: list[Any] = []
        part.put(filled(100))
        batch = theirs.fetch("t", 4, timeout=20)
        batch.ack()
        views.append(batch["x"])
        part.put(filled(200))
        views.append([np.asarray(row)[:] for row in theirs.fetch("t", 4, lease_seconds=0.1, timeout=20)["x"]])
        part.fetch("t", 4, timeout=20).ack()
        ids = part.put(filled(300))
        views.append(list(theirs.get(ids, ["x"])["x"]))
        part.drop(ids, "bad")
        part.put({"x": [np.full(5, value) for value in range(400, 404)]})
        small = theirs.fetch("t", 4, timeout=20)
        small.ack()
        tiny = [row for row in small["x"]]  # views, not the batch
        del batch, small, theirs
        hammer(part, 10)
        reader.close()
        with pytest.raises(tq.QueueError, match="closed"):
            reader.stats()
        del reader
        gc.collect()
        hammer(part, 30)
        assert queue.stats().memory.pinned_only >= 3 * 4 * 160_000
        assert [is_filled(rows, value) for value, rows in zip((100, 200, 300), views, strict=True)] == [
            True
        ] * 3
        assert [row.tolist() for row in tiny] == [[value] * 5 for value in range(400, 404)]
        for _ in range(3):
            views.pop()
            gc.collect()
        tiny.clear()
        eventually(lambda: queue.stats().memory.pinned_only == 0)
        assert queue.stats().clients == 1


async def test_views_of_an_async_client_outlive_it_too(
    store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put(filled(100))
    async with await tq.connect_async(store, transport="shm") as reader:
        batch = await (await reader.partition(name)).fetch("t", 4, timeout=20)
        await batch.ack()
        rows = list(batch["x"])
        del batch
    hammer(part, 20)
    assert is_filled(rows, 100)
    assert queue.stats().memory.pinned_only > 0
    rows.clear()
    eventually(lambda: queue.stats().memory.pinned_only == 0)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_an_error_keeps_nothing_alive_that_its_caller_looks_at(
    transport: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    """It would, for a garbage collection long, if it and what it ended held each other."""
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put(filled(100))

    def look(theirs: tq.Partition) -> "weakref.ref[Any]":
        rows = theirs.get(ids)["x"].values
        for call in (
            lambda: theirs.get([1 << 62]),
            lambda: theirs.fetch("t", 5, timeout=0),
            lambda: theirs.put({"x": ["text"]}),
        ):
            with pytest.raises(tq.QueueError):
                call()
        return weakref.ref(rows)

    with tq.connect(store, transport=transport) as other:
        theirs = other.partition(name)
        gc.collect()
        gc.disable()
        try:
            rows = look(theirs)
            eventually(lambda: rows() is None)  # the thread that brought the error may not have let go yet
        finally:
            gc.enable()


READER = """
import os, sys, time, numpy as np, transferqueue as tq
queue = tq.connect(sys.argv[1], transport="shm")
rows = list(queue.partition(sys.argv[2]).get([int(i) for i in sys.argv[3].split(",")], ["x"])["x"])
print("reading", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("ending", ["last view", "kill", "stop and kill"])
def test_memory_comes_back_when_its_reader_is_gone(
    ending: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put(filled(100))
    with subprocess.Popen(
        [sys.executable, "-c", READER, store.address, name, ",".join(map(str, ids))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        part.fetch("t", 4).ack()
        eventually(lambda: 4 * 160_000 <= queue.stats().memory.pinned_only < 5 * 160_000)
        if ending == "stop and kill":
            reader.send_signal(signal.SIGSTOP)
            hammer(part, 5)
            assert queue.stats().memory.pinned_only >= 4 * 160_000
        if ending == "last view":
            reader.communicate(b"\n", timeout=20)
        else:
            reader.kill()
        eventually(lambda: queue.stats().memory.pinned_only == 0)


def test_the_last_view_of_a_living_reader_gives_memory_back(
    store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    with tq.connect(store, transport="shm") as reader:
        part, theirs = queue.partition(name, tasks={"t": ["x"]}), reader.partition(name, tasks={"t": ["x"]})
        part.put(filled(100, rows=10))
        batch = theirs.fetch("t", 10)
        batch.ack()
        row = batch["x"][3][5:6]
        del batch
        gc.collect()
        assert queue.stats().memory.pinned_only > 0
        assert row.tolist() == [103]
        del row
        eventually(lambda: queue.stats().memory.pinned_only == 0)  # with nothing more asked by the reader


PRODUCER = """
import os, signal, sys, numpy as np, transferqueue as tq
from transferqueue.values import block
from transferqueue.client import calls
queue = tq.connect(sys.argv[1], transport=sys.argv[2])
part = queue.partition(sys.argv[3])
part.put({"x": [np.arange(2)] * 3})
write = calls.write_block
def stop(out, *arguments, **named):
    out[:100] = 1
    print("granted", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    write(out, *arguments, **named)
calls.write_block = stop
big = {"x": [np.full(20_000, 7)] * 4} if sys.argv[4] == "big" else {"x": [np.arange(2)] * 3}
try:
    part.put(big, timeout=0.5)
except tq.QueueError as error:
    print(type(error).__name__, flush=True)
else:
    print("done", flush=True)
sys.stdin.readline()
"""


@contextmanager
def stopped_producer(store: tq.Server, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A producer that stopped itself between grant and commit."""
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, store.address, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as producer:
        try:
            assert producer.stdout is not None
            assert producer.stdout.readline() == "granted\n"
            os.waitid(os.P_PID, producer.pid, os.WSTOPPED | os.WNOWAIT)
            yield producer
        finally:
            producer.kill()


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        ("shm", "small"),
        ("shm", "big"),
        pytest.param("zmq", "small", marks=pytest.mark.slow),  # it is looked for every two seconds
        pytest.param("zmq", "big", marks=pytest.mark.slow),
    ],
)
def test_a_producer_killed_between_grant_and_commit_leaves_nothing(
    transport: str, size: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=10)
    part.put(rows_of(3))  # this client has its slab
    before = queue.stats().memory
    with stopped_producer(store, transport, name, size) as producer:
        assert queue.stats().memory.granted > before.granted
        producer.kill()
        eventually(lambda: queue.stats().memory.granted == before.granted)
    stats = queue.stats().partitions[name]
    assert stats.samples == 6
    part.put(rows_of(4), timeout=0)


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_producer_that_was_stopped_past_its_deadline_writes_into_nobodys_memory(
    transport: str, store: tq.Server, queue: tq.Client, name: str
) -> None:
    """Its room goes to others in time; on the store's host the memory stays its own until it wakes."""
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=8)
    with stopped_producer(store, transport, name, "big") as producer:
        part.fetch("t", 3, timeout=20).ack()
        with pytest.raises(tq.Full):
            part.put(rows_of(8), timeout=0)
        part.put(rows_of(8), timeout=20)
        part.fetch("t", 8).ack()
        held = [part.put(filled(100 * number, rows=1)) for number in range(8)]
        producer.send_signal(signal.SIGCONT)
        assert producer.stdout is not None
        assert producer.stdout.readline() in ("Full\n", "Timeout\n", "InvalidArgument\n", "StorageLost\n")
        for number, ids in enumerate(held):
            assert is_filled(part.get(ids)["x"], 100 * number)
    assert part.ledger("t").pending == [int(i) for ids in held for i in ids]


def test_half_dead_blocks_are_compacted_while_readers_keep_what_they_hold(
    store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    base = queue.stats().memory.used
    ids = part.put(filled(0, rows=40))
    whole = queue.stats().memory.used - base
    with tq.connect(store, transport="shm") as reader:
        old = list(reader.partition(name).get(ids[:4], ["x"])["x"])
        for _ in range(9):
            part.fetch("t", 4).ack()
        eventually(lambda: queue.stats().memory.pinned_only == whole)  # all that is there has moved
        assert queue.stats().memory.used - base < 1.15 * whole
        assert is_filled(part.get(ids[36:])["x"], 36)
        more = [part.put(filled(1000 + number)) for number in range(10)]
        assert is_filled(old, 0)
        old.clear()
        eventually(lambda: queue.stats().memory.used - base < 1.15 * whole)
        assert is_filled(part.get(ids[36:])["x"], 36)
        for number, some in enumerate(more):
            assert is_filled(part.get(some)["x"], 1000 + number)


def test_a_stale_handle_is_refused(
    store: tq.Server,
    queue: tq.Client,
    name: str,
    speak: Callable[[str], Any],
    kind_of: Callable,
    eventually: Eventually,
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put(filled(0)).tolist()
    controller, unit = speak(store.address), speak(queue.stats().units[0].address)
    controller.hello()
    unit.hello()
    located = controller.ask(1, Locate(part._calls.number, ids, ["x"])).body
    assert isinstance(located, Located)
    part.fetch("t", 4).ack()
    assert not isinstance(unit.ask(1, Read(located.places, ["x"])).body, tq.QueueError)  # pinned
    controller.ask(2, Goodbye())
    eventually(lambda: queue.stats().memory.pinned_only == 0)
    hammer(part, 3)
    assert kind_of(unit.ask(2, Read(located.places, ["x"]))) in ("UnknownSample", "Corrupt")
    with pytest.raises(tq.UnknownSample):
        part.get(ids)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_slabs_are_given_back(
    transport: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    """Those that are full, one after the other, and the last with the client."""
    before = queue.stats().memory.granted
    with tq.connect(store, transport=transport) as producer:
        part = producer.partition(name, tasks={"t": ["x"]})
        for _ in range(60):
            part.put({"x": np.zeros((1, 15_000), np.int64)})
            part.fetch("t", 1).ack()
        eventually(lambda: queue.stats().memory.granted - before <= 2 << 20)
    eventually(lambda: queue.stats().memory.granted <= before)


def test_a_large_put_of_exactly_a_slab_is_no_slab(
    store: tq.Server, queue: tq.Client, name: str, speak_locally: Callable, block: Any
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    peer = speak_locally(store.local)
    peer.hello()
    before = queue.stats().memory.granted
    reserve = Reserve(part._calls.number, 3, 1 << 20, 24, block.spec, None, {}, None, False)
    granted = peer.ask(1, reserve).body
    assert isinstance(granted, Granted)
    assert queue.stats().memory.granted - before == 1 << 20
    peer.ask(2, block.commit(part._calls.number, block.place(granted.range), remote=False))
    assert queue.stats().memory.granted == before


def test_full_memory_is_told_and_recovers() -> None:
    """Where no arena can be made."""
    with tq.serve(1) as store, tq.connect(store) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        first = part.put(filled(0))

        def put_too_much() -> None:
            for _ in range(40):
                part.put(large, timeout=1)

        large = {"x": [np.zeros(1_000_000, np.int64)]}
        controller = psutil.Process(store.processes[0].pid)
        before = controller.rlimit(resource.RLIMIT_FSIZE)
        controller.rlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(tq.Full, match="no memory"):
                put_too_much()
        finally:
            controller.rlimit(resource.RLIMIT_FSIZE, before)
        count = queue.stats().partitions["p"].samples
        assert is_filled(part.get(first)["x"], 0)
        part.put(large, timeout=1)
        assert len(part.fetch("t", count + 1)) == count + 1


def grown(processes: list[psutil.Process], before: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [
        (now[0] - then[0], now[1] - then[1], now[2] - then[2])
        for now, then in zip(map(measured, processes), before, strict=True)
    ]


def measured(process: psutil.Process) -> tuple[int, int, int]:
    """Descriptors, threads, bytes of memory that is its own."""
    memory = process.memory_info()
    return process.num_fds(), process.num_threads(), memory.rss - memory.shared


VISITOR = """
import os, sys, numpy as np, transferqueue as tq
for number in range(int(sys.argv[3])):
    queue = tq.connect(sys.argv[1], transport=("shm", "zmq", "auto")[number % 3])
    part = queue.partition(sys.argv[2])
    ids = part.put({"x": np.arange(2)})
    rows = part.get(ids)["x"]
    part.fetch("t", 2, timeout=20).ack()
    if number % 2:
        queue.close()
    del queue, part, rows
print("done", flush=True)
queue = [tq.connect(sys.argv[1], transport=transport) for transport in ("shm", "zmq")]
held = [one.partition(sys.argv[2]) for one in queue]
for one in held:
    one.put({"x": np.arange(2)})
loans = [one.fetch("t", 1, lease_seconds=3) for one in held]
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "connects", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_clients_come_and_go_without_trace(connects: int, eventually: Eventually) -> None:
    """Some say goodbye, some are collected, some are killed."""
    rounds = 3
    with tq.serve(2) as store, tq.connect(store) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        processes = [psutil.Process(process.pid) for process in store.processes]

        def visit(count: int) -> None:
            visitor = subprocess.run(
                [sys.executable, "-c", VISITOR, store.address, "p", str(count)],
                stdout=subprocess.PIPE,
                timeout=1200,
                check=False,
            )
            assert (visitor.stdout, visitor.returncode) == (b"done\n", -signal.SIGKILL)

        visit(30)  # what is made once, is made now
        eventually(lambda: queue.stats().memory.pinned_only == 0)
        before = [measured(process) for process in processes]
        for _ in range(rounds):
            visit(connects // rounds)
        eventually(
            lambda: queue.stats().clients <= 1 + 1 + rounds
        )  # the killed remote ones are not known to be
        eventually(lambda: all(fds <= 2 and threads <= 0 for fds, threads, _ in grown(processes, before)))
        allowed = 3e6 + 300 * connects
        assert all(nbytes < allowed for _, _, nbytes in grown(processes, before)), grown(processes, before)
        eventually(lambda: len(part.ledger("t").leased) == 0)
        ledger = part.ledger("t")
        left = len(ledger.pending)
        assert left == 4 * (rounds + 1)
        assert len(part.fetch("t", left, timeout=20)) == left


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_parked_fetch_lets_nothing_grow_behind_it(transport: str, store: tq.Server, name: str) -> None:
    """Neither in the controller, which must not keep the answers of its client, nor in the client."""
    controller = psutil.Process(store.processes[0].pid)
    with tq.connect(store, transport=transport) as queue:
        part = queue.partition(name, tasks={"t": ["x"], "never": ["y"]})
        parked = threading.Thread(target=_parked, args=(part,))
        parked.start()
        keys = ["k" * 2_000 + str(row) for row in range(20)]
        sizes = dict.fromkeys(keys, 1)

        def turn(count: int) -> None:
            for _ in range(count):
                ids = part.put({"x": np.arange(20)}, groups=keys, group_sizes=sizes)
                part.fetch("t", 20).ack()
                part.drop(ids, "enough")

        turn(60)
        gc.collect()
        before, own = measured(controller)[2], measured(psutil.Process())[2]
        turn(200)  # answers of 40 KB each
        assert measured(controller)[2] - before < 5e6
        gc.collect()
        assert measured(psutil.Process())[2] - own < 4e6
    parked.join(20)
    assert not parked.is_alive()


def _parked(part: tq.Partition) -> None:
    with pytest.raises(tq.QueueError):
        part.fetch("never", 1, timeout=86_400)


def test_fetches_that_time_out_leave_nothing(store: tq.Server, queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    controller = psutil.Process(store.processes[0].pid)

    def turn(count: int) -> None:
        for _ in range(count):
            with pytest.raises(tq.Timeout):
                part.fetch("t", 1, timeout=0, fields=["x" * 3_000])

    turn(50)
    before = measured(controller)[2]
    turn(1_000)
    assert measured(controller)[2] - before < 1.5e6


def test_many_fetches_at_random_leave_no_byte_pinned(
    store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    """Batches held, dropped and gone in any order, by both transports."""
    rng = random.Random(7)
    clients = [tq.connect(store, transport=transport) for transport in ("shm", "shm", "zmq")]
    part = queue.partition(name, tasks={"t": ["x"]})
    parts = [client.partition(name) for client in clients]
    base = queue.stats().memory.used
    held: list[tuple[int, Any]] = []
    for number in range(150):
        ids = part.put(filled(number, rows=2, length=rng.choice([3, 20_000])))
        chosen = rng.choice(parts)
        batch = chosen.fetch("t", 2, timeout=20)
        held += [(number, batch["x"][0]), (number, chosen.get(ids)["x"][0])]
        batch.ack()
        del batch
        while len(held) > 20:
            value, row = held.pop(rng.randrange(len(held)))
            assert (row == value).all()
            del row
    assert [value for value, row in held if (row != value).any()] == []
    held.clear()
    for client in clients:
        client.close()
    eventually(lambda: queue.stats().memory.used == base)
    assert queue.stats().memory.pinned_only == 0
