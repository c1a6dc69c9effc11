"""Versions arrive bit for bit, whole, the newest first."""

import os
import sys
import threading
from contextlib import suppress

import dcs
import numpy as np
import pytest
import torch


@pytest.fixture(params=["shm", "tcp", "tcp+delta"])
def wire(request) -> str:
    return request.param


@pytest.fixture
def subscribe(subscribe, wire):
    """Every test is run over each wire."""
    options = {"wires": (wire.partition("+")[0],), "delta": "delta" in wire}
    return lambda tensors, name="engine-0", **more: subscribe(tensors, name, **(options | more))


def small(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 64), value), "b": torch.full((64,), value)}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        flat = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (got[name], tensor)]
        assert torch.equal(*flat), name


def every_kind_of_tensor() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=generator)
    dtypes = [getattr(torch, name) for name in dcs.layout.ITEMSIZE if name != "bool"]
    tensors = {str(dtype): noise.view(dtype).reshape(2, -1) for dtype in dtypes}
    tied = torch.randn(33, 17, generator=generator)
    return tensors | {
        "bool": noise > 100,
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.25, dtype=torch.bfloat16),
        "transposed": tied.t(),
        "strided": tied[::2, 1::3],
        "expanded": torch.tensor([1.5]).expand(7, 9),
        "tied.a": tied,
        "tied.b": tied,
        "parameter": torch.nn.Parameter(torch.randn(5, 5, generator=generator)),
    }


@pytest.mark.parametrize("chunk_bytes", [4096, 4 << 20])
def test_every_dtype_shape_and_stride_arrives_bit_for_bit(publish_to, subscribe, chunk_bytes):
    tensors = every_kind_of_tensor()
    publisher = publish_to(tensors, chunk_bytes=chunk_bytes)
    subscriber = subscribe(tensors)
    ticket = publisher.publish(0, tensors)
    staged = subscriber.next(timeout=10)
    assert staged is not None
    assert_equal(staged.tensors, tensors)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in staged.tensors.values())
    staged.ack()
    assert list(ticket.wait(10).acked) == ["engine-0"]


def test_the_trainer_may_change_its_tensors_as_soon_as_publish_returns(publish_to, subscribe):
    tensors = {"w": torch.zeros(1 << 20)}
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    for version in range(5):
        tensors["w"].fill_(version)
        publisher.publish(version, tensors)
        tensors["w"].fill_(-1)
        staged = subscriber.next(after=version - 1, timeout=10)
        assert staged is not None
        assert torch.equal(staged.tensors["w"], torch.full((1 << 20,), float(version)))
        staged.ack()


def test_no_torn_version_is_seen_in_200_updates(publish_to, subscribe):
    tensors = {f"w{index}": torch.zeros(40_000) for index in range(4)}
    publisher = publish_to(tensors, chunk_bytes=64 << 10)
    subscribers = [subscribe(tensors, f"engine-{index}") for index in range(2)]
    seen: dict[int, list[int]] = {0: [], 1: []}
    torn: list[str] = []

    def read(index: int) -> None:
        version = -1
        while version < 199:
            staged = subscribers[index].next(after=version, timeout=30)
            if staged is None:
                return
            values = {float(edge) for tensor in staged.tensors.values() for edge in tensor.aminmax()}
            if values != {float(staged.version)}:
                torn.append(f"version {staged.version} holds {values}")
            version = staged.version
            seen[index].append(version)
            staged.ack()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for reader in readers:
        reader.start()
    tickets = []
    for version in range(200):
        for tensor in tensors.values():
            tensor.fill_(version)
        tickets.append(publisher.publish(version, tensors))
    stats = tickets[-1].wait(30)
    for reader in readers:
        reader.join(30)
    assert torn == []
    assert set(stats.acked) == {"engine-0", "engine-1"}
    for versions in seen.values():
        assert versions == sorted(set(versions))
        assert versions[-1] == 199


