"""Through a real store: what a fetch may ask for beyond the next samples in order."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.samplers import Balanced, Freshest, Groups, TokenBudget


def tokens(lengths: Sequence[int]) -> dict[str, list[np.ndarray]]:
    return {"tokens": [np.full(length, length, np.int32) for length in lengths]}


def test_a_token_budget_packs_micro_batches(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["tokens"]}, length_field="tokens")
    part.put(tokens([5, 4, 9, 20, 1, 1]))
    part.close()
    lengths = []
    for batch in part.stream("t", 16, sampler=TokenBudget(10)):
        lengths.append(batch["tokens"].lengths.tolist())
        batch.ack()
    assert lengths == [[5, 4], [9], [20], [1, 1]]


def test_a_length_sampler_needs_to_know_lengths(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["tokens"]})
    part.put(tokens([5]))
    with pytest.raises(tq.InvalidArgument, match="length_field"):
        part.fetch("t", 1, sampler=TokenBudget(10))


def test_lengths_are_elements_or_the_numbers_themselves(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["cost"]}, length_field="cost")
    part.put({"cost": np.array([3, 4, 5], np.int32)})
    assert part.fetch("t", 3, sampler=TokenBudget(7))["cost"].values.tolist() == [3, 4]
    other = queue.partition(name + "2", tasks={"t": ["tokens"]}, length_field="tokens")
    for rows in ([[1, 2], [3]], ["text"], np.array([0.5])):
        with pytest.raises(tq.InvalidArgument, match="length_field"):
            other.put({"tokens": rows})


def test_rows_of_any_shape_share_a_field(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["image"]})
    images = [np.full((2, width, 3), width, np.uint8) for width in (4, 5)]
    part.put({"image": tq.Varying(images)})
    part.put({"image": tq.Varying([np.zeros((2, 3, 3), np.uint8)] * 2)})
    part.put({"image": [np.ones((1, 3, 3), np.uint8)] * 2})
    batch = part.fetch("t", 6)
    assert [row.shape for row in batch["image"]] == [(2, 4, 3), (2, 5, 3), *[(2, 3, 3)] * 2, *[(1, 3, 3)] * 2]
    with pytest.raises(tq.SchemaMismatch, match="Varying"):
        part.put({"image": np.zeros((1, 3, 3), np.int32)})


def test_the_freshest_come_first(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(4)}, version=[1, 3, 2, 3])
    assert part.fetch("t", 4, sampler=Freshest())["x"].values.tolist() == [1, 3, 2, 0]


def test_staleness_counts_from_the_newest_version(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(3)}, version=[5, 6, 7])
    assert part.fetch("t", 2, max_staleness=1)["x"].values.tolist() == [1, 2]
    part.advance(9)
    part.put({"x": np.arange(1)}, version=8)
    with pytest.raises(tq.Timeout):
        part.fetch("t", 1, max_staleness=0, timeout=0)
    assert part.fetch("t", 1, max_staleness=1)["x"].values.tolist() == [0]


def test_a_function_chooses(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["tokens"]}, length_field="tokens")
    part.put(tokens([3, 1, 2]))

    def shortest(candidates: Sequence, batch_size: int) -> list[int]:
        return [c.id for c in sorted(candidates, key=lambda c: c.length)[:batch_size]]

    assert part.fetch("t", 2, sampler=shortest)["tokens"].lengths.tolist() == [1, 2]
    with pytest.raises(tq.InvalidArgument, match=r"each sample once|given twice"):
        part.fetch("t", 1, sampler=lambda candidates, _: [candidates[0].id] * 2)
    with pytest.raises(tq.InvalidArgument, match="function"):
        part.fetch("t", 1, sampler="shortest")  # type: ignore[arg-type]


def test_functions_of_many_consumers_never_choose_the_same(store: tq.Server, name: str) -> None:
    with tq.connect(store) as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        part.put({"x": np.arange(60)})
        part.close()
        seen: list[int] = []

        def consume() -> None:
            for batch in part.stream("t", 2, sampler=lambda c, n: [one.id for one in c[:n]]):
                seen.extend(batch["x"].values.tolist())
                batch.ack()

        threads = [threading.Thread(target=consume) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(seen) == list(range(60))


def test_ranks_get_equal_parts_and_equally_many_micro_batches(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["tokens"]}, length_field="tokens")
    part.put(tokens([9, 1, 8, 2, 7, 3, 6, 4]))
    part.close()
    sampler = Balanced(token_budget=12)
    got: list[list[list[int]]] = []
    for rank in range(2):
        rounds: list[list[int]] = []
        last = []
        for batch in part.stream("t", 8, sampler=sampler, rank=rank, world_size=2):
            rounds.append(batch["tokens"].lengths.tolist())
            last.append(batch.is_last)
            assert batch.round == len(rounds) - 1
            batch.ack()
        assert last == [False] * (len(rounds) - 1) + [True]
        got.append(rounds)
    assert len(got[0]) == len(got[1])
    assert [sum(map(len, rounds)) for rounds in got] == [4, 4]
    assert [sum(map(sum, rounds)) for rounds in got] == [20, 20]


def test_sharers_get_the_same_bytes_and_all_must_ack(queue: tq.Client, store: tq.Server, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(4)})
    with tq.connect(store, transport="zmq") as other:
        first = part.fetch("t", 4, key="step-1", sharers=2)
        second = other.partition(name).fetch("t", 4, key="step-1", sharers=2)
        assert first.ids.tolist() == second.ids.tolist()
        assert first["x"].values.tolist() == second["x"].values.tolist()
        first.ack()
        assert len(part.ledger("t").leased) == 4
        second.ack()
        assert len(part.ledger("t").acked) == 4


def test_admission_keeps_room_for_what_is_being_made(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=8, max_staleness=1)
    ticket = part.admit(0, 6)
    with pytest.raises(tq.Full, match="promised"):
        part.admit(0, 3, timeout=0)
    with pytest.raises(tq.Full):
        part.put({"x": np.arange(3)}, timeout=0)
    part.put({"x": np.arange(6)}, ticket=ticket)
    part.put({"x": np.arange(2)})
    with pytest.raises(tq.Full):
        part.put({"x": np.arange(1)}, timeout=0)
    part.fetch("t", 8).ack()
    part.advance(3)
    with pytest.raises(tq.InvalidArgument, match="behind"):
        part.admit(1, 1)
    part.admit(2, 8)


def test_a_waiting_admission_is_served_when_there_is_room(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=4)
    part.put({"x": np.arange(4)})
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(part.admit(0, 2, timeout=30)))
    waiting.start()
    part.fetch("t", 4).ack()
    waiting.join(30)
    assert len(got) == 1
    part.put({"x": np.arange(2)}, ticket=got[0], groups=["a", "a"])
    assert part.fetch("t", 2, sampler=Groups(2)).groups == ["a", "a"]


async def test_the_async_client_asks_alike(store: tq.Server, name: str) -> None:
    async with await tq.connect_async(store) as queue:
        part = await queue.partition(name, tasks={"t": ["tokens"]}, length_field="tokens", max_samples=8)
        ticket = await part.admit(1, 3)
        await part.put(tokens([5, 4, 9]), ticket=ticket, version=1)
        await part.advance(2)
        batch = await part.fetch("t", 8, sampler=TokenBudget(9), max_staleness=1)
        assert batch["tokens"].lengths.tolist() == [5, 4]
        await batch.ack()
        chosen = await part.fetch("t", 1, sampler=lambda candidates, n: [candidates[0].id])
        assert chosen["tokens"].lengths.tolist() == [9]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_stream_that_asks_in_advance_delivers_the_same(store: tq.Server, transport: str, name: str) -> None:
    with tq.connect(store, transport=transport) as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        for start in range(0, 40, 4):
            part.put({"x": np.arange(start, start + 4)})
        seen: list[int] = []
        for batch in part.stream("t", 3, prefetch=2):
            seen.extend(batch["x"].values.tolist())
            batch.ack()
            if len(seen) >= 12:
                break
        assert seen == list(range(12))
        part.close()
        for batch in part.stream("t", 3, prefetch=2):  # what was asked for in advance has come back
            seen.extend(batch["x"].values.tolist())
            batch.ack()
        assert seen == list(range(40))


async def test_an_async_stream_asks_in_advance(store: tq.Server, name: str) -> None:
    async with await tq.connect_async(store) as queue:
        part = await queue.partition(name, tasks={"t": ["x"]})
        await part.put({"x": np.arange(10)})
        await part.close()
        seen: list[int] = []
        async for batch in part.stream("t", 4, prefetch=1):
            seen.extend(batch["x"].values.tolist())
            await batch.ack()
        assert seen == list(range(10))


def test_a_batch_that_was_given_back_is_not_acked_in_silence(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(4)})
    batch = next(iter(part.stream("t", 2)))  # the stream is left at once
    with pytest.raises(tq.StaleLease, match="given back"):
        batch.ack()
    other = part.fetch("t", 2)
    other.nack()
    with pytest.raises(tq.StaleLease, match="given back"):
        other.ack()
    assert len(part.ledger("t").pending) == 4


def test_a_function_that_chooses_what_it_was_not_offered_is_told(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(4)})
    for returned in ([1, 2], None, ["x"], [int(ids[0]) + 99]):
        with pytest.raises((tq.InvalidArgument, ValueError)):
            part.fetch("t", 2, sampler=lambda _, __, it=returned: it, timeout=1)  # type: ignore[arg-type]
    assert len(part.fetch("t", 2, sampler=lambda candidates, n: candidates[:n])) == 2


def test_a_timeout_says_what_is_missing(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x", "advantages"]})
    part.put({"x": np.arange(3), "advantage": np.arange(3)}, version=1)
    with pytest.raises(tq.Timeout, match="missing 'advantages' in 3"):
        part.fetch("t", 2, timeout=0)
    part.put({"x": np.arange(2), "advantages": np.arange(2)}, version=1)
    part.advance(5)
    with pytest.raises(tq.Timeout, match=r"2 ready.*versions of at least 4.*max_staleness 1"):
        part.fetch("t", 2, timeout=0, max_staleness=1)
    with pytest.raises(tq.Timeout, match="5 samples without a group key"):
        part.fetch("t", 2, timeout=0, sampler=Groups(2))
    batch = part.fetch("t", 2)
    with pytest.raises(tq.Timeout, match="2 leased and not acked"):
        part.fetch("t", 2, timeout=0)
    batch.ack()


def test_text_where_a_list_is_meant_is_refused(store: tq.Server, queue: tq.Client, name: str) -> None:
    with pytest.raises(tq.InvalidArgument, match="give a list"):
        queue.partition(name, tasks={"t": "tokens"})
    for tasks in ({}, ["t"]):
        with pytest.raises(tq.InvalidArgument, match="consumer group"):
            queue.partition(name, tasks=tasks)  # type: ignore[arg-type]
    part = queue.partition(name, tasks={"t": ["x"]})
    with pytest.raises(tq.InvalidArgument, match="key for each sample"):
        part.put({"x": np.arange(3)}, groups="abc")
    for address in (5555, "http://127.0.0.1:1", "127.0.0.1", "tcp://127.0.0.1:1/"):
        with pytest.raises(tq.InvalidArgument, match="address"):
            tq.connect(address)  # type: ignore[arg-type]
    with tq.connect(store.address.removeprefix("tcp://")) as other:
        assert other.stats().uptime > 0
        closed = other.partition(name)
    for rows in (1, 100_000):
        with pytest.raises(tq.QueueError, match="closed"):
            closed.put({"x": np.arange(rows)})


def test_full_names_the_room_that_tickets_hold(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=4)
    part.admit(0, 3)
    with pytest.raises(tq.Full, match=r"0 samples and 3 promised to tickets.*of at most 4"):
        part.put({"x": np.arange(2)}, timeout=0)
