"""Saving to keepers and restoring from them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import dcs.replicas
import pytest
import torch
from dcs.errors import Closed, Evicted, ProtocolError, StaleVersion, Timeout, Unauthorized
from dcs.replicas import KeeperLost, UnsupportedLeaf, WorldSizeMismatch

CHUNK = 4 << 20


def state(step: int, floats: int = 5000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((floats,), float(step)), "n": torch.tensor(step)}


def steps_at(keeper, name: str = "actor") -> dict[int, tuple[int, ...]]:
    names = {status.name: status for status in dcs.replicas.status(keeper.address).names}
    return {s.step: s.ranks for a in names[name].attempts for s in a.steps} if name in names else {}


@pytest.mark.parametrize("share_memory", [True, False], ids=["handed over", "sent"])
def test_what_is_restored_is_what_was_frozen(keeper, replicas, share_memory):
    holder = keeper(share_memory=share_memory)
    rank = replicas([holder])
    generator = torch.Generator().manual_seed(1)
    tree = {
        "model": {"w": torch.randn(3 * CHUNK // 4 + 11, generator=generator)},
        "step": 7,
        "nested": (1, [2.5, None]),
    }
    expected = tree["model"]["w"].clone()
    saving = rank.save(7, tree)
    tree["model"]["w"].zero_()  # training goes on at once
    saved = saving.wait(20)
    assert (saved.step, saved.held, saved.degraded) == (7, (holder.address,), False)
    assert saved.nbytes >= expected.nbytes
    restored = rank.restore()
    assert restored is not None
    assert restored[0] == 7
    assert torch.equal(restored[1]["model"]["w"], expected)
    assert restored[1]["step"] == 7
    assert restored[1]["nested"] == (1, [2.5, None])
    restored[1]["model"]["w"].add_(1)  # it is the caller's own


def test_nothing_to_restore_is_none(keeper, replicas):
    holder = keeper()
    assert replicas([holder]).restore() is None
    assert dcs.replicas.restore([holder.address], "actor") is None


def test_the_newest_steps_stay_and_memory_does_not_grow(keeper, replicas):
    own, other = keeper(), keeper(share_memory=False)
    rank = replicas([own, other], keep=2)
    used = set()
    for step in range(8):
        rank.save(step, state(step)).wait(20)
        if step > 4:
            used.add((own.memory.used_bytes, other.memory.used_bytes))
    assert set(steps_at(own)) <= {5, 6, 7}
    assert {6, 7} <= set(steps_at(own))
    assert {6, 7} <= set(steps_at(other)) <= {5, 6, 7}
    assert max(bytes_of_other for _, bytes_of_other in used) <= 3 * rank.stats().nbytes // 8
    assert rank.stats().saves == 8
    assert rank.stats().degraded == 0
    assert rank.stats().completed == rank.completed == rank.newest() == 7


def test_a_tree_may_grow_and_shrink(keeper, replicas):
    rank = replicas([keeper(), keeper(share_memory=False)])
    for step, floats in enumerate((10, 2 * CHUNK, 10, 0, CHUNK)):
        rank.save(step, state(step, floats)).wait(20)
        restored = dcs.replicas.restore([link.address for link in rank._links], "actor")
        assert restored is not None
        assert torch.equal(restored[1]["w"], torch.full((floats,), float(step)))


def test_a_step_is_complete_when_all_ranks_have_it(keeper, replicas):
    keepers = [keeper(), keeper(share_memory=False)]
    first, second = (replicas(keepers, rank=r, world_size=2, session="a") for r in range(2))
    first.save(1, state(1))
    second.save(1, state(101)).wait(20)
    first.wait(1, 20)
    saving = first.save(2, state(2))
    with pytest.raises(Timeout, match="of ranks 1"):
        saving.wait(0.3)
    assert not saving.done
    assert first.newest() == 1
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda rank: rank.restore(20), (second, first)))
    assert [step for step, _ in got] == [1, 1]
    assert [float(tree["w"][0]) for _, tree in got] == [101.0, 1.0]


def test_all_ranks_restore_what_rank_0_chose(keeper, replicas):
    holder = keeper()
    first, second = (replicas([holder], rank=r, world_size=2, session="a") for r in range(2))
    chosen: list[int] = []
    thread = threading.Thread(target=lambda: chosen.append(second.restore(20)[0]))
    first.save(1, state(1))
    second.save(1, state(1)).wait(20)
    thread.start()
    first.wait(1, 20)
    assert first.restore(20)[0] == 1
    thread.join(20)
    assert chosen == [1]
    with pytest.raises(Timeout, match=r"rank 0 of 'actor' .* has not chosen"):
        second.restore(0.2)


def test_after_a_restore_saving_starts_anew(keeper, replicas):
    rank = replicas([keeper(), keeper(share_memory=False)])
    for step in (1, 2, 3):
        rank.save(step, state(step)).wait(20)
    assert rank.restore()[0] == 3
    with pytest.raises(StaleVersion, match=r"step 3 .* after step 3"):
        rank.save(3, state(3))
    rank.save(4, state(40)).wait(20)
    assert float(rank.restore()[1]["w"][0]) == 40


def test_the_next_start_of_a_run_takes_over(keeper, replicas):
    keepers = [keeper(), keeper(share_memory=False)]
    old = replicas(keepers)
    for step in (1, 2, 3):
        old.save(step, state(step)).wait(20)
    new = replicas(keepers)
    with pytest.raises(Evicted, match="has taken over"):
        old.save(4, state(4)).wait(20)
    with pytest.raises(Evicted):
        old.save(5, state(5))
    step, tree = new.restore()
    assert step == 3
    assert torch.equal(tree["w"], state(3)["w"])
    new.save(4, state(44)).wait(20)
    old.close()
    assert float(new.restore()[1]["w"][0]) == 44  # not what the old one would have saved


def test_restoring_with_another_number_of_ranks_is_refused(keeper, replicas):
    holder = keeper()
    replicas([holder]).save(1, state(1)).wait(20)
    two = replicas([holder], rank=0, world_size=2, session="a")
    with pytest.raises(WorldSizeMismatch, match=r"step 1 of 'actor' was saved by 1 ranks.* restored by 2"):
        two.restore()
    with pytest.raises(WorldSizeMismatch, match=r"2 ranks.*world_size 3"):
        replicas([holder], rank=2, world_size=3, session="a")


def test_runs_of_other_names_do_not_meet(keeper):
    holder = keeper()
    with dcs.replicas.Replicas([holder.address], "actor", copies=1) as actor:
        with dcs.replicas.Replicas([holder.address], "critic", copies=1) as critic:
            actor.save(5, state(5)).wait(20)
            critic.save(3, state(3)).wait(20)
            assert actor.newest() == 5
            assert critic.newest() == 3
        dcs.replicas.forget([holder.address], "critic")
    assert steps_at(holder) == {5: (0,)}
    assert steps_at(holder, "critic") == {}
    assert holder.memory.used_bytes > 0


def test_a_rank_prefers_its_own_keeper_and_other_domains(keeper, replicas):
    remote = {"share_memory": False}
    keepers = [
        keeper(domain="rack 1", **remote),
        keeper(domain="rack 1"),
        keeper(domain="rack 1", **remote),
        keeper(domain="rack 2", **remote),
    ]
    rank = replicas(keepers, copies=2)
    assert rank.save(1, state(1)).wait(20).held in (
        (keepers[1].address, keepers[3].address),
        (keepers[3].address, keepers[1].address),
    )


def test_equal_chunks_are_not_sent_again(keeper, proxy, replicas, eventually):
    before = proxy(keeper(share_memory=False))
    rank = replicas([before])
    frozen = torch.randn(4 * CHUNK // 4)
    rank.save(1, {"a": frozen, "b": torch.zeros(100)}).wait(20)
    eventually(lambda: before.passed > 3.5 * CHUNK)  # it counts large pieces, once passed on
    before.passed = 0
    rank.save(2, {"a": frozen, "b": torch.ones(100)}).wait(20)
    assert before.passed < CHUNK
    step, tree = rank.restore()
    assert step == 2
    assert torch.equal(tree["a"], frozen)
    assert torch.equal(tree["b"], torch.ones(100))


def test_arguments_are_checked(keeper, replicas):
    holder = keeper()
    for options in ({"copies": 2}, {"copies": 0}, {"rank": 1}, {"keep": 0}, {"world_size": 2}):
        with pytest.raises(ValueError, match=next(iter(options))):
            replicas([holder], **options)
    with pytest.raises(ProtocolError, match="tcp://host:port"):
        replicas(["localhost"])
    rank = replicas([holder])
    with pytest.raises(UnsupportedLeaf, match="'x'"):
        rank.save(1, {"x": object()})
    rank.save(1, state(1)).wait(20)
    with pytest.raises(StaleVersion, match="none of the last"):
        rank.wait(9)


def test_several_threads_that_save_one_step_save_it_once(keeper, replicas):
    mine = replicas([keeper()], copies=1)
    outcomes: list[str] = []

    def save() -> None:
        try:
            mine.save(5, {"w": torch.zeros(1000)}).wait(20)
            outcomes.append("saved")
        except StaleVersion:
            outcomes.append("stale")

    threads = [threading.Thread(target=save) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["saved"] + ["stale"] * 5
    for step in (-1, 2**61, 2**64):
        with pytest.raises(StaleVersion, match="count from 0"):
            mine.save(step, {})


def test_a_keeper_asks_for_its_token(keeper, replicas):
    holder = keeper(token="secret")
    for token in (None, "guess"):
        with pytest.raises(Unauthorized, match="token"):
            replicas([holder], token=token)
        with pytest.raises(Unauthorized, match="token"):
            dcs.replicas.status(holder.address, token=token)
    rank = replicas([holder], token="secret")
    rank.save(1, state(1)).wait(20)
    assert rank.newest() == 1
    with pytest.raises(Unauthorized, match="not loopback"):
        dcs.replicas.Keeper(host="0.0.0.0")


def test_no_keeper_in_reach_is_said_at_once(keeper, replicas):
    holder = keeper()
    holder.close()
    with pytest.raises(KeeperLost, match=holder.address):
        replicas([holder], connect_seconds=2.0)


def test_closing_wakes_whoever_waits(keeper, replicas):
    rank = replicas([keeper()], rank=0, world_size=2, session="a")
    saving = rank.save(1, state(1))
    threading.Timer(0.1, rank.close).start()
    with pytest.raises(Closed):
        saving.wait(20)
    with pytest.raises(Closed):
        rank.save(2, state(2))
    rank.close()
