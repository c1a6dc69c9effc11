"""Who joins during a publish, tensors that change right after it, and layouts that do not fit."""

import dcs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def test_two_who_join_at_once_during_a_transfer_cost_the_trainer_no_byte(
    coordinator, publisher, engine, model, digest, payload
):
    root = engine(coordinator.address, "root", {"halt": [1, 0.3]})
    publisher.publish(0, model(0))
    assert root.takes(0)[0] == digest(0)
    ticket = publisher.publish(1, model(1))
    root.until("halted")
    late = [engine(coordinator.address, name) for name in ("late", "later")]
    root.go_on()
    for member in (root, *late):
        assert member.takes(1)[0] == digest(1)
    print(f"two joiners during a transfer: root egress {publisher.sent / payload - 1:.2f} payloads")
    assert publisher.sent <= 3 * payload  # the root's; and, when it was stopped too long, one that is whole
    assert "root" in {**ticket.wait(10).acked, **ticket.wait(10).gone}
    last = publisher.publish(2, model(2))
    for member in (root, *late):
        assert member.takes(2)[0] == digest(2)
    assert set(last.wait(10).acked) == {"root", "late", "later"}


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.integers(0, 70_000), min_size=1, max_size=4),
    st.sampled_from(["shm", "tcp"]),
    st.integers(0, 2**31),
)
def test_what_the_trainer_does_after_publish_is_seen_by_nobody(coordinator, sizes, wire, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{index}": torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)
        for index, size in enumerate(sizes)
    }
    layout, run = dcs.layout.of(tensors), f"{seed}-{wire}-{sizes}"
    options = {"layout": layout, "wires": (wire,), "chunk_bytes": 4096}
    with (
        dcs.Publisher(coordinator.address, run, **options) as publisher,
        dcs.Subscriber(coordinator.address, run, name="e", **options) as subscriber,
    ):
        for version in range(3):
            expected = {name: tensor.clone() for name, tensor in tensors.items()}
            publisher.publish(version, tensors)
            for tensor in tensors.values():
                tensor.add_(1)
            got = subscriber.fetch(version)
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


FULL = {"w": torch.zeros(64, 32), "b": torch.zeros(64)}


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [
        ({"w": torch.zeros(64, 32, dtype=torch.bfloat16)}, "w"),
        ({"w": torch.zeros(32, 64)}, "w"),
        ({"w": torch.zeros(64, 31)}, "w"),
        ({"more": torch.zeros(1)}, "more"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_a_byte_moves(publish_to, subscribe, changed, tensor):
    publisher = publish_to(FULL, wires=("tcp",))
    publisher.publish(0, FULL)
    with pytest.raises(dcs.LayoutMismatch) as refused:
        subscribe({**FULL, **changed}, wires=("tcp",))
    assert refused.value.tensor == tensor
    assert publisher.sent == 0
    assert subscribe(FULL, wires=("tcp",)).fetch(0)


def test_tensors_of_another_layout_are_not_published(publish_to, subscribe):
    publisher = publish_to(FULL)
    subscriber = subscribe(FULL)
    publisher.publish(0, FULL)
    for tensors in ({"w": FULL["w"]}, {**FULL, "x": FULL["b"]}, {**FULL, "b": torch.zeros(64, 1)}):
        with pytest.raises(dcs.LayoutMismatch):
            publisher.publish(1, tensors)
    assert subscriber.fetch(0)
    publisher.publish(1, FULL)
    assert subscriber.fetch(1)
