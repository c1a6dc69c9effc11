"""Processes that die or stand still at any stage, messages that are lost, come twice or late: every call ends
in time with the right error, and every sample is accounted for exactly.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
import zmq

Eventually = Callable[[Callable[[], bool]], None]


# -- clients that die or stop at every stage -----------------------------------------------------------------

FORKING = """
import gc, os, signal, sys, traceback
import numpy as np, transferqueue as tq
from transferqueue.wire import steps

address, name, transport = sys.argv[1:]

def main(operation, moment, nth, ending):
    part = tq.connect(address, transport=transport).partition(name)
    big = {"x": [np.full(20_000, 7)] * 3}
    small = {"x": [np.arange(2)] * 3}
    if operation in ("ack", "nack"):
        batch = part.fetch("t", 3, lease_seconds=2, timeout=20)
    if operation == "update":
        ids = [int(i) for i in part.ledger("late").pending][:3]
    told = [0]
    submit = steps._submit

    def reached(when):
        if when == moment and told[0] == nth:
            os.kill(os.getpid(), ending)

    def counted(channel, exchanges, pending):
        told[0] += 1
        reached("before")
        submit(channel, exchanges, pending)
        if moment == "sent":
            for one in pending:  # over ZeroMQ it is sent by another thread
                if hasattr(one, "future"):
                    while not one.id:
                        os.sched_yield()
        reached("sent")

    steps._submit = counted
    run = {
        "put": lambda: part.put(small, timeout=20),
        "big put": lambda: part.put(big, timeout=20),
        "update": lambda: part.update(ids, {"y": [np.arange(2)] * 3}, timeout=20),
        "fetch": lambda: part.fetch("t", 3, lease_seconds=2, timeout=20),
        "ack": lambda: batch.ack(),
        "nack": lambda: batch.nack(),
    }[operation]
    kept = run()
    if moment == "after":
        os.kill(os.getpid(), ending)

