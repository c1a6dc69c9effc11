"""The bus of a run: what has no room waits, what can never have room or is too old is refused by name."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from relax import schema
from relax.distributed.bus import Bus, BusFull, Endpoint
from relax.distributed.version_clock import VersionViolation

Config = Callable[..., Any]
Group = Callable[..., Any]
Queue = Callable[..., Endpoint]


async def advantages(bus: Bus, ids: np.ndarray, response: int = 5) -> None:
    await bus.partition.update(ids, {"advantages": [np.zeros(response, np.float32)] * len(ids)})


async def size_of(bus: Bus, samples: Any) -> int:
    """Bytes that a group takes, found by putting one like it."""
    ids = await bus.put_group(samples, step=0)
    payload = (await bus.usage()).payload
    await bus.partition.drop(ids, "measured")
    return payload


async def test_a_put_waits_for_room_and_goes_on_when_there_is_some(
    config: Config, group: Group, queue: Queue
) -> None:
    bus = await Bus.connect(queue(), config(), media=False)
    size = await size_of(bus, group(0))
    await bus.close()
    bus = await Bus.connect(queue(max_bytes=int(2.5 * size)), config(), media=False)
    try:
        ids = [await bus.put_group(group(ordinal), step=0) for ordinal in range(2)]
        waiting = asyncio.ensure_future(bus.put_group(group(2), step=0))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        assert (await bus.usage()).waiting_puts == 1
        await bus.partition.drop(ids[0], "to make room")
        assert len(await asyncio.wait_for(waiting, 10)) == 2
    finally:
        await bus.close()


async def test_no_room_until_the_deadline_names_the_limit_and_the_way_out(
    config: Config, group: Group, queue: Queue
) -> None:
    words = ("queue.max_bytes=1500", "queue.wait_seconds=0.2")
    bus = await Bus.connect(queue(max_bytes=1500), config(*words), media=False)
    try:
        with pytest.raises(
            BusFull, match=r"group 0000000\d of step 3 found no room on the bus for 0.2 s"
        ) as no:
            await asyncio.gather(*(bus.put_group(group(ordinal), step=3) for ordinal in range(4)))
        assert "queue.max_bytes = 1500" in str(no.value)
        assert "lower rollout.prompts_per_step" in str(no.value)
        with pytest.raises(BusFull, match=r"can never go on the bus: raise queue.max_bytes = 1500"):
            await bus.put_group(group(9, response=2000), step=3)
    finally:
        await bus.close()


async def test_a_step_is_admitted_once_the_one_it_has_to_follow_is_through(
    config: Config, group: Group, queue: Queue
) -> None:
    settings = config("max_staleness=1", "queue.wait_seconds=0.2", "rollout.prompts_per_step=1")
    bus = await Bus.connect(queue(), settings, media=False)
    try:
        await bus.advance(0)
        tickets = [await bus.admit_step(step, version=0) for step in range(2)]
        with pytest.raises(BusFull, match=r"no samples of step 2 for 0.2 s \(queue.wait_seconds\)"):
            await bus.admit_step(2, version=1)
        ids = await bus.put_group(group(0), 0, tickets[0])
        await advantages(bus, ids)
        for task in (schema.TASK_ADVANTAGES, schema.TASK_ACTOR):
            await (await bus.groups(task, 2)).ack()
        await bus.admit_step(2, version=1)
    finally:
        await bus.close()


async def test_a_start_on_weights_that_are_too_old_is_refused_by_name(config: Config, queue: Queue) -> None:
    bus = await Bus.connect(queue(), config("max_staleness=1"), media=False)
    try:
        await bus.advance(5)
        await bus.admit_step(5, version=4)
        with pytest.raises(VersionViolation, match=r"refuses step 5 on engines of version 3: .*clock"):
            await bus.admit_step(5, version=3)
    finally:
        await bus.close()


async def test_samples_that_are_too_old_are_not_given_out_but_named_and_dropped(
    config: Config, group: Group, queue: Queue
) -> None:
    bus = await Bus.connect(queue(), config("max_staleness=1"), media=False)
    try:
        await bus.advance(5)
        old, new = [await bus.put_group(group(v, version=v), step=5) for v in (3, 4)]
        for ids in (old, new):
            await advantages(bus, ids)
        batch = await bus.groups(schema.TASK_ACTOR, 2, most=2, up_to_step=5, max_staleness=1)
        assert batch.ids.tolist() == new.tolist()
        with pytest.raises(tq.Timeout):
            await bus.groups(schema.TASK_ACTOR, 2, up_to_step=5, max_staleness=1, timeout=0.1)
        with pytest.raises(
            VersionViolation, match=r"group 00000003 \(version 3\): older than max_staleness = 1"
        ):
            await bus.refuse_stale(schema.TASK_ACTOR, 5, oldest=4)
        dropped = (await bus.partition.ledger(schema.TASK_ACTOR)).dropped
        assert sorted(dropped) == sorted(old.tolist())
        assert all("takes version 4 and newer" in reason for reason in dropped.values())
    finally:
        await bus.close()


async def test_nothing_is_refused_that_is_only_late(config: Config, group: Group, queue: Queue) -> None:
    bus = await Bus.connect(queue(), config("max_staleness=1"), media=False)
    try:
        await bus.advance(5)
        await bus.refuse_stale(schema.TASK_ACTOR, 5, oldest=4)  # nothing is there
        await bus.put_group(group(0, version=3), step=5)
        await bus.refuse_stale(schema.TASK_ACTOR, 5, oldest=4)  # not ready: the advantages are missing
        await advantages(bus, await bus.put_group(group(1, version=4), step=5))
        await bus.refuse_stale(schema.TASK_ACTOR, 5, oldest=4)
        assert len(await bus.groups(schema.TASK_ACTOR, 2, up_to_step=5, max_staleness=1)) == 2
    finally:
        await bus.close()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
async def test_what_is_fetched_is_read_only_by_every_transport(
    config: Config, group: Group, queue: Queue, transport: str
) -> None:
    bus = await Bus.connect(queue(transport), config(), media=False)
    try:
        await advantages(bus, await bus.put_group(group(0, response=7), step=0))
        batch = await bus.groups(schema.TASK_ACTOR, 2)
        assert [row.tolist() for row in batch["tokens"]] == [list(range(10))] * 2
        with pytest.raises(ValueError, match="read-only"):
            batch["tokens"][0][0] = 1
    finally:
        await bus.close()
