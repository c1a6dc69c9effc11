"""A store that keeps a journal: what was acknowledged outlives its processes."""

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.controller import events
from transferqueue.controller.journal import Journal
from transferqueue.scheduling.events import GroupClosed, Put
from transferqueue.scheduling.samples import Row

Eventually = Callable[[Callable[[], bool]], None]
TASKS = {"t": ["x"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def server(folder: Path) -> Iterator[tq.Server]:
    with tq.serve(1, journal=folder) as server:
        yield server


@pytest.fixture
def kill(server: tq.Server) -> Callable[[], None]:
    def now() -> None:
        process = server.processes[0]
        process.kill()
        process.wait(20)

    return now


# -- what a restart keeps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_clients_go_on_where_the_controller_died(
    transport: str, server: tq.Server, kill: Callable[[], None]
) -> None:
    with tq.connect(server, transport=transport, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks={"t": ["x", "y"], "u": ["x"]}, max_samples=50)
        ids = part.put({"x": [np.full(n, n) for n in (3, 200_000, 5, 6)]}, groups=["a", "a", "b", None])
        part.update(ids[:3], {"y": np.arange(3)})
        batch = part.fetch("t", 1)
        kill()
        assert np.asarray(batch["x"][0]).tolist() == [3, 3, 3]  # what it looks at is still there
        batch.ack()
        kill()
        groups = part.fetch("t", 2, at_least=1)
        assert groups.ids.tolist() == ids[1:3].tolist()
        assert groups.groups == ["a", "b"]
        part.update(ids[3:], {"y": np.array([9])})
        kill()
        groups.nack()
        rest = part.fetch("t", 3)
        assert rest.ids.tolist() == ids[1:].tolist()
        assert np.asarray(rest["y"].values).tolist() == [1, 2, 9]
        assert len(rest["x"][0]) == 200_000
        with pytest.raises(tq.SchemaMismatch):
            part.put({"x": ["text"]})
        more = part.put({"x": [np.full(2, 2)]})
        assert more[0] == ids[-1] + 1
        with pytest.raises(tq.SchemaMismatch):
            queue.partition("p", max_samples=51)
        assert sorted(part.ledger("t").acked) == ids[:1].tolist()
        assert part.fetch("u", 5).ids.tolist() == [*ids, *more]


def test_leases_keep_their_tokens_and_their_time(server: tq.Server, kill: Callable[[], None]) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue, tq.connect(server, reconnect_seconds=60) as other:
        part = queue.partition("p", tasks=TASKS)
        ids = part.put({"x": np.arange(3)})
        lapsing, kept = part.fetch("t", 1, lease_seconds=1.0), part.fetch("t", 1, lease_seconds=600.0)
        last = part.fetch("t", 1, lease_seconds=600.0)
        kill()
        again = other.partition("p").fetch("t", 1, timeout=30)
        assert again.ids.tolist() == ids[:1].tolist()
        with pytest.raises(tq.StaleLease):
            lapsing.ack()
        kept.ack()
        again.ack()
        kill()
        kept.settled = False
        with pytest.raises(tq.StaleLease):
            kept.ack()  # twice is refused after a restart too
        last.extend_lease(600.0)
        last.ack()
        assert len(part.ledger("t").acked) == 3


def test_a_wait_goes_on_over_a_restart(
    server: tq.Server, kill: Callable[[], None], eventually: Eventually
) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue, tq.connect(server, reconnect_seconds=60) as other:
        part = queue.partition("p", tasks=TASKS, max_samples=2)
        got: list[list[int]] = []
        fetching = threading.Thread(target=lambda: got.append(part.fetch("t", 2, timeout=60).ids.tolist()))
        fetching.start()
        eventually(lambda: other.stats().waiting_fetches == 1)
        kill()
        ids = other.partition("p").put({"x": np.arange(2)})
        fetching.join(60)
        assert got == [ids.tolist()]
        waiting = threading.Thread(target=lambda: got.append(part.put({"x": np.arange(2)}).tolist()))
        waiting.start()
        eventually(lambda: other.stats().waiting_puts == 1)
        kill()
        other.partition("p").drop(ids, "make room")
        waiting.join(60)
        assert got[1] == [ids[1] + 1, ids[1] + 2]


def test_rounds_and_admissions_go_on(server: tq.Server, kill: Callable[[], None]) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue, tq.connect(server, reconnect_seconds=60) as other:
        part = queue.partition("p", tasks=TASKS, max_samples=40, max_staleness=1, length_field="x")
        ticket = part.admit(0, 8)
        ids = part.put({"x": [np.arange(n) for n in (9, 1, 8, 2, 7, 3, 6, 4)]})
        sampler = tq.samplers.Balanced(token_budget=12)
        ranks = [part, other.partition("p")]
        got: list[list[list[int]]] = [[], []]
        rounds = 0
        while True:
            ends = []
            for rank, mine in enumerate(ranks):
                batch = mine.fetch("t", 8, sampler=sampler, rank=rank, world_size=2, timeout=60)
                if rounds < 2 and rank == 0:
                    kill()  # one rank has its part of the round, the other has not
                assert batch.round == rounds
                got[rank].append([] if batch.dummy else batch.ids.tolist())
                batch.ack()
                ends.append(batch.is_last)
            rounds += 1
            assert ends[0] == ends[1]
            if ends[0]:
                break
        assert rounds > 1
        assert sorted(sample for part in got[0] + got[1] for sample in part) == ids.tolist()
        kill()
        part.advance(5)
        with pytest.raises(tq.InvalidArgument):
            part.admit(3, 1)
        with pytest.raises(tq.Full):
            part.admit(5, 33, timeout=0)  # room for 8 is promised
        assert len(part.put({"x": [np.arange(1)] * 8}, ticket=ticket)) == 8


@pytest.mark.slow
def test_what_compaction_moved_is_found_after_a_restart(
    server: tq.Server, kill: Callable[[], None], eventually: Eventually
) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        ids = part.put({"x": [np.full(50_000, number) for number in range(20)]})
        part.fetch("t", 17).ack()
        before = queue.stats().memory.used
        eventually(lambda: queue.stats().memory.used < before // 2)
        kill()
        rows = part.get(ids[17:], timeout=60)["x"]
        assert [(len(row), int(np.asarray(row)[-1])) for row in rows] == [(50_000, n) for n in (17, 18, 19)]
        assert queue.stats().memory.used < before // 2
        part.fetch("t", 3).ack()
        del rows
        queue.stats()
        eventually(lambda: queue.stats().memory.used == 0)


CONSUMER = """
import sys, transferqueue as tq
part = tq.connect(sys.argv[1], transport=sys.argv[2]).partition("p")
batch = part.fetch("t", 2, lease_seconds=600)
print(len(batch), flush=True)
sys.stdin.read()
"""


def test_a_consumer_that_dies_with_the_controller_gives_its_leases_back(
    server: tq.Server, kill: Callable[[], None]
) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        ids = part.put({"x": np.arange(2)})
        consumer = subprocess.Popen(
            [sys.executable, "-c", CONSUMER, server.address, "shm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert consumer.stdout is not None
        assert consumer.stdin is not None
        assert consumer.stdout.readline() == b"2\n"
        os.kill(server.processes[0].pid, 19)  # it must not see how the consumer dies
        consumer.kill()
        consumer.communicate()
        kill()
        assert part.fetch("t", 2, timeout=30).ids.tolist() == ids.tolist()


def test_memory_that_is_looked_at_is_not_given_out_after_a_restart(
    server: tq.Server, kill: Callable[[], None], eventually: Eventually
) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue, tq.connect(server, reconnect_seconds=60) as other:
        part, others = queue.partition("p", tasks=TASKS), other.partition("p", tasks=TASKS)
        part.put({"x": [np.full(500_000, 1, np.int32)]})
        batch = part.fetch("t", 1)
        view = np.asarray(batch["x"][0])
        batch.ack()  # only the view holds it now
        kill()
        for number in range(2, 40):
            others.put({"x": [np.full(500_000, number, np.int32)]})
            others.fetch("t", 1).ack()
        assert (view == 1).all()
        pinned = other.stats().memory.pinned_only
        assert pinned > 0
        del view, batch
        queue.stats()
        eventually(lambda: other.stats().memory.pinned_only < pinned)


def test_a_store_is_resumed_by_another(folder: Path) -> None:
    with tq.serve(2, journal=folder) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks=TASKS)
        ids = part.put({"x": [np.full(100_000, number) for number in range(4)]})
        part.fetch("t", 1).ack()
        held = part.fetch("t", 1, lease_seconds=2.0)
        assert held.ids[0] == ids[1]
        for process in server.processes:
            process.kill()  # all at once: nobody says goodbye
        server.close()
    with tq.serve(1, journal=folder) as server, tq.connect(server) as queue:
        part = queue.partition("p")
        assert sorted(part.ledger("t").acked) == ids[:1].tolist()
        batch = part.fetch("t", 3, timeout=30)
        assert batch.ids.tolist() == ids[1:].tolist()
        assert [int(np.asarray(row)[-1]) for row in batch["x"]] == [1, 2, 3]
        assert part.put({"x": [np.arange(1)]})[0] == ids[-1] + 1


def test_two_stores_cannot_share_a_folder(folder: Path, server: tq.Server) -> None:
    with pytest.raises(tq.StartFailed, match="used by another store"):
        tq.serve(1, journal=folder)
    with tq.connect(server) as queue:
        queue.partition("p", tasks=TASKS).put({"x": np.arange(1)})


def test_a_journal_is_rewritten_when_most_of_it_is_past(
    server: tq.Server, kill: Callable[[], None], folder: Path
) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        kept = part.put({"x": [np.full(10, 7)]}, groups=["kept"])
        lease = part.fetch("t", 1, lease_seconds=3600)
        name = "g" * 4000
        for _ in range(5):  # of four megabytes each
            ids = part.put({"x": np.arange(1000)[:, None]}, groups=[f"{name}{n}" for n in range(1000)])
            part.drop(ids, "past")
        numbers = sorted(int(path.name.partition("-")[2]) for path in folder.glob("journal-*"))
        assert numbers[0] >= 1
        assert len(numbers) == 1
        kill()
        assert part.get(kept)["x"].tolist()[0].tolist() == [7] * 10
        lease.ack()
        assert len(part.ledger("t").dropped) == 5000


def test_random_deaths_of_the_controller_lose_nothing(server: tq.Server, kill: Callable[[], None]) -> None:
    """Puts, updates, fetches and acks are under way at every moment that is drawn."""
    choose = random.Random(5)
    done: list[int] = []
    acked: list[int] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def produce(transport: str) -> None:
        with tq.connect(server, transport=transport, reconnect_seconds=60) as queue:
            part = queue.partition("p", tasks={"t": ["x", "y"]})
            while not stop.is_set():
                ids = part.put({"x": [np.arange(30_000)] * 2}, timeout=60)
                part.update(ids, {"y": ids}, timeout=60)
                done.extend(ids.tolist())

    def consume(transport: str) -> None:
        with tq.connect(server, transport=transport, reconnect_seconds=60) as queue:
            part = queue.partition("p", tasks={"t": ["x", "y"]})
            while True:
                try:
                    batch = part.fetch("t", 2, timeout=60, at_least=1)
                except tq.Closed:
                    return
                assert np.asarray(batch["y"].values).tolist() == batch.ids.tolist()
                batch.ack(timeout=60)
                acked.extend(batch.ids.tolist())

    def guarded(what: Callable[[str], None], transport: str) -> None:
        try:
            what(transport)
        except BaseException as error:
            failed.append(error)
            raise

    with tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks={"t": ["x", "y"]})
        threads = {
            (what.__name__, transport): threading.Thread(target=guarded, args=(what, transport))
            for what in (produce, consume)
            for transport in ("shm", "zmq")
        }
        for thread in threads.values():
            thread.start()
        for _ in range(4):
            before, deadline = len(acked), time.monotonic() + 60
            while len(acked) < before + 20 and time.monotonic() < deadline and not failed:
                time.sleep(0.005)
            time.sleep(choose.uniform(0.0, 0.05))  # the moment is what is drawn
            kill()
        stop.set()
        for (kind, _), thread in threads.items():
            if kind == "produce":
                thread.join(60)
        part.close(timeout=60)
        for thread in threads.values():
            thread.join(60)
        assert failed == []
        assert len(acked) == len(set(acked))
        assert sorted(acked) == sorted(done) == sorted(part.ledger("t").acked)
        assert part.ledger("t").pending == []


# -- what would end every life of a controller ---------------------------------------------------------------

FAULTY = """
from transferqueue.scheduling import book

close_group, lag = book.Book.close_group, book.Book.lag

def faulty_close_group(self, key, count, tombstones):
    close_group(self, key, count, tombstones)
    if key == "poison":
        raise ZeroDivisionError("half done")

def faulty_lag(self, task, now):
    if self.name == "odd":
        raise OverflowError("lag")
    return lag(self, task, now)

book.Book.close_group, book.Book.lag = faulty_close_group, faulty_lag
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started have faults."""
    (tmp_path / "sitecustomize.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


def test_a_request_that_ends_the_controller_ends_it_once(folder: Path, faulty: None) -> None:
    with tq.serve(1, journal=folder) as server, tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        ids = part.put({"x": np.arange(3)})
        controller = server.processes[0].pid
        with pytest.raises(tq.QueueError, match="half done"):
            part.close_group("poison", 2, timeout=60)
        second = server.processes[0].pid
        assert second != controller
        # Nothing of it was kept: the group has no size.
        more = part.put({"x": np.arange(3)}, groups=["poison"] * 3, group_sizes={"poison": 3})
        with pytest.raises(tq.GroupMismatch):
            part.close_group("poison", 2)
        assert part.fetch("t", 6).ids.tolist() == [*ids, *more]
        assert server.processes[0].pid == second
        assert server.failure is None


def test_what_only_looks_and_fails_is_refused(faulty: None) -> None:
    with tq.serve(1) as server, tq.connect(server) as queue:
        part = queue.partition("odd", tasks=TASKS)
        part.put({"x": np.arange(3)})
        with pytest.raises(tq.InvalidArgument, match="ReadStats cannot be answered"):
            queue.stats()
        assert len(part.fetch("t", 3)) == 3
        assert server.failure is None


def test_a_journal_with_numbers_that_are_refused_now_is_read(folder: Path, tmp_path: Path) -> None:
    """Sums of them would be beyond 64 bits: nothing could be written any more."""
    most = (1 << 63) - 1
    with tq.serve(1, journal=folder) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks=TASKS, length_field="x")
        [first] = part.put({"x": [np.arange(2)]}).tolist()
    journal = Journal(folder)
    assert journal.recover() is not None
    rows = [Row(first + number, "g", 0, 0, 1 << 62, most) for number in range(1000, 1005)]
    changes = [Put(rows, {}, {"h": (1 << 64) - 1}, None), GroupClosed("k", (1 << 64) - 1, -(1 << 63))]
    journal.write(events.encode(events.Turn(time.monotonic(), [events.Changed(0, one) for one in changes])))
    journal.close()
    for _ in range(2):
        with tq.serve(1, journal=folder) as server, tq.connect(server) as queue:
            part = queue.partition("p")
            assert part.ledger("t").pending == [first, *range(first + 1000, first + 1005)]
            assert queue.stats().partitions["p"].put_samples_total == 6
            queue.snapshot(tmp_path / "snapshot")


# -- a disk that is full -------------------------------------------------------------------------------------


def test_a_full_disk_refuses_puts_keeps_acks_and_recovers(
    server: tq.Server, kill: Callable[[], None], folder: Path
) -> None:
    with tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        put = part.put({"x": [np.arange(10)] * 40}).tolist()
        process = server.processes[0].pid
        size = max(path.stat().st_size for path in folder.glob("journal-*"))
        # A limit on the size of files stands for a disk: the same calls fail in the same places.
        limits = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, limits[1]))
        name = "g" * 1000

        def fill() -> None:
            for _ in range(size // 500_000 + 2):
                ids = part.put({"x": [np.arange(1)] * 500}, groups=[f"{name}{n}" for n in range(500)])
                put.extend(ids.tolist())

        with pytest.raises(tq.Full, match=str(folder)):
            fill()
        first = part.fetch("t", 40)
        first.ack()  # what makes room goes on
        resource.prlimit(process, resource.RLIMIT_FSIZE, limits)
        deadline = time.monotonic() + 30
        while True:
            try:
                put += part.put({"x": [np.arange(1)]}).tolist()
                break
            except tq.Full:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        kill()
        ledger = part.ledger("t", timeout=60)
        assert sorted([*ledger.acked, *ledger.pending]) == put
        assert len(ledger.acked) == 40


def test_nothing_is_acknowledged_that_could_not_be_written(
    server: tq.Server, kill: Callable[[], None], folder: Path
) -> None:
    """The room that is taken in advance is used up, too."""
    with tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        put = part.put({"x": [np.arange(1)] * 10}).tolist()
        process = server.processes[0].pid
        size = max(path.stat().st_size for path in folder.glob("journal-*"))
        limits = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, limits[1]))
        keys = ["g" * 2000 + str(n) for n in range(4000)]
        with pytest.raises(tq.Timeout):  # one that is larger than all of the room at once
            part.put({"x": [np.arange(1)] * 4000}, groups=keys, timeout=1.0)
        with pytest.raises(tq.Full):
            part.fetch("t", 1, timeout=1.0)
        kill()  # its successor has no limit, and knows nothing of what was not written
        ledger = part.ledger("t", timeout=60)
        assert sorted(ledger.pending) == put
        assert part.fetch("t", 10, timeout=60).ids.tolist() == put


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("use", ["journal", "spill"])
def test_payload_that_the_disk_has_no_room_for_is_refused(use: str, small_disk: Path) -> None:
    options: dict[str, Any] = {"journal": small_disk} if use == "journal" else {"spill": small_disk}
    if use == "spill":
        options["memory"] = "16MiB"
    with tq.serve(1, **options) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks=TASKS)
        put = 0

        def fill() -> None:
            nonlocal put
            for _ in range(30):
                part.put({"x": [np.full(1_000_000, put, np.int64)]})
                put += 1

        with pytest.raises(tq.Full, match=str(small_disk)):
            fill()
        assert 2 <= put < 20
        for number in range(put):
            batch = part.fetch("t", 1)
            assert (np.asarray(batch["x"][0]) == number).all()
            batch.ack()
            del batch  # the last view of it
        part.put({"x": [np.full(1_000_000, 7, np.int64)]})  # there is room again
        assert (np.asarray(part.fetch("t", 1)["x"][0]) == 7).all()