for line in sys.stdin:
    operation, moment, nth, ending = line.strip().split(",")
    child = os.fork()
    if not child:
        try:
            main(operation, moment, int(nth), int(ending))
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, os.WUNTRACED)
    print(status, flush=True)
    if os.WIFSTOPPED(status):
        sys.stdin.readline()
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)
"""


@contextmanager
def clients(store: tq.Server, name: str, transport: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that forks clients, each of which meets its end where a line says."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, store.address, name, transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as forking:
        try:
            yield forking
        finally:
            forking.kill()


def tell(forking: "subprocess.Popen[str]", line: str) -> int:
    assert forking.stdin is not None
    assert forking.stdout is not None
    forking.stdin.write(line + "\n")
    forking.stdout.readline()
    return int(forking.stdout.readline())


STAGES = [
    *((operation, "before", nth) for operation in ("put", "big put", "update") for nth in (1, 2)),
    *((operation, "sent", nth) for operation in ("put", "big put", "update") for nth in (1, 2)),
    *((operation, moment, 1) for operation in ("fetch", "ack", "nack") for moment in ("before", "sent")),
    *((operation, "after", 0) for operation in ("put", "big put", "update", "fetch", "ack", "nack")),
]


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_clients_killed_at_every_stage_leave_whole_puts_and_nothing_else(
    transport: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    part = queue.partition(name, tasks={"t": ["x"], "late": ["x", "y"]})
    part.put({"x": [np.arange(2)] * 3})
    base = queue.stats().memory.granted
    with clients(store, name, transport) as forking:
        for operation, moment, nth in STAGES:
            while len(part.ledger("t").pending) + len(part.ledger("t").leased) < 3:
                part.put({"x": [np.arange(2)] * 3})
            before = queue.stats().partitions[name].samples
            acked = len(part.ledger("t").acked)
            status = tell(forking, f"{operation},{moment},{nth},{int(signal.SIGKILL)}")
            assert os.WIFSIGNALED(status), (operation, moment, nth)
            put = queue.stats().partitions[name].samples - before
            done = len(part.ledger("t").acked) - acked
            assert put in (0, 3)
            assert done in (0, 3)
            if moment == "before" or (nth == 1 and operation in ("put", "big put")):
                assert (put, done) == (0, 0), (operation, moment, nth)
            if moment == "after":
                assert put == (3 if "put" in operation else 0)
                assert done == (3 if operation == "ack" else 0)
    eventually(lambda: part.ledger("t").leased == [])
    eventually(lambda: queue.stats().memory.granted == base)
    eventually(lambda: queue.stats().memory.pinned_only == 0)
    ledger = part.ledger("t")
    left = len(ledger.pending)
    assert left + len(ledger.acked) == queue.stats().partitions[name].samples
    batch = part.fetch("t", left, timeout=20)
    assert all(row.tolist() == [0, 1] or (row == 7).all() for row in batch["x"])
    batch.ack()


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_clients_stopped_and_continued_finish_or_are_told(
    transport: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    """Meanwhile the others go on, and a lease that lapses goes to them."""
    part = queue.partition(name, tasks={"t": ["x"], "late": ["x", "y"]})
    part.put({"x": [np.arange(2)] * 3})
    with clients(store, name, transport) as forking:
        for operation, moment, nth in (
            ("put", "before", 2), ("big put", "before", 2), ("big put", "sent", 2), ("update", "sent", 2),
            ("fetch", "sent", 1), ("ack", "before", 1),
        ):  # fmt: skip
            status = tell(forking, f"{operation},{moment},{nth},{int(signal.SIGSTOP)}")
            assert os.WIFSTOPPED(status), (operation, moment)
            ids = part.put({"x": [np.arange(2)] * 3}, timeout=5)
            part.drop(ids, "only to see that it goes on")
            if operation in ("fetch", "ack"):
                part.fetch("t", 3, timeout=20).nack()
            assert forking.stdin is not None
            assert forking.stdout is not None
            forking.stdin.write("\n")
            assert os.waitstatus_to_exitcode(int(forking.stdout.readline())) == 0
    stats = queue.stats().partitions[name]
    assert stats.samples == 3 + 3 + 3 + 3


# -- servers that stop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_every_call_ends_in_time_while_the_controller_stands_still(
    transport: str, name: str, eventually: Eventually
) -> None:
    with tq.serve(1) as store, tq.connect(store, transport=transport) as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(6)})
        batch = part.fetch("t", 3)
        calls: list[Callable[[], Any]] = [
            lambda: part.put({"x": np.arange(3)}, timeout=0.2),
            lambda: part.put({"x": np.zeros(100_000, np.int64)}, timeout=0.2),
            lambda: part.update(ids, {"y": np.arange(6)}, timeout=0.2),
            lambda: part.fetch("t", 1, timeout=0.2),
            lambda: part.get(ids, timeout=0.2),
            lambda: batch.ack(timeout=0.2),
            lambda: queue.stats(timeout=0.2),
            lambda: part.ledger("t", timeout=0.2),
        ]
        ended: list[tuple[str, float]] = []

        def attempt(call: Callable[[], Any]) -> None:
            began = time.monotonic()
            try:
                call()
            except tq.QueueError as error:
                ended.append((type(error).__name__, time.monotonic() - began))

        os.kill(store.processes[0].pid, signal.SIGSTOP)
        try:
            threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        finally:
            os.kill(store.processes[0].pid, signal.SIGCONT)
        assert [kind for kind, _ in ended] == ["Timeout"] * len(calls)
        assert max(seconds for _, seconds in ended) < 12  # 0.2, and the second that a server has to answer
        # Nothing of a put or fetch that raised stays, whatever the controller did when it went on. An ack may
        # have been heard.
        eventually(lambda: queue.stats().partitions[name].samples in (3, 6))
        if part.ledger("t").acked:
            assert set(part.ledger("t").acked) == set(batch.ids.tolist())
        else:
            batch.nack()
        left = [sample for sample in ids.tolist() if sample not in part.ledger("t").acked]
        eventually(lambda: part.ledger("t").pending == left)
        assert part.fetch("t", len(left), timeout=20).ids.tolist() == left


@pytest.mark.parametrize("stopped", [[2], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_a_stopped_unit_is_noticed_and_passed_over(
    stopped: list[int], name: str, eventually: Eventually
) -> None:
    with (
        tq.serve(2) as store,
        tq.connect(store, transport="zmq") as remote,
        tq.connect(store) as local,
    ):
        part = remote.partition(name, tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        part.get(ids)
        part.get(ids)
        for number in stopped:
            os.kill(store.processes[number].pid, signal.SIGSTOP)
            began = time.monotonic()
            try:
                eventually(lambda number=number: not local.stats().units[number - 1].alive)
                assert local.stats().units[2 - number].alive
                for _ in range(4):
                    assert part.get(ids, timeout=20)["x"].values.tolist() == [0, 1, 2]
                    part.put({"x": np.arange(3)}, timeout=20)
                    part.put({"x": np.zeros(50_000, np.int64)[:3]}, timeout=20)
                assert time.monotonic() - began < 15
            finally:
                os.kill(store.processes[number].pid, signal.SIGCONT)
            eventually(lambda number=number: local.stats().units[number - 1].alive)
        assert local.stats().partitions[name].samples == 3 + len(stopped) * 4 * 6


@pytest.mark.slow
def test_puts_on_their_way_to_a_unit_that_stops_go_by_the_other(name: str) -> None:
    with tq.serve(2) as store, tq.connect(store, transport="zmq") as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        done: list[int] = []
        failed: list[BaseException] = []
        stop = threading.Event()

        def produce(start: int) -> None:
            value = start
            while not stop.is_set():
                try:
                    part.put({"x": np.full(2, value)}, timeout=20)
                except tq.QueueError as error:
                    failed.append(error)
                    return
                done.append(value)
                value += 1

        producers = [threading.Thread(target=produce, args=(start,)) for start in (0, 1_000_000)]
        for producer in producers:
            producer.start()
        time.sleep(0.3)
        os.kill(store.processes[1].pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(store.processes[1].pid, signal.SIGCONT)
        time.sleep(0.3)
        stop.set()
        for producer in producers:
            producer.join(30)
            assert not producer.is_alive()
        assert not failed, failed
        part.close()
        seen: Counter[int] = Counter()
        for batch in part.stream("t", 1000, timeout=20):
            seen.update(batch["x"].values.tolist())
            batch.ack()
        assert seen == Counter(done * 2)


# -- lost, doubled, late messages ----------------------------------------------------------------------------


class Unreliable:
    """Stands between ZeroMQ clients and the controller: loses, repeats, delays and reorders what they say to
    each other, and cuts connections. Hellos pass: TCP does not lose the first message and deliver the second.
    """

    def __init__(
        self, address: str, seed: int, *, loss: float, double: float, late: float, cuts: float
    ) -> None:
        self._rng = random.Random(seed)
        self._chances = (loss, double, late, cuts)
        self._target = address
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._backs: dict[bytes, Any] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._stop = threading.Event()
        self.did: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(5))
            if self._front in ready:
                identity, *frames = self._front.recv_multipart()
                if identity not in self._backs:
                    back = self._backs[identity] = self._context.socket(zmq.DEALER)
                    back.setsockopt(zmq.LINGER, 0)
                    back.connect(self._target)
                    poller.register(back, zmq.POLLIN)
                self._pass(frames, self._backs[identity].send_multipart, b"Hello" in frames[0][:24])
            for identity, back in list(self._backs.items()):
                if back in ready:
                    frames = back.recv_multipart()
                    sure = b"Welcome" in frames[0][:16] or b"HelloRequired" in frames[0][:40]
                    self._pass(frames, lambda f, i=identity: self._front.send_multipart([i, *f]), sure)
            if self._rng.random() < self._chances[3] and self._backs:
                identity = self._rng.choice(list(self._backs))
                back = self._backs.pop(identity)  # what it says next is a stranger's to the controller
                poller.unregister(back)
                back.close(linger=0)
                self.did["cut"] += 1
            now = time.monotonic()
            due = [one for one in self._later if one[0] <= now]
            self._later = [one for one in self._later if one[0] > now]
            for _, _, send in sorted(due, key=lambda one: one[:2]):
                send()
        self._context.destroy(linger=0)

    def _pass(self, frames: list[bytes], send: Callable[[list[bytes]], object], sure: bool) -> None:
        loss, double, late, _ = self._chances
        if sure:
            send(frames)
            return
        if self._rng.random() < loss:
            self.did["lost"] += 1
            return
        for _ in range(2 if self._rng.random() < double else 1):
            if self._rng.random() < late:
                self.did["late"] += 1
                when = time.monotonic() + self._rng.random() * 0.3
                self._later.append((when, len(self._later), lambda: self._try(send, frames)))
            else:
                send(frames)

    @staticmethod
    def _try(send: Callable[[list[bytes]], object], frames: list[bytes]) -> None:
        try:
            send(frames)
        except zmq.ZMQError:
            return  # it is cut

    def close(self) -> None:
        self._stop.set()
        self._thread.join(20)


EVERYTHING = {"loss": 0.03, "double": 0.2, "late": 0.3, "cuts": 0.002}


@pytest.mark.parametrize(
    ("seed", "puts", "trouble"),
    [
        (1, 20, {"loss": 0.0, "double": 0.3, "late": 0.3, "cuts": 0.0}),
        pytest.param(2, 20, {"loss": 0.03, "double": 0.1, "late": 0.1, "cuts": 0.0}, marks=pytest.mark.slow),
        *(pytest.param(seed, 60, EVERYTHING, marks=pytest.mark.slow) for seed in (3, 4, 5)),
    ],
)
def test_messages_that_are_lost_doubled_and_late_change_no_account(
    seed: int, puts: int, trouble: dict[str, float], store: tq.Server, queue: tq.Client, name: str
) -> None:
    between = Unreliable(store.address, seed, **trouble)
    here = queue.partition(name, tasks={"t": ["x"]})
    seen: list[int] = []
    confirmed: list[int] = []
    unsure: list[int] = []
    try:
        with (
            tq.connect(between.address, transport="zmq", reconnect_seconds=30) as one,
            tq.connect(between.address, transport="zmq", reconnect_seconds=30) as two,
        ):
            producer, consumer = one.partition(name), two.partition(name)

            def consume() -> None:
                while True:
                    try:
                        batch = consumer.fetch("t", 3, timeout=10, lease_seconds=60, partial=True)
                    except tq.Closed:
                        return
                    except tq.Timeout:
                        continue
                    values = batch["x"].values.tolist()
                    try:
                        batch.ack(timeout=20)
                    except tq.StaleLease:
                        continue
                    seen.extend(values)

            consuming = threading.Thread(target=consume)
            consuming.start()
            for number in range(puts):
                values = [2 * number, 2 * number + 1]
                try:
                    producer.put({"x": np.array(values)}, timeout=20)
                    confirmed += values
                except tq.QueueError:
                    unsure += values
            here.close()
            consuming.join(90)
            assert not consuming.is_alive()
    finally:
        between.close()
    assert between.did["lost"] >= (1 if trouble["loss"] else 0), between.did
    assert between.did["late"] >= (1 if trouble["late"] else 0)
    counts = Counter(seen)
    assert max(counts.values()) == 1
    assert set(confirmed) <= set(seen)
    assert set(seen) <= set(confirmed) | set(unsure)
    assert not unsure
    ledger = here.ledger("t")
    assert (ledger.leased, ledger.pending) == ([], [])
    assert len(ledger.acked) == len(seen)


# -- races and limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_drops_that_race_puts_and_reads_leave_whole_samples_or_none(
    transport: str, store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    here = queue.partition(name, tasks={"t": ["x"]})
    base = queue.stats().memory.used
    put: list[np.ndarray] = []
    wrong: list[Any] = []
    stop = threading.Event()
    with tq.connect(store, transport=transport) as other:
        part = other.partition(name)

        def produce() -> None:
            value = 0
            while not stop.is_set():
                put.append(part.put({"x": [np.full(3_000, value + row) for row in range(2)]}))
                value += 2

        def read() -> None:
            while not stop.is_set():
                if not put:
                    continue
                number = random.randrange(max(0, len(put) - 5), len(put))
                try:
                    rows = part.get(put[number])["x"]
                except tq.UnknownSample:
                    continue
                wrong.extend((number, row) for at, row in enumerate(rows) if (row != 2 * number + at).any())

        def drop() -> None:
            while not stop.is_set():
                while dropped[0] < len(put):
                    here.drop(put[dropped[0]], "cleared")
                    dropped[0] += 1

        dropped = [0]
        threads = [threading.Thread(target=call) for call in (produce, read, read, drop)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert not wrong
    assert dropped[0] > 5
    for ids in put[dropped[0] :]:
        here.drop(ids, "cleared")
    assert len(here.ledger("t").dropped) == 2 * len(put)
    eventually(lambda: queue.stats().memory.used <= base)


def test_a_slow_consumer_holds_producers_up_and_the_limit_is_never_passed(name: str) -> None:
    limit = 2_000_000
    with tq.serve(1, max_bytes=limit) as store, tq.connect(store) as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        failed: list[BaseException] = []

        def produce(start: int, transport: str) -> None:
            try:
                with tq.connect(store, transport=transport) as own:
                    theirs = own.partition(name)
                    for value in range(start, start + 12):
                        length = (1_000, 30_000)[value % 2]
                        theirs.put({"x": [np.full(length, value)] * 2}, timeout=60)
            except tq.QueueError as error:
                failed.append(error)

        producers = [
            threading.Thread(target=produce, args=(start, transport))
            for start, transport in ((0, "shm"), (100, "shm"), (200, "zmq"))
        ]
        for producer in producers:
            producer.start()
        seen: Counter[int] = Counter()
        most = waited = 0
        while sum(seen.values()) < 72:
            stats = queue.stats()
            most, waited = max(most, stats.nbytes), max(waited, stats.waiting_puts)
            assert stats.nbytes <= limit
            batch = part.fetch("t", 2, timeout=20)
            assert all((row == row[0]).all() for row in batch["x"])
            seen.update(int(row[0]) for row in batch["x"])
            time.sleep(0.005)
            batch.ack()
            del batch
        for producer in producers:
            producer.join(30)
        assert not failed
        assert set(seen.values()) == {2}
        assert len(seen) == 36
        assert most > 0.5 * limit
        assert waited >= 1
        with pytest.raises(tq.TooLarge):
            part.put({"x": [np.zeros(300_000, np.int64)]})


STANDING = """
import os, signal, sys, transferqueue as tq
batch = tq.connect(sys.argv[1], transport=sys.argv[2]).partition(sys.argv[3]).fetch("t", 3, lease_seconds=1)
os.kill(os.getpid(), signal.SIGSTOP)
try:
    batch.ack()
    print("acked")
except tq.StaleLease:
    print("stale")
"""


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_the_lease_of_a_stopped_consumer_lapses_and_its_ack_is_refused(
    transport: str, store: tq.Server, queue: tq.Client, name: str
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(3)}).tolist()
    with subprocess.Popen(
        [sys.executable, "-c", STANDING, store.address, transport, name], stdout=subprocess.PIPE, text=True
    ) as consumer:
        os.waitid(os.P_PID, consumer.pid, os.WSTOPPED | os.WNOWAIT)
        mine = part.fetch("t", 3, timeout=20)
        assert mine.ids.tolist() == ids
        consumer.send_signal(signal.SIGCONT)
        assert consumer.communicate(timeout=20)[0] == "stale\n"
        mine.ack()
    assert set(part.ledger("t").acked) == set(ids)
