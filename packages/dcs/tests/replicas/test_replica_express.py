"""Small shards: what a save costs in messages, and what goes wrong on the way."""

import os
import re
import resource
import signal
import threading
from collections import Counter
from pathlib import Path

import dcs.replicas
import pytest
import torch
import xxhash
from dcs.errors import CorruptChunk, ProtocolError
from dcs.replicas import KeeperLost, express, link
from dcs.replicas.arenas import Arena
from dcs.replicas.channel import Channel, connect_local
from dcs.replicas.keeper import _Connection
from dcs.replicas.messages import Hand, Held, Hello, Inventory, Refused, Shard, Watch, Welcome

FLOATS = 5000


class Opened:
    """A channel to a keeper, with session "s" of name "n" open."""

    def __init__(self, holder) -> None:
        self._channel = Channel(connect_local(holder.welcome.path, 10), 10, "the keeper")

    def __enter__(self) -> Channel:
        assert isinstance(self._channel.ask(Hello("a test", None)), Welcome)
        assert isinstance(self._channel.ask(Watch("n", "s", 1, 1, 0, 0.0)), Inventory)
        return self._channel

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _shard(arena: Arena, step: int, nbytes: int = 4096) -> Shard:
    digests = b"".join(xxhash.xxh3_128_digest(arena.memory[:4096]) for _ in range(-(-nbytes // (4 << 20))))
    return Shard("n", "s", 1, 0, step, nbytes, digests, b"").sealed()


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((FLOATS,), float(step))}


def is_step(restored, step: int) -> bool:
    return restored is not None and restored[0] == step and torch.equal(restored[1]["w"], state(step)["w"])


@pytest.fixture
def requests(monkeypatch) -> Counter:
    """How many requests of each kind all keepers of this process have been asked."""
    counted: Counter = Counter()
    lock = threading.Lock()
    idle_request = Channel.idle_request

    def count(channel):
        request = idle_request(channel)
        with lock:
            counted[type(request).__name__] += 1
        return request

    monkeypatch.setattr(Channel, "idle_request", count)
    return counted


def test_a_save_is_one_message_to_each_keeper(keeper, replicas, requests):
    rank = replicas([keeper(), keeper()])
    rank.save(0, state(0)).wait(20)  # connects
    requests.clear()
    for step in range(1, 21):
        assert not rank.save(step, state(step)).wait(20).degraded
    assert requests["Hand"] == 40
    # No question before, no drop after, and no news of what the answer has said; what comes with time may.
    assert requests["Offer"] == 0
    assert requests["Drop"] <= 2
    assert requests["Watch"] <= 12
    assert is_step(rank.restore(), 20)


def test_saves_without_a_pause_do_not_overtake_each_other(keeper, replicas):
    rank = replicas([keeper(), keeper()])
    savings = [rank.save(step, state(step)) for step in range(50)]
    assert not savings[-1].wait(20).degraded
    assert is_step(rank.restore(), 49)


def test_a_small_shard_is_pushed_to_a_keeper_elsewhere(keeper, replicas, requests, proxy):
    before = proxy(keeper(share_memory=False))
    rank = replicas([before])
    rank.save(0, state(0)).wait(20)
    passed = before.passed
    for step in range(1, 6):
        rank.save(step, state(step)).wait(20)
    assert requests["Offer"] == 6
    assert before.passed >= passed + 5 * 4 * FLOATS - 5 * 16_000  # it counts large pieces
    before.passed = 0
    rank.save(6, state(5)).wait(20)  # the same bytes: asked for first, and not sent
    assert before.passed == 0
    step, tree = rank.restore()
    assert step == 6
    assert torch.equal(tree["w"], state(5)["w"])


def test_a_pushed_shard_that_is_damaged_is_sent_again(keeper, replicas, proxy):
    before = proxy(keeper(share_memory=False))
    rank = replicas([before])
    rank.save(0, state(0)).wait(20)
    before.damage = 1
    assert not rank.save(1, state(1)).wait(20).degraded
    assert before.damage == 0
    assert is_step(rank.restore(), 1)


def test_a_pushed_shard_that_is_refused_leaves_the_connection_in_step(keeper, replicas):
    small, large = keeper(share_memory=False, max_bytes=16_000), keeper(share_memory=False)
    rank = replicas([small, large])
    for step in range(4):
        saved = rank.save(step, state(step)).wait(20)
        assert saved.held == (large.address,)
        assert "max_bytes" in saved.failed[small.address]
    tiny = {"w": torch.zeros(100)}
    assert not rank.save(4, tiny).wait(20).degraded


def test_the_second_copy_on_a_machine_is_memory_of_its_own(keeper, replicas):
    rank = replicas([keeper(), keeper()])
    saving = rank.save(1, state(1))
    rank.save(2, state(2)).wait(20)  # the first goes over threads, as it has to connect
    saving = rank.save(3, state(3))
    saving.wait(20)
    saving._journey.arena.memory[5] ^= 1
    assert is_step(rank.restore(), 3)


def test_memory_that_was_used_again_is_found_by_who_copies_it_late(keeper):
    holder = keeper()
    with Opened(holder) as channel:
        arena = Arena(4096)
        shard = _shard(arena, 1)
        arena.memory[7] ^= 1  # the rank has given the step up
        channel.send_with(Hand(shard, copy=True), arena.descriptor)
        answer = channel.answer()
        assert isinstance(answer, Refused)
        assert answer.code == CorruptChunk.code
        arena.memory[7] ^= 1
        channel.send_with(Hand(shard, copy=True), arena.descriptor)
        assert isinstance(channel.answer(), Held)
        arena.close()


def test_what_is_handed_over_has_to_be_one_sealed_memfd_of_the_size(keeper):
    holder = keeper()
    with Opened(holder) as channel:
        arena, unsealed = Arena(4096), os.memfd_create("unsealed")
        os.ftruncate(unsealed, 1 << 20)
        null = os.open("/dev/null", os.O_RDONLY)
        before = len(os.listdir("/proc/self/fd"))
        for copy in (False, True):
            for step, descriptor in ((1, unsealed), (2, null)):
                channel.send_with(Hand(_shard(arena, step), copy=copy), descriptor)
                answer = channel.answer()
                assert isinstance(answer, Refused), answer
                assert answer.code == ProtocolError.code
            channel.send(Hand(_shard(arena, 3), copy=copy))
            answer = channel.answer()
            assert isinstance(answer, Refused)
            assert "passed 0 descriptors" in answer.message
            channel.send_with(Hand(_shard(arena, 4, nbytes=8 << 20), copy=copy), arena.descriptor)
            assert isinstance(channel.answer(), Refused)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        assert [status.nbytes for status in holder.holdings.status()] == [0]
        assert isinstance(channel.ask(Watch("n", "s", 1, 1, 0, 0.0)), Inventory)  # it is served on
        for descriptor in (unsealed, null):
            os.close(descriptor)
        arena.close()


@pytest.mark.parametrize("killed", [False, True], ids=["stops", "dies"])
def test_a_keeper_that_does_not_answer_costs_a_message(replicas, cleanup, monkeypatch, eventually, killed):
    monkeypatch.setattr(express, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(link, "CONNECT_SECONDS", 0.5)
    keepers = [cleanup.enter_context(dcs.replicas.serve_keeper(parent=os.getpid())) for _ in range(3)]
    rank = replicas(keepers, copies=2)
    held = [rank.save(step, state(step)).wait(20).held for step in range(4)][-1]
    stopped = next(each for each in keepers if each.address == held[1])
    os.kill(stopped.pid, signal.SIGSTOP)
    eventually(
        lambda: all("\tT" in each.read_text() for each in Path(f"/proc/{stopped.pid}/task").glob("*/status"))
    )
    try:
        saving = rank.save(4, state(4))  # returns, though nobody reads what was posted
        if killed:
            os.kill(stopped.pid, signal.SIGKILL)
        saved = saving.wait(60)
        assert not saved.degraded
        assert stopped.address not in saved.held
        assert stopped.address in saved.failed
        assert not rank.save(5, state(5)).wait(60).degraded
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert is_step(rank.restore(), 5)


def test_closing_with_shards_on_their_way_ends(keeper, replicas, monkeypatch):
    rank = replicas([keeper(), keeper()])
    rank.save(1, state(1)).wait(20)
    go = threading.Event()
    take = _Connection._take

    def stuck(connection, request):
        go.wait(20)
        return take(connection, request)

    monkeypatch.setattr(_Connection, "_take", stuck)
    saving = rank.save(2, state(2))
    rank.close()
    go.set()
    with pytest.raises((dcs.Closed, KeeperLost)):
        saving.wait(5)


def test_a_process_forked_off_may_close_what_it_inherited(keeper, replicas):
    holder = keeper()
    rank = replicas([holder])
    rank.save(1, state(1)).wait(20)
    rank.save(2, state(2)).wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        rank.close()
        holder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rank.save(3, state(3)).wait(20).failed == {}
    assert is_step(dcs.replicas.restore([holder.address], "actor"), 3)  # it is still listening


def test_a_save_without_a_descriptor_is_refused_in_words_and_the_next_one_kept(replicas, cleanup):
    apart = cleanup.enter_context(dcs.replicas.serve_keeper(parent=os.getpid()))
    rank = replicas([apart])
    rank.save(1, state(1)).wait(20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(f for f in range(3, 1 << 16) if not _is_open(f)), hard))
    fault = ""
    try:
        for step in range(2, 10):  # until no arena is there to be used again
            rank.save(step, state(step))
    except dcs.DcsError as error:
        fault = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert re.search(r"no memory for a step of .* Too many open files; free some", fault)
    assert not rank.save(20, state(20)).wait(20).degraded
    assert is_step(rank.restore(), 20)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