def test_spilled_samples_come_back_equal(tmp_path: Path) -> None:
    with tq.serve(1, memory="64MiB", spill=tmp_path / "spill") as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks=TASKS)
        for number in range(20):
            part.put({"x": [np.full(1_000_000, number, np.int64)]})  # 160 MB in all
        assert queue.stats().memory.capacity > 150_000_000
        for number in range(20):
            batch = part.fetch("t", 1)
            values = np.asarray(batch["x"][0])
            assert len(values) == 1_000_000
            assert (values == number).all()
            batch.ack()
        assert list((tmp_path / "spill").iterdir()) == []


def test_options_that_exclude_each_other_are_named(tmp_path: Path) -> None:
    with pytest.raises(tq.InvalidArgument, match="belong together"):
        tq.serve(1, memory="1GiB")
    with pytest.raises(tq.InvalidArgument, match="nothing to spill"):
        tq.serve(1, memory="1GiB", spill=tmp_path, journal=tmp_path)
    with pytest.raises(tq.InvalidArgument, match="journal"):
        tq.serve(1, fsync=True)


@pytest.mark.slow
def test_with_fsync_all_works_the_same(folder: Path) -> None:
    with tq.serve(1, journal=folder, fsync=True) as server, tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks=TASKS)
        ids = part.put({"x": np.arange(3)})
        server.processes[0].kill()
        assert part.fetch("t", 3, timeout=60).ids.tolist() == ids.tolist()
