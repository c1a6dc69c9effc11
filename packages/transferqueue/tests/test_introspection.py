"""Statistics and what is made of them, without a store."""

import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import msgspec
import pytest
from transferqueue.errors import ControllerLost, InvalidArgument
from transferqueue.introspection import MemoryStats, PartitionStats, StoreStats, UnitStats
from transferqueue.introspection.rates import Reading, rates, restarted
from transferqueue.introspection.reader import SharedReading, StatsReader
from transferqueue.introspection.statistics import partition_stats, plain
from transferqueue.scheduling.partition import Partition
from transferqueue.scheduling.samples import Row
from transferqueue.scheduling.wanted import Wanted
from transferqueue.values.columns import FieldSpec

SPECS = {"tokens": FieldSpec("int32", (), True)}


class Unscanned(dict[Any, Any]):
    """A dict that can be asked for a key and for its length, and not for all there is."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("scanned")

    def keys(self) -> NoReturn:
        raise AssertionError("scanned")

    def values(self) -> NoReturn:
        raise AssertionError("scanned")

    def items(self) -> NoReturn:
        raise AssertionError("scanned")


def filled(samples: int) -> Partition:
    """A partition of two tasks, one of which lacks a field; sample i has i bytes and was put at time i."""
    partition = Partition("p", {"reader": ["tokens"], "judge": ["tokens", "reward"]})
    for sample in range(samples):
        partition.put([Row(sample, f"g{sample // 2}", 0, 0, sample)], SPECS, {}, now=float(sample))
    return partition


def of(partition: Partition, now: float) -> PartitionStats:
    return partition_stats(partition, max_samples=9, max_bytes=None, now=now)


def store(
    uptime: float, partitions: dict[str, PartitionStats], network: int = 0, unit: int = 0
) -> StoreStats:
    memory = MemoryStats(capacity=1 << 20, granted=1 << 10, used=100, pinned_only=7)
    units = [
        UnitStats(
            unit=unit,
            alive=True,
            address="tcp://127.0.0.1:1",
            arenas=1,
            capacity=1 << 20,
            used=100,
            network_read_bytes_total=network,
            network_written_bytes_total=2 * network,
        )
    ]
    return StoreStats(
        uptime=uptime,
        max_bytes=None,
        nbytes=0,
        waiting_puts=0,
        waiting_fetches=0,
        clients=1,
        memory=memory,
        units=units,
        partitions=partitions,
    )


def test_every_step_of_a_sample_is_counted_for_its_task() -> None:
    partition = filled(10)
    kept = partition.lease(Wanted("reader", 3), now=10, seconds=100, owner=1)
    partition.lease(Wanted("reader", 2), now=10, seconds=5, owner=1)
    given_back = partition.lease(Wanted("reader", 1), now=10, seconds=100, owner=2)
    assert kept is not None
    assert given_back is not None
    partition.ack(kept.id, 11)
    partition.nack(given_back.id, 11)
    partition.lapse(15)
    partition.lease(Wanted("reader", 4), now=15, seconds=100, owner=1)
    partition.update([8, 9], {"reward": FieldSpec("float32", (), False)}, [100, 100])
    partition.drop([9], "broken")

    stats = of(partition, now=20.0)
    assert plain(stats) == {
        "samples": 9,
        "nbytes": sum(range(9)) + 100,
        "max_samples": 9,
        "max_bytes": None,
        "closed": False,
        "groups": 5,
        "dropped": 1,
        "put_samples_total": 10,
        "put_bytes_total": sum(range(10)) + 200,
        "updated_total": 2,
        "dropped_total": 1,
        "tasks": {
            "reader": {
                "unready": 0,
                "ready": 2,
                "leased": 4,
                "acked": 3,
                "leases": 1,
                "delivered_total": 3 + 2 + 1 + 4,
                "acked_total": 3,
                "nacked_total": 1,
                "lapsed_total": 2,
                "lag": 20.0 - 3,
            },
            "judge": {
                "unready": 8,
                "ready": 1,
                "leased": 0,
                "acked": 0,
                "leases": 0,
                "delivered_total": 0,
                "acked_total": 0,
                "nacked_total": 0,
                "lapsed_total": 0,
                "lag": 20.0,
            },
        },
    }


def test_what_is_acked_by_all_is_gone_and_still_counted() -> None:
    partition = Partition("p", {"reader": ["tokens"]})
    partition.put([Row(i, None, 0, 0, 8) for i in range(5)], SPECS, {}, now=1.0)
    partition.close()
    lease = partition.lease(Wanted("reader", 5), now=2, seconds=9, owner=1)
    assert lease is not None
    partition.ack(lease.id, 3)
    stats = of(partition, now=99.0)
    assert (stats.samples, stats.nbytes, stats.closed) == (0, 0, True)
    reader = stats.tasks["reader"]
    assert (reader.acked, reader.acked_total, reader.lag) == (5, 5, 0.0)


def test_statistics_do_not_look_at_every_sample() -> None:
    partition = filled(200)
    partition.lease(Wanted("reader", 50), now=0, seconds=9, owner=1)
    before = of(partition, now=500.0)
    partition.samples = Unscanned(partition.samples)
    partition.groups = Unscanned(partition.groups)
    for task in partition.tasks.values():
        task.leased = Unscanned(task.leased)
    assert of(partition, now=500.0) == before


def test_statistics_travel_as_they_are() -> None:
    stats = store(3.5, {"p": of(filled(4), now=9.0)}, network=5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=StoreStats) == stats
    assert plain(stats)["partitions"]["p"]["tasks"]["reader"]["ready"] == 4


def grown(seconds: float, puts: int, acks: int) -> Reading:
    partition = filled(puts)
    if acks:
        lease = partition.lease(Wanted("reader", acks), now=0, seconds=9, owner=1)
        assert lease is not None
        partition.ack(lease.id, 1)
    return Reading(1000.0 + seconds, store(seconds, {"p": of(partition, now=seconds)}, network=int(seconds)))


def test_rates_are_differences_by_the_clock_of_the_store() -> None:
    change = rates(grown(10, puts=4, acks=0), grown(14, puts=20, acks=12))
    assert change is not None
    assert change.seconds == 4
    assert (change.network_read_bytes, change.network_written_bytes) == (1, 2)
    assert change.partitions["p"].put_samples == 4
    assert change.partitions["p"].put_bytes == (sum(range(20)) - sum(range(4))) / 4
    assert change.partitions["p"].tasks["reader"].acked == 3
    assert change.partitions["p"].tasks["reader"].delivered == 3
    assert change.partitions["p"].tasks["judge"].acked == 0


def test_a_new_partition_and_a_new_unit_count_from_zero() -> None:
    before = Reading(0.0, store(10, {}, network=900))
    after = grown(14, puts=8, acks=0)
    change = rates(before, Reading(4.0, after.stats))
    assert change is not None
    assert change.partitions["p"].put_samples == 2
    assert change.network_read_bytes == 14 / 4


def test_a_restart_has_no_rates() -> None:
    before = grown(100, puts=50, acks=0)
    younger = Reading(before.at + 2, grown(1, puts=8, acks=0).stats)
    assert restarted(before, younger)
    assert rates(before, younger) is None
    young = grown(1, puts=3, acks=0)
    outgrown = Reading(young.at + 60, grown(5, puts=4, acks=0).stats)  # older, but not by the time between
    assert restarted(young, outgrown)
    assert rates(young, outgrown) is None
    assert not restarted(young, grown(5, puts=4, acks=0))


def test_readings_at_the_same_time_are_one() -> None:
    reading = grown(1, puts=1, acks=0)
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def read() -> Reading:
        made.append(1)
        begun.set()
        assert go_on.wait(20)
        return reading

    shared = SharedReading(read)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(shared)
        assert begun.wait(20)
        others = [threads.submit(shared) for _ in range(7)]
        go_on.set()
        assert all(one.result(20) is reading.stats for one in [first, *others])
    assert 1 <= len(made) < 8  # one of the others may have begun when the first was over
    assert shared() is reading.stats


def test_a_change_is_told_once() -> None:
    reading = grown(1, puts=1, acks=0)
    lost = ControllerLost("gone", address="")
    answers: list[Callable[[], Reading]] = []

    def fails() -> Reading:
        raise lost

    told: list[object] = []
    shared = SharedReading(lambda: answers.pop(0)(), told.append)
    answers += [lambda: reading, fails, fails, lambda: reading, lambda: reading]
    assert [shared() is not None for _ in range(5)] == [True, False, False, True, True]
    assert told == [lost, None]


def test_a_bug_in_a_reading_reaches_all_who_wait_and_does_not_stick() -> None:
    def broken() -> Reading:
        raise ZeroDivisionError

    shared = SharedReading(broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shared()


def test_a_time_limit_must_be_positive() -> None:
    with pytest.raises(InvalidArgument, match="timeout is 0"):
        StatsReader("127.0.0.1:1", timeout=0)


def test_text_for_a_terminal_cannot_control_it() -> None:
    pytest.importorskip("rich")
    from transferqueue.introspection.table import duration, printable, size

    assert printable("tra\x1b[31min\n\x9b2J") == "tra\\x1b[31min\\n\\x9b2J"
    assert printable("Übung 漢字") == "Übung 漢字"
    assert [size(n) for n in (0, 1023, 1536, 8 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "8.0 GiB",
        "5.0 TiB",
    ]
    assert [duration(s) for s in (0.34, 59, 245, 7740, 200_000)] == [
        "0.3 s",
        "59 s",
        "4 min 5 s",
        "2 h 9 min",
        "2 d 7 h",
    ]


def test_a_narrow_terminal_loses_columns_and_no_digit() -> None:
    pytest.importorskip("rich")
    from rich.console import Console
    from transferqueue.introspection.frames import Frame
    from transferqueue.introspection.table import render

    partition = of(filled(10), now=20.0)
    busy = msgspec.structs.replace(partition.tasks["judge"], unready=123_456_789, lapsed_total=987_654)
    stats = store(3.5, {"train": msgspec.structs.replace(partition, tasks={"actor": busy})})
    for width, shown in ((160, True), (84, False)):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render(Frame("tcp://127.0.0.1:5", Reading(time.monotonic(), stats)), console))
        text = console.export_text()
        assert "987,654" in text
        assert "123,456,789" in text
        assert ("taken/s" in text) is shown
        assert "…" not in text