def test_versions_may_be_skipped_and_the_newest_is_given(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    tickets = [publisher.publish(version, small(version)) for version in (3, 7, 11)]
    staged = subscriber.next(after=7, timeout=10)
    assert staged is not None
    assert staged.version == 11
    assert_equal(staged.tensors, small(11))
    assert not tickets[0].done
    staged.ack()
    assert tickets[0].wait(10).moved_on == {"engine-0": 11}
    assert list(tickets[2].wait(10).acked) == ["engine-0"]
    assert subscriber.next(after=11, timeout=0.05) is None


def test_a_late_joiner_gets_the_newest_version_at_once(publish_to, subscribe):
    tensors = small(0)
    publisher = publish_to(tensors)
    for version in range(4):
        assert publisher.publish(version, small(version)).wait(1).acked == {}
    staged = subscribe(tensors).next(timeout=5)
    assert staged is not None
    assert staged.version == 3
    assert_equal(staged.tensors, small(3))


def test_a_held_version_stays_as_it_is_while_newer_ones_arrive(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors, supersede_after=0.1), subscribe(tensors)
    publisher.publish(0, small(0))
    held = subscriber.next(timeout=10)
    assert held is not None
    for version in range(1, 6):
        publisher.publish(version, small(version))
    with pytest.raises(dcs.Unacknowledged, match="version 0"):
        subscriber.next(after=0, timeout=1)
    assert_equal(held.tensors, small(0))
    held.ack()
    held.ack()
    newest = subscriber.next(after=4, timeout=10)
    assert newest is not None
    assert_equal(newest.tensors, small(5))


def test_a_released_version_is_given_again(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    ticket = publisher.publish(0, small(4))
    first = subscriber.next(timeout=10)
    assert first is not None
    first.release()
    assert not ticket.done
    again = subscriber.next(timeout=10)
    assert again is not None
    assert_equal(again.tensors, small(4))
    again.ack()
    again.release()
    with pytest.raises(dcs.Unacknowledged, match="released before"):
        first.ack()
    assert ticket.wait(10).pending == ()


def test_fetch_copies_and_acknowledges_and_can_be_repeated(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    ticket = publisher.publish(5, small(5))
    assert_equal(subscriber.fetch(timeout=10), small(5))
    assert list(ticket.wait(10).acked) == ["engine-0"]
    assert_equal(subscriber.fetch(version=5, timeout=10), small(5))
    with pytest.raises(dcs.StaleVersion, match="replaced by version 5"):
        subscriber.fetch(version=4, timeout=10)
    with pytest.raises(dcs.Timeout, match="version 6"):
        subscriber.fetch(version=6, timeout=0.05)


def test_follow_applies_newest_versions_until_closed(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    applied: list[tuple[int, float]] = []
    follower = subscriber.follow(
        lambda staged: applied.append((staged.version, float(staged.tensors["w"][0, 0])))
    )
    for version in range(3):
        publisher.publish(version, small(version)).wait(10)
        assert follower.wait_for(version, 10) >= version
    assert applied == [(0, 0.0), (1, 1.0), (2, 2.0)]
    subscriber.close()
    assert follower.error is None


def test_who_acknowledges_and_leaves_at_once_has_acknowledged(publish_to, subscribe):
    tensors = small(0)
    publisher = publish_to(tensors)
    for version in range(10):
        subscriber = subscribe(tensors, f"engine-{version}")
        ticket = publisher.publish(version, tensors)
        subscriber.fetch(version, timeout=10)
        subscriber.close()
        assert list(ticket.wait(10).acked) == [f"engine-{version}"]


def test_the_pause_of_a_commit_is_told(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor.clone())
    follower = subscriber.follow(applier := dcs.appliers.StateDictApplier(module))
    taken = publisher.publish(3, small(3)).wait(10).acked["engine-0"]
    assert follower.wait_for(3, 10) == 3
    assert applier.last is not None
    assert taken.pause_seconds == applier.last.pause_seconds > 0
    assert torch.equal(module.get_buffer("w"), small(3)["w"])


def test_a_failed_apply_takes_the_subscriber_out_of_the_run_and_says_so(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)

    def apply(staged: dcs.Staged) -> None:
        raise RuntimeError("no room \udcff")

    follower = subscriber.follow(apply)
    gone = publisher.publish(0, tensors).wait(10).gone
    assert "no room" in gone["engine-0"]
    with pytest.raises(dcs.ApplyFailed, match="no room"):
        follower.wait_for(0, 10)
    assert isinstance(subscriber.health().error, dcs.ApplyFailed)
    with pytest.raises(dcs.ApplyFailed):
        subscriber.next(timeout=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_function_that_ends_its_thread_takes_the_subscriber_out_of_the_run(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    follower = subscriber.follow(lambda staged: sys.exit(3))
    assert "ended its thread" in publisher.publish(0, tensors).wait(10).gone["engine-0"]
    with pytest.raises(dcs.ApplyFailed):
        follower.wait_for(0, 10)


def test_a_note_of_the_functions_own_is_no_pause(publish_to, subscribe):
    class Engine:
        last = -1

        def __call__(self, staged: dcs.Staged) -> None:
            self.last = staged.version

    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    follower = subscriber.follow(Engine())
    publisher.publish(0, tensors).wait(10)
    assert follower.wait_for(0, 10) == 0


@pytest.mark.parametrize("pause", [np.float64(0.25), torch.tensor(0.25), np.float32(0.25)])
def test_a_pause_may_be_any_number(publish_to, subscribe, pause):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    ticket = publisher.publish(0, tensors)
    staged = subscriber.next(timeout=10)
    assert staged is not None
    staged.ack(pause)
    assert ticket.wait(10).acked["engine-0"].pause_seconds == 0.25


def test_numbers_that_are_no_versions_are_refused_and_nothing_is_lost(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    for version in (-1, 2**61, 2**63, 2**64):
        with pytest.raises(dcs.StaleVersion, match=r"count from 0 to"):
            publisher.publish(version, tensors)
    for after in (None, "1", 1.5):
        with pytest.raises(TypeError):
            subscriber.next(after=after)
    publisher.publish(np.int64(3), tensors)
    assert_equal(subscriber.fetch(timeout=10), tensors)


def test_what_is_no_mapping_of_tensors_is_refused(publish_to):
    publisher = publish_to(small(0))
    with pytest.raises(dcs.LayoutMismatch, match=r"Linear was given, .* state_dict"):
        publisher.publish(0, torch.nn.Linear(2, 2))


def test_a_tensor_without_values_is_refused_by_name(publish_to):
    publisher = publish_to({"w": torch.zeros(2, 3)})
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])
    for bad, words in [(torch.zeros(2, 3, device="meta"), "meta tensor"), (nested, "nested")]:
        with pytest.raises(dcs.LayoutMismatch, match=words):
            publisher.publish(0, {"w": bad})


def test_a_version_that_is_looked_at_comes_before_a_follower(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    publisher.publish(0, tensors)
    staged = subscriber.next(timeout=10)
    assert staged is not None
    with pytest.raises(dcs.Unacknowledged, match="version 0"):
        subscriber.follow(lambda staged: None)
    staged.ack()
    assert subscriber.follow(lambda staged: None, after=-1).error is None


def test_who_follows_takes_the_versions_alone(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    follower = subscriber.follow(lambda staged: None)
    for second in (subscriber.next, subscriber.fetch, lambda: subscriber.follow(lambda staged: None)):
        with pytest.raises(dcs.DcsError, match="follow"):
            second()
    publisher.publish(0, tensors)
    assert follower.wait_for(0, 10) == 0
    with pytest.raises(TypeError):
        subscribe(tensors, "other").next(timeout=None)


def test_an_interrupted_fetch_leaves_nothing_given_out(publish_to, subscribe, monkeypatch):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    publisher.publish(0, tensors)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", lambda tensor: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            subscriber.fetch(timeout=10)
    assert_equal(subscriber.fetch(timeout=10), tensors)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_closes_takes_nothing_from_its_parent(publish_to, subscribe):
    tensors = small(0)
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    child = os.fork()
    if child == 0:
        for use in (lambda: publisher.publish(0, tensors), lambda: subscriber.next(timeout=1)):
            with pytest.raises(dcs.DcsError, match="belongs to process"):
                use()
        publisher.close()
        subscriber.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    publisher.publish(0, tensors)
    assert_equal(subscriber.fetch(timeout=10), tensors)
    assert_equal(subscribe(tensors, "late").fetch(timeout=10), tensors)


def test_a_close_beside_a_publish_leaves_no_memory(coordinator):
    tensors = {"w": torch.zeros(4 << 20)}

    def open_memory() -> int:
        found = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the one that listed them
                found += "memfd:dcs" in os.readlink(f"/proc/self/fd/{descriptor}")
        return found

    before = open_memory()
    for version in range(8):
        publisher = dcs.Publisher(coordinator.address, run="r", layout=dcs.layout.of(tensors))
        closing = threading.Thread(target=publisher.close)
        closing.start()
        with suppress(dcs.DcsError):
            publisher.publish(version, tensors)
        closing.join(10)
    assert open_memory() == before


def test_a_model_without_any_byte_is_still_a_version(publish_to, subscribe):
    tensors = {"empty": torch.empty(3, 0)}
    publisher, subscriber = publish_to(tensors), subscribe(tensors)
    publisher.publish(0, tensors)
    assert_equal(subscriber.fetch(timeout=10), tensors)
