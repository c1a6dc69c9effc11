"""Receivers that are cut differently from the ranks that publish: each byte comes once, from one owner."""

import threading
import time
from collections.abc import Callable

import dcs
import pytest
import torch
from dcs.layout import Layout, shard

HIDDEN, INNER, LAYERS = 64, 192, 4


def model(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"embedding": (128, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.up": (INNER, HIDDEN),
            f"layers.{layer}.down": (HIDDEN, INNER),
            f"layers.{layer}.norm": (HIDDEN,),
        }
    return {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
        for name, shape in shapes.items()
    }


def cut_of(name: str) -> int | None:
    """The dimension that tensor parallelism cuts."""
    return {"embedding": 0, "up": 0, "down": 1}.get(name.rpartition(".")[2])


def part(tensors: dict[str, torch.Tensor], rank: int, size: int) -> tuple[dict[str, torch.Tensor], Layout]:
    """The tensors of one rank of tensor parallelism, and their layout."""
    mine, pieces = {}, {}
    for name, tensor in tensors.items():
        dim = cut_of(name)
        if dim is None:
            mine[name] = tensor
        else:
            mine[name] = tensor.chunk(size, dim)[rank]
            pieces[name] = shard(name, tensor.shape, dim, rank, size)
    return mine, dcs.layout.of(mine, pieces=pieces)


def stage(tensors: dict[str, torch.Tensor], rank: int, size: int) -> tuple[dict[str, torch.Tensor], Layout]:
    """The tensors of one stage of a pipeline."""
    layers = range(rank * LAYERS // size, (rank + 1) * LAYERS // size)
    mine = {
        name: tensor
        for name, tensor in tensors.items()
        if (name == "embedding" and rank == 0) or any(name.startswith(f"layers.{layer}.") for layer in layers)
    }
    return mine, dcs.layout.of(mine)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


Cut = Callable[[dict[str, torch.Tensor], int, int], tuple[dict[str, torch.Tensor], Layout]]


@pytest.mark.parametrize(
    ("source", "ranks", "destination", "receivers"),
    [
        pytest.param(part, 2, part, 4, id="TP2-TP4"),
        pytest.param(part, 4, part, 1, id="TP4-TP1"),
        pytest.param(part, 3, part, 2, id="TP3-TP2"),
        pytest.param(stage, 2, stage, 1, id="PP2-PP1"),
        pytest.param(stage, 2, part, 2, id="PP2-TP2"),
        pytest.param(part, 1, stage, 4, id="TP1-PP4"),
    ],
)
@pytest.mark.parametrize("delta", [False, True])
def test_every_byte_comes_once(coordinator, stack, source: Cut, ranks, destination: Cut, receivers, delta):
    publishers = [
        stack.enter_context(
            dcs.Publisher(
                coordinator.address,
                rank=rank,
                world_size=ranks,
                session="first",
                layout=source(model(0), rank, ranks)[1],
            )
        )
        for rank in range(ranks)
    ]
    subscribers = [
        stack.enter_context(
            dcs.Subscriber(
                coordinator.address,
                name=f"engine-{rank}",
                layout=destination(model(0), rank, receivers)[1],
                delta=delta,
                chunk_bytes=4096,
            )
        )
        for rank in range(receivers)
    ]
    for version in range(3):
        tensors = model(0)
        for tensor in tensors.values():
            tensor.view(-1)[version::97] += version
        sent = sum(publisher.sent for publisher in publishers)
        tickets = [
            publisher.publish(version, source(tensors, rank, ranks)[0])
            for rank, publisher in enumerate(publishers)
        ]
        needed = 0
        for rank, subscriber in enumerate(subscribers):
            expected, layout = destination(tensors, rank, receivers)
            staged = subscriber.next(after=version - 1, timeout=10)
            assert staged is not None, subscriber.health()
            assert_same(staged.tensors, expected)
            needed += sum(spec.nbytes for spec in layout.tensors)
            staged.ack()
        moved = sum(publisher.sent for publisher in publishers) - sent
        assert moved <= 1.05 * needed
        if delta and version:
            assert moved < needed / 4
        for ticket in tickets:
            assert len(ticket.wait(10).acked) == receivers


def test_replicas_of_data_parallelism_share_the_sending(coordinator, stack):
    tensors = {f"w{index}": torch.randn(50_000) for index in range(8)}
    layout = dcs.layout.of(tensors)
    fused = {"all": torch.cat([tensors[f"w{index}"] for index in range(8)])}
    pieces = dcs.layout.concatenated(dcs.layout.whole(f"w{index}", (50_000,)) for index in range(8))
    publishers = [
        stack.enter_context(
            dcs.Publisher(coordinator.address, rank=rank, world_size=4, session="s", layout=layout)
        )
        for rank in range(4)
    ]
    subscriber = stack.enter_context(
        dcs.Subscriber(coordinator.address, name="e", layout=dcs.layout.of(fused, pieces={"all": pieces}))
    )
    for publisher in publishers:
        publisher.publish(0, tensors)
    assert torch.equal(subscriber.fetch(timeout=10)["all"], fused["all"])
    each = [publisher.sent for publisher in publishers]
    assert sum(each) == 8 * 200_000
    assert max(each) <= 1.25 * sum(each) / 4


def test_a_version_is_offered_when_every_rank_has_published_it(coordinator, stack):
    tensors = model(0)
    publishers = [
        stack.enter_context(
            dcs.Publisher(
                coordinator.address,
                rank=rank,
                world_size=2,
                session="s",
                layout=part(tensors, rank, 2)[1],
                timeout=1,
            )
        )
        for rank in range(2)
    ]
    subscriber = stack.enter_context(
        dcs.Subscriber(coordinator.address, name="e", layout=part(tensors, 0, 1)[1])
    )
    early = publishers[0].publish(0, part(model(0), 0, 2)[0])
    assert subscriber.next(timeout=0.2) is None
    with pytest.raises(dcs.Timeout, match=r"(another rank|rank 1) of the publisher has not published it"):
        early.wait(0.1)
    publishers[0].publish(1, part(model(1), 0, 2)[0])
    with pytest.raises(dcs.Timeout, match=r"version 1 .* is not complete"):
        publishers[0].publish(2, part(model(2), 0, 2)[0])
    for version in (0, 1):
        publishers[1].publish(version, part(model(version), 1, 2)[0])
        assert_same(subscriber.fetch(version, timeout=10), model(version))
    assert list(early.wait(10).acked) == ["e"]
    publishers[0].publish(2, part(model(2), 0, 2)[0])
    publishers[1].publish(2, part(model(2), 1, 2)[0])
    assert_same(subscriber.fetch(2, timeout=10), model(2))


def test_what_no_rank_has_is_refused_by_name_before_a_byte_moves(coordinator, stack):
    tensors = model(0)
    publisher = stack.enter_context(dcs.Publisher(coordinator.address, layout=dcs.layout.of(tensors)))
    publisher.publish(0, tensors)
    for change, words in [
        ({"more": torch.zeros(3)}, "'more'"),
        ({"layers.0.up": torch.zeros(INNER, HIDDEN)}, r"'layers\.0\.up'"),
        ({"layers.0.up": torch.zeros(INNER + 1, HIDDEN, dtype=torch.int16)}, r"'layers\.0\.up'"),
    ]:
        with pytest.raises(dcs.LayoutMismatch, match=words):
            dcs.Subscriber(coordinator.address, name="e", layout=dcs.layout.of(tensors | change))
    fewer = {name: tensor for name, tensor in tensors.items() if name != "embedding"}
    with dcs.Subscriber(coordinator.address, name="e", layout=dcs.layout.of(fewer)) as subscriber:
        assert_same(subscriber.fetch(timeout=10), fewer)
    assert publisher.sent == sum(tensor.nbytes for tensor in fewer.values())


def test_floating_tensors_travel_as_the_layout_says(coordinator, stack):
    master = {"w": torch.randn(300, 7), "steps": torch.arange(5)}
    layout = dcs.layout.of(master, dtype=torch.bfloat16)
    publisher = stack.enter_context(dcs.Publisher(coordinator.address, layout=layout))
    engine = {"w": torch.empty(300, 7, dtype=torch.bfloat16), "steps": torch.empty(5, dtype=torch.int64)}
    subscriber = stack.enter_context(
        dcs.Subscriber(coordinator.address, name="e", layout=dcs.layout.of(engine))
    )
    publisher.publish(0, master)
    got = subscriber.fetch(timeout=10)
    assert torch.equal(got["w"], master["w"].bfloat16())
    assert torch.equal(got["steps"], master["steps"])
    with pytest.raises(dcs.LayoutMismatch, match="steps"):
        publisher.publish(1, master | {"steps": torch.arange(5).int()})


def test_a_dead_rank_is_a_lost_publisher_and_no_end(coordinator, stack, eventually):
    def gang(session: str) -> list[dcs.Publisher]:
        return [
            dcs.Publisher(
                coordinator.address,
                rank=rank,
                world_size=2,
                session=session,
                layout=part(model(0), rank, 2)[1],
            )
            for rank in range(2)
        ]

    first = gang("first")
    for rank, publisher in enumerate(first):
        publisher.publish(0, part(model(0), rank, 2)[0])
    first[1].close()
    late = stack.enter_context(
        dcs.Subscriber(coordinator.address, name="late", layout=part(model(0), 0, 1)[1])
    )
    assert late.next(timeout=0.5) is None
    assert isinstance(late.health().error, dcs.PublisherLost)
    first[0].close()
    second = gang("second")
    for rank, publisher in enumerate(second):
        stack.callback(publisher.close)
        publisher.publish(1, part(model(1), rank, 2)[0])
    assert_same(late.fetch(1, timeout=10), model(1))


def test_two_gangs_never_mix(coordinator, stack):
    old, new = model(0), model(1)

    def gang(session: str, tensors: dict[str, torch.Tensor]) -> list[dcs.Publisher]:
        return [
            stack.enter_context(
                dcs.Publisher(
                    coordinator.address,
                    rank=rank,
                    world_size=2,
                    session=session,
                    layout=part(tensors, rank, 2)[1],
                )
            )
            for rank in range(2)
        ]

    first = gang("first", old)
    subscriber = stack.enter_context(dcs.Subscriber(coordinator.address, name="e", layout=part(old, 0, 1)[1]))
    for rank, publisher in enumerate(first):
        publisher.publish(0, part(old, rank, 2)[0])
    assert_same(subscriber.fetch(0, timeout=10), old)
    first[0].publish(1, part(old, 0, 2)[0])
    second = gang("second", new)
    with pytest.raises(dcs.Evicted):
        first[1].publish(1, part(old, 1, 2)[0])
    threads = [
        threading.Thread(target=publisher.publish, args=(1, part(new, rank, 2)[0]))
        for rank, publisher in enumerate(second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert_same(subscriber.fetch(1, timeout=10), new)


def test_a_version_that_ranks_have_not_published_names_them(publish_to, subscribe):
    tensors = {"w": torch.arange(10.0)}
    ranks = [publish_to(tensors, rank=rank, world_size=4, session="s", timeout=0.5) for rank in (0, 1, 2)]
    engine = subscribe(tensors)

    def fails_with(call: Callable[[], object], text: str) -> None:
        """Who is missing is known a heartbeat later."""
        deadline = time.monotonic() + 20
        said = ""
        while text not in said and time.monotonic() < deadline:
            with pytest.raises(dcs.Timeout) as caught:
                call()
            said = str(caught.value)
        assert text in said

    first = ranks[0].publish(1, tensors)
    ranks[2].publish(1, tensors)
    fails_with(lambda: first.wait(0.2), "ranks 1, 3 of the publisher have not published it")
    fails_with(lambda: engine.fetch(timeout=0.2), "ranks 1, 3 of the publisher have not published it")
    ranks[1].publish(1, tensors)
    fails_with(lambda: first.wait(0.2), "rank 3 of the publisher has not published it")
    ranks[0].publish(2, tensors)
    fails_with(lambda: ranks[0].publish(3, tensors), "ranks 1, 2, 3 of the publisher have not published it")
