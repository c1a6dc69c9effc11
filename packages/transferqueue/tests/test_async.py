"""The awaitable client does what the blocking one does."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.samplers import Groups


async def test_the_whole_flow(store: tq.Server, name: str) -> None:
    async with await tq.connect_async(store) as queue:
        part = await queue.partition(name, tasks={"a": ["x"], "b": ["x", "y"]})
        waiting = asyncio.create_task(part.fetch("b", 4, sampler=Groups(2)))
        ids = await asyncio.gather(*(part.put({"x": np.arange(2)}, groups=[f"g{i}"] * 2) for i in range(4)))
        for batch_ids in ids[:2]:
            await part.update(batch_ids, {"y": np.arange(2)})
        batch = await waiting
        assert batch.groups == ["g0", "g0", "g1", "g1"]
        await batch.extend_lease(60)
        await batch.ack()
        await part.drop(ids[3], "no use")
        assert (await part.get(ids[2], ["x"]))["x"].values.tolist() == [0, 1]
        await part.close_group("g9", 2, tombstones=2)
        ledger = await part.ledger("b")
        assert ledger.acked == set(batch.ids.tolist())
        assert set(ledger.dropped) == set(ids[3].tolist())
        await part.close()
        assert await part.closed()
        seen = 0
        async for one in part.stream("a", 4):
            seen += len(one)
            await one.ack()
        assert seen == 6
        assert (await queue.stats()).partitions[name].tasks["a"].acked == 6


async def test_cancelling_a_fetch_leaves_nothing_leased(store: tq.Server, name: str) -> None:
    async with await tq.connect_async(store) as queue:
        part = await queue.partition(name, tasks={"t": ["x"]})
        for rows in (0, 2):
            fetch = asyncio.create_task(part.fetch("t", 2, timeout=60))
            while not (await queue.stats()).waiting_fetches:
                assert not fetch.done()
            if rows:
                await part.put(
                    {"x": np.arange(rows)}
                )  # may be leased to the fetch just before it is cancelled
            fetch.cancel()
            await asyncio.wait([fetch])
            if not fetch.cancelled():
                await fetch.result().nack()
        assert len(await part.fetch("t", 2, timeout=20)) == 2


async def test_leaving_a_stream_returns_the_batch(store: tq.Server, name: str) -> None:
    async with await tq.connect_async(store) as queue:
        part = await queue.partition(name, tasks={"t": ["x"]})
        await part.put({"x": np.arange(4)})
        async with aclosing(part.stream("t", 2)) as stream:
            async for batch in stream:
                assert batch["x"].values.tolist() == [0, 1]
                break
        assert (await part.fetch("t", 4))["x"].values.tolist() == [0, 1, 2, 3]


async def test_errors_are_the_same(store: tq.Server, name: str) -> None:
    queue = await tq.connect_async(store)
    with pytest.raises(tq.UnknownName):
        await queue.partition(name)
    part = await queue.partition(name, tasks={"t": ["x"]})
    with pytest.raises(tq.Timeout):
        await part.fetch("t", 1, timeout=0)
    await queue.close()
    await queue.close()
    with pytest.raises(tq.QueueError, match="closed"):
        await part.put({"x": np.arange(1)})
    with pytest.raises(tq.ControllerLost):
        await tq.connect_async("tcp://127.0.0.1:1", reconnect_seconds=0.1)
