"""How the groups of a step are cut into micro-batches, and that the trainer's own cut is the queue's."""

from collections.abc import AsyncIterator, Callable
from itertools import pairwise, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax import schema
from relax.distributed.bus import Bus, Endpoint
from relax.engine.micro_batches import chunked, groups_of, within

LENGTHS = [4, 1, 9, 2, 2, 30, 3, 1]


class Lengthy:
    """A group, as far as cutting goes."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens


async def each(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def test_runs_of_a_size_are_given_as_soon_as_they_are_whole() -> None:
    taken: list[int] = []

    async def source() -> AsyncIterator[Any]:
        for item in range(5):
            taken.append(item)
            yield item

    chunks = chunked(source(), repeat(2))
    assert await anext(chunks) == [0, 1]
    assert taken == [0, 1]
    assert [chunk async for chunk in chunks] == [[2, 3], [4]]


async def test_runs_follow_recorded_sizes() -> None:
    assert [chunk async for chunk in chunked(each([*range(6)]), iter([1, 3, 2]))] == [[0], [1, 2, 3], [4, 5]]


@given(lengths=st.lists(st.integers(1, 20), max_size=12), budget=st.integers(1, 30))
async def test_a_budget_is_kept_but_by_a_group_alone(lengths: list[int], budget: int) -> None:
    cut = [[g.tokens for g in chunk] async for chunk in within(each([Lengthy(n) for n in lengths]), budget)]
    assert [n for chunk in cut for n in chunk] == lengths
    assert all(sum(chunk) <= budget or len(chunk) == 1 for chunk in cut)
    for chunk, following in pairwise(cut):
        assert sum(chunk) + following[0] > budget  # no micro-batch could have taken one more


@pytest.mark.parametrize("budget", [1, 20, 26, 50, 1000])
async def test_the_trainers_cut_is_the_queues(
    config: Callable[..., Any], group: Callable[..., Any], queue: Callable[..., Endpoint], budget: int
) -> None:
    bus = await Bus.connect(queue(), config(f"rollout.prompts_per_step={len(LENGTHS)}"), media=False)
    try:
        for ordinal, response in enumerate(LENGTHS):
            ids = await bus.put_group(group(ordinal, response=response), step=0)
            await bus.partition.update(ids, {"advantages": [[0.0] * response] * 2})
        fetched, left = [], len(LENGTHS)
        while left:
            batch = await bus.groups(schema.TASK_ACTOR, 2, most=left, least=left, tokens=budget)
            fetched.append(groups_of(batch))
            left -= len(fetched[-1])
        together = [g for chunk in fetched for g in chunk]
        assert [g.tokens for g in together] == [2 * (3 + n) for n in LENGTHS]
        cut = [[g.ordinal for g in chunk] async for chunk in within(each(together), budget)]
        assert cut == [[g.ordinal for g in chunk] for chunk in fetched]
    finally:
        await bus.close()
