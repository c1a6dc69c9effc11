"""A reader looks at every byte of every version while the next ones arrive: none is torn or goes back."""

from concurrent.futures import ThreadPoolExecutor

import dcs
import pytest
import torch
from dcs.layout import shard

UPDATES = [150, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
SIZE = 40_000
WIRES = {
    "tcp": {"wires": ("tcp",), "chunk_bytes": 16 << 10},
    "shm": {"wires": ("shm",)},
    "tcp+delta": {"wires": ("tcp",), "chunk_bytes": 16 << 10, "delta": True},
}


def weights(version: int) -> dict[str, torch.Tensor]:
    """Every byte tells the version: all elements are its number, but for a few that never change."""
    tensor = torch.zeros(SIZE, dtype=torch.int32)
    tensor[: SIZE // 100] = version  # one in a hundred changes, so that differences are worth it
    tensor[-SIZE // 100 :] = version
    return {"a": tensor, "b": torch.full((64, 128), version, dtype=torch.int16)}


def number_of(tensors: dict[str, torch.Tensor]) -> set[int]:
    found: set[int] = set()
    for part in (tensors["a"][: SIZE // 100], tensors["a"][-SIZE // 100 :], tensors["b"]):
        found |= {int(part.min()), int(part.max())}
    assert not tensors["a"][SIZE // 100 : -SIZE // 100].any()
    return found


def watch(subscriber: dcs.Subscriber, last: int, seen: list[int], wires: set[str]) -> None:
    while not seen or seen[-1] < last:
        staged = subscriber.next(after=seen[-1] if seen else -1, timeout=30)
        assert staged is not None, subscriber.health()
        for _ in range(3):  # it stays what it is, while others arrive
            assert number_of(staged.tensors) == {staged.version}
        assert not seen or staged.version > seen[-1]
        seen.append(staged.version)
        wires.add(staged.wire)
        staged.ack()


@pytest.fixture
def coordinator():
    """Nobody is lost here: on a machine that is busy with other things nobody is to seem so either."""
    with dcs.Coordinator(lease_seconds=20.0) as running:
        yield running


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("wire", list(WIRES))
def test_no_version_is_torn_and_none_goes_back(publish_to, subscribe, stack, wire, updates):
    options = dict(WIRES[wire])
    common = {key: value for key, value in options.items() if key != "delta"}
    publisher = publish_to(weights(0), supersede_after=0.05, **common)
    readers = [subscribe(weights(0), f"reader-{index}", **options) for index in range(2)]
    seen, wires = [[], []], [set(), set()]
    pool = stack.enter_context(ThreadPoolExecutor(2))
    watching = [
        pool.submit(watch, readers[index], updates - 1, seen[index], wires[index]) for index in range(2)
    ]
    ticket = None
    for version in range(updates):
        tensors = weights(version)
        ticket = publisher.publish(version, tensors)
        tensors["a"].fill_(-1)
        tensors["b"].fill_(-1)
        if version % 4 == 0:  # now and then everybody catches up, so that the wire is not just passed over
            ticket.wait(30)
    for each in watching:
        each.result(60)
    assert ticket is not None
    ticket.wait(10)
    assert all(numbers == sorted(set(numbers)) and numbers[-1] == updates - 1 for numbers in seen)
    assert all(len(numbers) >= updates // 4 for numbers in seen)
    assert all(wire in each for each in wires)


def rank_of(version: int, rank: int) -> tuple[dict[str, torch.Tensor], dcs.Layout]:
    full = weights(version)
    mine = {name: tensor.chunk(2, 0)[rank] for name, tensor in full.items()}
    pieces = {name: shard(name, tensor.shape, 0, rank, 2) for name, tensor in full.items()}
    return mine, dcs.layout.of(mine, pieces=pieces)


@pytest.mark.parametrize("updates", UPDATES)
def test_versions_put_together_from_two_ranks_are_whole(coordinator, stack, subscribe, updates):
    publishers = [
        stack.enter_context(
            dcs.Publisher(
                coordinator.address,
                run="r",
                rank=rank,
                world_size=2,
                session="one",
                layout=rank_of(0, rank)[1],
                supersede_after=0.05,
                chunk_bytes=16 << 10,
            )
        )
        for rank in range(2)
    ]
    reader = subscribe(weights(0), "reader", chunk_bytes=16 << 10)
    seen: list[int] = []
    watching = stack.enter_context(ThreadPoolExecutor(1)).submit(watch, reader, updates - 1, seen, set())
    for version in range(updates):
        tickets = [
            publisher.publish(version, rank_of(version, rank)[0]) for rank, publisher in enumerate(publishers)
        ]
        if version % 4 == 0:
            tickets[0].wait(30)
    watching.result(60)
    assert seen == sorted(set(seen))
    assert seen[-1] == updates - 1
    assert len(seen) >= updates // 4
