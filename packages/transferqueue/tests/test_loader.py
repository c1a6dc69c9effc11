"""Loaders over a real store: what the loop gets, and what is acked and given back when."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.client.loader import AsyncStreamingDataLoader, StreamingDataLoader


@pytest.fixture
def part(queue: tq.Client, name: str) -> tq.Partition:
    return queue.partition(name, tasks={"t": ["tokens"]}, length_field="tokens")


def put(
    part: tq.Partition, lengths: Sequence[int], *, group: int | None = None, version: int = 0
) -> list[int]:
    groups = None if group is None else [f"g{at // group}" for at in range(len(lengths))]
    rows = [np.full(length, at, np.int32) for at, length in enumerate(lengths)]
    return part.put({"tokens": rows}, groups=groups, version=version).tolist()


def acked(part: tq.Partition) -> set[int]:
    return set(part.ledger("t").acked)


def pending(part: tq.Partition) -> set[int]:
    return set(part.ledger("t").pending)


def test_a_loop_gets_every_sample_once_and_ends_with_the_stream(part: tq.Partition) -> None:
    ids = put(part, [3, 1, 2, 5, 4])
    part.close()
    loader = StreamingDataLoader(part, "t", batch_size=2)
    seen = []
    for batch in loader:
        seen.append(batch.ids.tolist())
        assert [len(row) for row in batch["tokens"]] == [[3, 1, 2, 5, 4][ids.index(s)] for s in batch.ids]
    assert seen == [ids[:2], ids[2:4], ids[4:]]
    assert acked(part) == set(ids)
    assert list(loader) == []


def test_a_batch_is_acked_when_the_next_is_asked_for(part: tq.Partition) -> None:
    ids = put(part, [1] * 4)
    batches = iter(StreamingDataLoader(part, "t", batch_size=2))
    next(batches)
    assert acked(part) == set()
    next(batches)
    assert acked(part) == set(ids[:2])


def test_leaving_early_gives_back_what_is_not_acked(part: tq.Partition) -> None:
    ids = put(part, [1] * 6)
    loader = StreamingDataLoader(part, "t", batch_size=2)
    for at, _ in enumerate(loader):
        if at == 1:
            break
    assert (acked(part), pending(part)) == (set(ids[:2]), set(ids[2:]))

    def fail() -> None:
        for _ in loader:
            raise RuntimeError("the trainer is broken")

    with pytest.raises(RuntimeError):
        fail()
    assert pending(part) == set(ids[2:])
    for _ in loader:
        loader.ack()
        break
    assert acked(part) == set(ids[:4])


def test_a_loop_that_acks_itself_is_not_helped(part: tq.Partition) -> None:
    ids = put(part, [1] * 4)
    part.close()
    held = [batch for batch in StreamingDataLoader(part, "t", batch_size=2, ack="manual") if batch]
    assert (acked(part), pending(part)) == (set(), set())
    held[0].ack()
    assert acked(part) == set(ids[:2])


def test_a_lapsed_batch_is_told_and_the_others_go_back(part: tq.Partition) -> None:
    put(part, [1] * 4)
    loader = StreamingDataLoader(part, "t", batch_size=2, lease_seconds=0.05)

    def train() -> None:
        for batch in loader:
            other = part.fetch("t", 4, timeout=20)  # all four are ready once the lease has lapsed
            assert set(batch.ids) < set(other.ids)
            other.ack()

    with pytest.raises(tq.StaleLease):
        train()


def test_a_token_budget_needs_no_batch_size(part: tq.Partition) -> None:
    put(part, [4, 4, 9, 2])
    part.close()
    lengths = [
        [len(row) for row in batch["tokens"]] for batch in StreamingDataLoader(part, "t", token_budget=8)
    ]
    assert lengths == [[4, 4], [9], [2]]


def test_groups_stay_whole(part: tq.Partition) -> None:
    put(part, [3] * 6, group=2)
    part.close()
    batches = list(StreamingDataLoader(part, "t", token_budget=13, group_size=2, ack="manual"))
    assert [len(batch) for batch in batches] == [4, 2]


def ranks(loaders: list[StreamingDataLoader]) -> list[list[Any]]:
    """What every rank's loop sees, each in a thread of its own."""
    seen: list[list[Any]] = [[] for _ in loaders]
    threads = [
        threading.Thread(target=lambda at=at, loader=loader: seen[at].extend(loader))
        for at, loader in enumerate(loaders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return seen


def test_every_rank_gets_equally_many_batches(part: tq.Partition) -> None:
    ids = put(part, [5, 1, 1, 7, 2, 2, 3, 9, 1, 1, 1])
    part.close()
    seen = ranks([StreamingDataLoader(part, "t", token_budget=9, rank=rank, world_size=2) for rank in (0, 1)])
    assert len(seen[0]) == len(seen[1])
    real = [s for batches in seen for batch in batches if not batch.dummy for s in batch.ids.tolist()]
    assert sorted(real) == sorted(ids)
    assert acked(part) == set(ids)
    assert all(batch["tokens"] is not None for batches in seen for batch in batches)


def test_a_rank_that_goes_away_and_comes_back_meets_the_others_again(
    store: tq.Server, part: tq.Partition, name: str
) -> None:
    ids = put(part, [1] * 9)
    stayed = iter(StreamingDataLoader(part, "t", batch_size=1, rank=0, world_size=2))
    first = next(stayed)
    with tq.connect(store) as leaving:
        loop = iter(StreamingDataLoader(leaving.partition(name), "t", batch_size=1, rank=1, world_size=2))
        given_up = next(loop).ids.tolist()
    part.close()
    with tq.connect(store) as back:
        loader = StreamingDataLoader(back.partition(name), "t", batch_size=1, rank=1, world_size=2)
        seen = ranks([stayed, loader])  # type: ignore[list-item]
    assert first.ids.tolist() == ids[:1]
    assert given_up == ids[1:2]
    assert len(seen[0]) == len(seen[1]) == 4
    assert acked(part) == set(ids)


def test_a_balanced_step_is_acked_as_a_whole(part: tq.Partition) -> None:
    ids = put(part, [8, 1, 2, 7, 6, 3, 4, 5])
    loaders = [
        StreamingDataLoader(
            part, "t", batch_size=8, token_budget=9, balanced=True, rank=rank, world_size=2, key="step-0"
        )
        for rank in (0, 1)
    ]
    loops = [iter(loader) for loader in loaders]
    steps: list[list[tq.Batch]] = []
    for loop in loops:
        step: list[tq.Batch] = []
        while not step or not step[-1].is_last:
            step.append(next(loop))
        steps.append(step)
    assert len(steps[0]) == len(steps[1]) > 1
    totals = [sum(len(row) for batch in step for row in batch["tokens"]) for step in steps]
    assert totals == [18, 18]
    assert acked(part) == set()
    part.close()
    for loop in loops:
        with pytest.raises(StopIteration):
            next(loop)
    assert acked(part) == set(ids)


def test_a_step_that_is_left_half_way_goes_back_whole(part: tq.Partition) -> None:
    ids = put(part, [4] * 8)
    loader = StreamingDataLoader(part, "t", batch_size=2, global_batch=4)
    for at, batch in enumerate(loader):
        assert batch.is_last == bool(at % 2)
        if at == 2:
            break
    assert (acked(part), pending(part)) == (set(ids[:4]), set(ids[4:]))


def test_sharers_get_the_same_batches(
    queue: tq.Client, store: tq.Server, part: tq.Partition, name: str
) -> None:
    ids = put(part, [1] * 4)
    part.close()
    with tq.connect(store) as other:
        parts = [part, other.partition(name)]
        seen = ranks([StreamingDataLoader(p, "t", batch_size=2, sharers=2) for p in parts])
    assert [batch.ids.tolist() for batch in seen[0]] == [ids[:2], ids[2:]]
    assert [batch.ids.tolist() for batch in seen[1]] == [ids[:2], ids[2:]]
    assert acked(part) == set(ids)


def test_stale_samples_are_passed_over(part: tq.Partition) -> None:
    put(part, [1, 1], version=0)
    fresh = put(part, [1, 1], version=3)
    part.close()
    seen = [batch.ids.tolist() for batch in StreamingDataLoader(part, "t", batch_size=4, max_staleness=1)]
    assert seen == [fresh]


def test_a_function_chooses_what_a_batch_is_made_of(part: tq.Partition) -> None:
    put(part, [1, 5, 3, 4])
    part.close()

    def longest(candidates: Sequence[Any], batch_size: int) -> list[int]:
        return [one.id for one in sorted(candidates, key=lambda one: -one.length)[:batch_size]]

    lengths = [
        [len(row) for row in batch["tokens"]]
        for batch in StreamingDataLoader(part, "t", batch_size=2, sampler=longest)
    ]
    assert lengths == [[5, 4], [3, 1]]


def test_a_collate_function_makes_what_the_loop_gets(part: tq.Partition) -> None:
    put(part, [2, 2])
    part.close()

    def collate(batch: tq.Batch) -> np.ndarray:
        return np.stack(list(batch["tokens"]))

    [tokens] = StreamingDataLoader(part, "t", batch_size=2, collate_fn=collate)
    assert tokens.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"balanced": True, "token_budget": 8},
        {"batch_size": 2, "token_budget": 8, "sampler": tq.samplers.InOrder()},
        {"batch_size": 2, "ack": "step"},
        {"batch_size": 2, "ack": "later"},
    ],
)
def test_arguments_that_do_not_go_together_are_refused(part: tq.Partition, arguments: dict[str, Any]) -> None:
    with pytest.raises(tq.InvalidArgument):
        StreamingDataLoader(part, "t", **arguments)


async def test_the_async_loader_does_the_same(store: tq.Server, name: str) -> None:
    async with await tq.connect_async(store) as queue:
        part = await queue.partition(name, tasks={"t": ["tokens"]}, length_field="tokens")
        ids = (await part.put({"tokens": [np.zeros(2, np.int32)] * 6})).tolist()
        loader = AsyncStreamingDataLoader(part, "t", batch_size=2)
        async with aclosing(aiter(loader)) as batches:
            assert (await anext(batches)).ids.tolist() == ids[:2]
            assert (await anext(batches)).ids.tolist() == ids[2:4]
        ledger = await part.ledger("t")
        assert (set(ledger.acked), set(ledger.pending)) == (set(ids[:2]), set(ids[2:]))
        await part.close()
        loops = [
            AsyncStreamingDataLoader(part, "t", batch_size=1, rank=rank, world_size=2, global_batch=4)
            for rank in (0, 1)
        ]

        async def drain(loader: AsyncStreamingDataLoader) -> list[bool]:
            return [batch.is_last async for batch in loader]

        assert await asyncio.gather(*map(drain, loops)) == [[False, True]] * 2
        assert set((await part.ledger("t")).acked) == set(ids)
