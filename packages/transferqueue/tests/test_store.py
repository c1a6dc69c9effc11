"""What a user does with a running store: real processes, blocking client."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.samplers import Groups

Eventually = Callable[[Callable[[], bool]], None]


def tokens(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length, dtype=np.int32) for length in lengths]


def test_put_update_fetch_ack_frees_the_payload(queue: tq.Client, name: str, eventually: Eventually) -> None:
    part = queue.partition(name, tasks={"advantages": ["reward"], "actor": ["tokens", "advantages"]})
    ids = part.put(
        {"tokens": tokens(3, 0, 5), "reward": np.array([1, 2, 3], np.float32)}, version=[4, 5, 6], priority=2
    )
    with pytest.raises(tq.Timeout):
        part.fetch("actor", 1, timeout=0)
    first = part.fetch("advantages", 3)
    assert first.ids.tolist() == ids.tolist()
    assert first["reward"].values.tolist() == [1, 2, 3]
    assert first.versions.tolist() == [4, 5, 6]
    assert first.priorities.tolist() == [2, 2, 2]
    assert first.groups == [None] * 3
    part.update(ids, {"advantages": [np.full(length, length, np.float32) for length in (3, 0, 5)]})
    first.ack()
    second = part.fetch("actor", 3)
    assert [row.tolist() for row in second["tokens"]] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    assert [row.tolist() for row in second["advantages"]] == [[3, 3, 3], [], [5] * 5]
    second.ack()
    second.ack()
    eventually(lambda: queue.stats().memory.used == queue.stats().memory.pinned_only)
    with pytest.raises(tq.UnknownSample):
        part.get(ids)
    for task in ("advantages", "actor"):
        ledger = part.ledger(task)
        assert ledger.acked == set(ids.tolist())
        assert (ledger.dropped, ledger.leased, ledger.pending) == ({}, [], [])


def test_fetch_merges_rows_of_many_puts_in_order(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["tokens", "text", "reward"]})
    for start in range(0, 12, 3):
        part.put(
            {
                "tokens": [np.full(row, row, np.int32) for row in range(start, start + 3)],
                "text": [f"row {row}" if row % 4 else None for row in range(start, start + 3)],
                "reward": np.arange(start, start + 3, dtype=np.float32),
            },
            priority=[-row for row in range(start, start + 3)],
        )
    batch = part.fetch("t", 12)
    expected = list(range(11, -1, -1))
    assert batch.priorities.tolist() == [-row for row in expected]
    assert batch["reward"].values.tolist() == expected
    assert [row.tolist() for row in batch["tokens"]] == [[row] * row for row in expected]
    assert batch["text"].tolist() == [f"row {row}" if row % 4 else None for row in expected]
    part.update(batch.ids, {"late": np.array(expected, np.int64)})
    assert part.get(batch.ids[::-1], ["late"])["late"].values.tolist() == expected[::-1]


def test_a_waiting_fetch_is_woken_by_the_put_that_completes_it(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    got: list[tq.Batch] = []
    consumer = threading.Thread(target=lambda: got.append(part.fetch("t", 4, sampler=Groups(4), timeout=30)))
    consumer.start()
    for member in range(4):
        part.put({"x": np.array([member])}, groups=["g"])
    consumer.join(20)
    assert got[0]["x"].values.tolist() == [0, 1, 2, 3]


def test_at_least_is_served_at_once_with_what_is_ready(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(4)}, groups=["a", "a", "b", "b"])
    part.put({"x": np.array([9])}, groups=["c"], group_sizes={"c": 2})
    batch = part.fetch("t", 8, sampler=Groups(2), at_least=2, timeout=30)
    assert batch["x"].values.tolist() == [0, 1, 2, 3]
    with pytest.raises(tq.Timeout):
        part.fetch("t", 8, sampler=Groups(2), at_least=2, timeout=0)
    with pytest.raises(tq.InvalidArgument, match="at_least"):
        part.fetch("t", 2, at_least=3, timeout=0)


def test_max_priority_and_min_version_filter(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(6)}, priority=[3, 1, 2, 1, 2, 3], version=[0, 1, 2, 3, 4, 5])
    assert part.fetch("t", 2, max_priority=1)["x"].values.tolist() == [1, 3]
    with pytest.raises(tq.Timeout):
        part.fetch("t", 3, max_priority=2, timeout=0)
    assert part.fetch("t", 2, min_version=3)["x"].values.tolist() == [4, 5]
    assert part.fetch("t", 3, timeout=0, partial=True)["x"].values.tolist() == [2, 0]
    with pytest.raises(tq.Timeout):
        part.fetch("t", 1, timeout=0, partial=True)


def test_lapsed_lease_returns_samples_and_its_ack_is_refused(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(3)})
    late = part.fetch("t", 3, lease_seconds=0.05)
    again = part.fetch("t", 3, timeout=20)  # waits for the lease to lapse
    assert again.ids.tolist() == ids.tolist()
    with pytest.raises(tq.StaleLease):
        late.ack()
    again.extend_lease(60)
    again.ack()
    assert part.ledger("t").acked == set(ids.tolist())


def test_nack_and_leaving_a_stream_return_samples_in_their_place(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(6)})
    batch = part.fetch("t", 2)
    batch.nack()
    seen = []
    for batch in part.stream("t", 2):
        seen.append(batch["x"].values.tolist())
        if len(seen) == 2:
            break
        batch.ack()
    part.close()
    rest = [batch["x"].values.tolist() for batch in part.stream("t", 3)]
    assert (seen, rest) == ([[0, 1], [2, 3]], [[2, 3, 4], [5]])


def test_close_ends_puts_and_drained_fetches(store: tq.Server, queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(3)})
    assert not part.closed
    part.close()
    part.close()
    assert part.closed
    with pytest.raises(tq.Closed):
        part.put({"x": np.arange(3)})
    batch = part.fetch("t", 10)
    assert batch.ids.tolist() == ids.tolist()
    with pytest.raises(tq.Closed):
        part.fetch("t", 1)  # the rest is ours already
    with tq.connect(store) as other, pytest.raises(tq.Timeout):
        other.partition(name).fetch("t", 1, timeout=0)  # leased to somebody else: it may come back
    batch.ack()
    with pytest.raises(tq.Closed):
        part.fetch("t", 1)


def test_a_parked_fetch_ends_when_the_stream_does(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ended = threading.Event()

    def consume() -> None:
        assert [batch["x"].values.tolist() for batch in part.stream("t", 2)] == []
        ended.set()

    consumer = threading.Thread(target=consume)
    consumer.start()
    part.close()
    assert ended.wait(20)
    consumer.join(20)


def test_full_waits_then_raises_and_room_wakes_the_put(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=4, max_bytes="1MiB")
    part.put({"x": np.arange(3)})
    with pytest.raises(tq.Full):
        part.put({"x": np.arange(2)}, timeout=0.05)
    with pytest.raises(tq.TooLarge):
        part.put({"x": np.arange(5)})
    with pytest.raises(tq.TooLarge):
        part.put({"x": np.arange(1), "pad": [b"0" * 2**20]})
    with pytest.raises(tq.Full):
        part.put({"x": np.arange(1), "pad": [b"0" * (2**20 - 128)]}, timeout=0)
    got: list[np.ndarray] = []
    producer = threading.Thread(target=lambda: got.append(part.put({"x": np.arange(2)}, timeout=30)))
    producer.start()
    part.fetch("t", 3).ack()
    producer.join(20)
    assert len(got[0]) == 2


def test_store_wide_byte_limit() -> None:
    with tq.serve(1, max_bytes="64KiB") as server, tq.connect(server) as queue:
        first, second = (queue.partition(name, tasks={"t": ["x"]}) for name in ("a", "b"))
        ids = first.put({"x": [b"1" * 40_000]})
        with pytest.raises(tq.Full):
            second.put({"x": [b"1" * 40_000]}, timeout=0)
        with pytest.raises(tq.TooLarge):
            second.put({"x": [b"1" * 70_000]}, timeout=0)
        first.drop(ids, "no use")
        second.put({"x": [b"1" * 40_000]}, timeout=20)


def test_groups_are_whole_also_across_puts_and_with_tombstones(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.array([0, 10])}, groups=["a", "b"])
    part.put({"x": np.array([1, 11])}, groups=["a", "b"])
    with pytest.raises(tq.Timeout):
        part.fetch("t", 3, sampler=Groups(3), timeout=0)
    part.put({"x": np.array([12])}, groups=["b"])
    batch = part.fetch("t", 3, sampler=Groups(3))
    assert (batch.groups, batch["x"].values.tolist()) == (["b"] * 3, [10, 11, 12])
    part.close_group("a", 3, tombstones=1)
    batch = part.fetch("t", 3, sampler=Groups(3))
    assert (batch.groups, batch["x"].values.tolist()) == (["a"] * 2, [0, 1])
    part.put({"x": np.arange(2)}, groups=["c", "c"], group_sizes={"c": 2})
    assert part.fetch("t", 3, sampler=Groups(3)).groups == ["c", "c"]
    with pytest.raises(tq.GroupMismatch):
        part.put({"x": np.arange(4)}, groups=["d"] * 4)
    with pytest.raises(tq.GroupMismatch):
        part.put({"x": np.arange(1)}, groups=["c"])
    with pytest.raises(tq.InvalidArgument):
        part.fetch("t", 4, sampler=Groups(3))


def test_a_dropped_member_does_not_hold_up_its_group(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(3)}, groups=["g"] * 3)
    part.drop(ids[1:2], "too long")
    part.drop(ids[1:2], "again")
    assert part.fetch("t", 3, sampler=Groups(3))["x"].values.tolist() == [0, 2]
    assert part.ledger("t").dropped == {int(ids[1]): "too long"}


def test_drop_takes_samples_out_of_leases(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"a": ["x"], "b": ["x"]})
    ids = part.put({"x": np.arange(3)})
    part.fetch("b", 1).ack()
    batch = part.fetch("a", 3)
    part.drop(ids[:2], "bad")
    batch.ack()
    assert part.ledger("a").acked == {int(ids[2])}
    assert part.ledger("a").dropped == {int(ids[0]): "bad", int(ids[1]): "bad"}
    assert part.ledger("b").acked == {int(ids[0])}
    assert part.ledger("b").dropped == {int(ids[1]): "bad"}
    assert part.ledger("b").pending == [int(ids[2])]
    with pytest.raises(tq.UnknownSample):
        part.drop([int(ids[2]), 5], "one of them unknown")
    assert part.ledger("b").pending == [int(ids[2])]


def test_shared_values_are_stored_once_and_come_back_shared(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x", "image"]})
    image = np.arange(4 * 50_000, dtype=np.float32).reshape(4, 50_000)
    before = queue.stats().memory.used
    part.put({"x": np.arange(5)}, shared={"image": ([image, image[:2]], [0, 0, 1, None, 0])})
    assert queue.stats().memory.used - before < 1.6 * image.nbytes
    batch = part.fetch("t", 5)
    column = batch["image"]
    assert len(column) == 5
    assert column[3] is None
    np.testing.assert_array_equal(column[0], image)
    np.testing.assert_array_equal(column[2], image[:2])
    assert np.shares_memory(column[0], column[4])
    assert not column[0].flags.writeable
    np.testing.assert_array_equal(column.expand().values, np.concatenate([image, image, image[:2], image]))
    batch.nack()
    one = part.fetch("t", 3)
    assert one["image"].stored == 2
    np.testing.assert_array_equal(one["image"][1], image)


def test_schema_is_fixed_by_the_first_write(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": [None, None]})
    part.put({"x": tokens(2)})
    for wrong, got in (
        ([np.zeros(2, np.int64)], "int64[*]"),
        ([np.zeros((2, 2), np.int32)], "int32[*, 2]"),
        (np.zeros(1, np.int32), "int32"),
        (["text"], "str"),
    ):
        with pytest.raises(tq.SchemaMismatch) as caught:
            part.put({"x": wrong})
        assert (caught.value.field, caught.value.got, caught.value.expected) == ("x", got, "int32[*]")
    with pytest.raises(tq.SchemaMismatch):
        part.update(ids, {"x": np.zeros(2)})
    with pytest.raises(tq.SchemaMismatch):
        queue.partition(name, tasks={"t": ["y"]})
    with pytest.raises(tq.SchemaMismatch):
        queue.partition(name, max_samples=3)
    assert queue.partition(name).tasks == {"t": ("x",)}
    with pytest.raises(tq.UnknownName):
        queue.partition(name + " unknown")
    with pytest.raises(tq.UnknownName):
        part.fetch("nobody", 1, timeout=0)


def test_a_fetch_of_an_unwritten_field_returns_the_lease(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(1)})
    with pytest.raises(tq.FieldNotReady):
        part.fetch("t", 1, fields=["x", "later"])
    assert len(part.fetch("t", 1, timeout=20)) == 1


def test_zero_rows(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    assert part.put({"x": np.empty((0, 3), np.int32)}).tolist() == []
    part.update([], {"x": np.empty((0, 3), np.int32)})
    assert part.get([]) == {}
    part.drop([], "nothing")


def test_updating_again_takes_the_new_value(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x", "y"]})
    ids = part.put({"x": np.arange(4)})
    part.update(ids, {"y": np.arange(4)})
    part.update(ids[2:3], {"y": np.array([70])})
    assert part.get(ids, ["y"])["y"].values.tolist() == [0, 1, 70, 3]
    assert part.fetch("t", 4)["y"].values.tolist() == [0, 1, 70, 3]
    with pytest.raises(tq.UnknownSample):
        part.update([int(ids[0]), 1 << 62], {"y": np.arange(2)})
    with pytest.raises(tq.InvalidArgument):
        part.update([int(ids[0])] * 2, {"y": np.arange(2)})


def test_closing_a_client_returns_its_leases(store: tq.Server, queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(2)})
    with tq.connect(store) as other:
        other.partition(name).fetch("t", 2)
    assert len(part.fetch("t", 2, timeout=20)) == 2
    with pytest.raises(tq.QueueError, match="closed"):
        other.partition(name)


def test_what_cannot_be_sent_is_named_and_the_client_goes_on(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    for call in (
        lambda: part.put({"x": np.arange(1)}, groups=["\ud800"]),
        lambda: part.put({"x": np.arange(1)}, version=1 << 63),
        lambda: part.put({"x": np.arange(1)}, priority=[-(1 << 64)]),
        lambda: part.put({"x": np.arange(2)}, version=[1]),
        lambda: part.put({"x": np.arange(2)}, groups=["g"]),
        lambda: part.fetch("t", 1, max_priority=1 << 70),
        lambda: part.fetch("t", 0),
        lambda: part.fetch("t", 1, lease_seconds=0),
        lambda: part.close_group("g", 1, tombstones=2),
        lambda: part.update([1, 1], {"x": np.arange(2)}),
    ):
        with pytest.raises(tq.InvalidArgument):
            call()
    assert queue.stats().partitions[name].nbytes == 0
    part.put({"x": np.arange(1)}, timeout=float("inf"))
    assert len(part.fetch("t", 1, timeout=float("inf"), lease_seconds=1e300)) == 1


def test_a_batch_keeps_its_client_and_the_last_reference_closes_it(
    store: tq.Server, queue: tq.Client, name: str, eventually: Eventually
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(4)})
    clients = queue.stats().clients
    for transport in ("shm", "zmq"):
        batch = tq.connect(store, transport=transport).partition(name).fetch("t", 1)
        batch.ack()
        batch = tq.connect(store, transport=transport).partition(name).fetch("t", 1)
        del batch
        assert len(part.fetch("t", 1, timeout=20)) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "transferqueue-link"]
    eventually(lambda: queue.stats().clients == clients)  # the last has said goodbye to a busy controller


def test_many_threads_share_a_client(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=64)
    seen: list[int] = []

    def produce(start: int) -> None:
        for value in range(start, start + 50, 5):
            part.put({"x": np.arange(value, value + 5)})

    def consume() -> None:
        for batch in part.stream("t", 7):
            seen.extend(batch["x"].values.tolist())
            batch.ack()

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    producers = [threading.Thread(target=produce, args=(start,)) for start in range(0, 300, 50)]
    for thread in consumers + producers:
        thread.start()
    for thread in producers:
        thread.join(30)
    part.close()
    for thread in consumers:
        thread.join(30)
    assert sorted(seen) == list(range(300))
    assert len(part.ledger("t").acked.intervals) <= 2


def test_nothing_runs_while_nothing_happens(store: tq.Server, queue: tq.Client, name: str) -> None:
    psutil = pytest.importorskip("psutil")
    part = queue.partition(name, tasks={"t": ["x"]})
    with pytest.raises(tq.Timeout):
        part.fetch("t", 1, timeout=0)
    processes = [psutil.Process(process.pid) for process in store.processes]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    own = time.process_time()
    with pytest.raises(tq.Timeout):
        part.fetch("t", 1, timeout=1)
    assert time.process_time() - own < 0.5  # a loop would use all of the second
    assert [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)] == pytest.approx(
        [0] * 3, abs=0.5
    )
    assert all(process.memory_info().rss < 80e6 for process in processes)
