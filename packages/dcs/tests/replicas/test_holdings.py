"""What a keeper holds, without its sockets."""

import threading
from typing import Any

import pytest
import xxhash
from dcs.errors import Closed, Evicted, ProtocolError, StaleVersion
from dcs.replicas import KeeperFull, WorldSizeMismatch
from dcs.replicas.holdings import KEPT_ATTEMPTS, Holdings
from dcs.replicas.memory import Memory
from dcs.replicas.messages import Drop, Fetch, Floor, Place, Shard

SIZE = 1000


def shard(step: int, rank: int = 0, session: str = "s", fill: int = 0, world_size: int = 2) -> Shard:
    digest = xxhash.xxh3_128_digest(bytes([fill]) * SIZE)
    return Shard("actor", session, world_size, rank, step, SIZE, digest, b"").sealed()


def holdings(max_bytes: int = 100 * SIZE) -> Holdings:
    made = Holdings(Memory(max_bytes))
    made.open("actor", "s", 1, 2)
    return made


def receive(where: Holdings, what: Shard) -> None:
    arriving = where.begin(what)
    if arriving is not None:
        arriving.missing.clear()
        where.finish(arriving)
        arriving.guard.release()


def held(where: Holdings) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    records = where.inventory("actor", 0, 0.0).attempts
    return {r.session: [(s.step, s.ranks) for s in r.steps] for r in records}


def test_a_shard_shows_once_it_is_whole():
    where = holdings()
    arriving = where.begin(shard(1))
    assert arriving is not None
    assert held(where) == {"s": []}
    with pytest.raises(StaleVersion), where.reading(Fetch("actor", "s", 0, 1)):
        pass
    where.finish(arriving)
    arriving.guard.release()
    assert held(where) == {"s": [(1, (0,))]}
    assert where.begin(shard(1)) is None


def test_a_part_that_is_here_is_taken_up_again_and_another_step_takes_its_place():
    where = holdings()
    first = where.begin(shard(1))
    assert first is not None
    first.guard.release()
    again = where.begin(shard(1))
    assert again is first
    first.guard.release()
    other = where.begin(shard(2))
    assert other is not None
    assert other is not first
    assert where.memory.used_bytes == SIZE  # in the same buffer
    assert first.ended


def test_whoever_still_receives_a_shard_is_waited_for():
    where = holdings()
    first = where.begin(shard(1))
    assert first is not None
    taken = threading.Event()

    def take_over() -> None:
        again = where.begin(shard(1))
        assert again is first
        taken.set()
        first.guard.release()

    thread = threading.Thread(target=take_over)
    thread.start()
    assert not taken.wait(0.05)
    first.guard.release()
    thread.join(10)
    assert taken.is_set()


def test_the_newest_attempt_saves_and_older_ones_are_only_read():
    where = holdings()
    receive(where, shard(1))
    late = where.begin(shard(2))
    assert late is not None
    where.open("actor", "t", 0, 2)
    with pytest.raises(Evicted, match=r"'t'.*has taken over"):
        where.begin(shard(3))
    with pytest.raises(Evicted):
        where.finish(late)
    late.guard.release()
    with pytest.raises(Evicted):
        where.drop(Drop("actor", "s", 0, 1))
    where.retain("actor", "s", Floor(Place(9, 9)))
    with where.reading(Fetch("actor", "s", 0, 1)) as kept:
        assert kept.shard == shard(1)
    receive(where, shard(1, session="t"))
    assert held(where) == {"s": [(1, (0,))], "t": [(1, (0,))]}


def test_numbers_of_attempts_grow_also_over_a_keeper_that_forgot():
    where, fresh = holdings(), Holdings(Memory(SIZE))
    where.open("actor", "t", 0, 2)
    fresh.open("actor", "u", 0, 2)
    numbers = {r.session: r.number for r in where.inventory("actor", 0, 0.0).attempts}
    assert numbers["t"] > numbers["s"] == 1
    assert fresh.inventory("actor", 0, 0.0).attempts[0].number >= numbers["t"]
    where.open("actor", "s", 1, 2)  # what is known stays
    where.open("actor", "t", 1, 2)
    assert {r.session: r.number for r in where.inventory("actor", 0, 0.0).attempts} == numbers


def test_a_session_has_one_number_of_ranks():
    where = holdings()
    with pytest.raises(WorldSizeMismatch, match=r"2 ranks.*world_size 3"):
        where.open("actor", "s", 1, 3)
    with pytest.raises(ProtocolError, match="of 3 ranks"):
        where.begin(shard(1, world_size=3))
    with pytest.raises(ProtocolError, match="not opened"):
        where.begin(shard(1, session="unknown"))


def test_the_same_step_with_other_bytes_is_refused():
    where = holdings()
    receive(where, shard(1))
    with pytest.raises(StaleVersion, match="other bytes"):
        where.begin(shard(1, fill=1))


def test_a_full_keeper_refuses_and_keeps_what_it_has():
    where = holdings(2 * SIZE)
    receive(where, shard(1))
    receive(where, shard(1, rank=1))
    with pytest.raises(KeeperFull, match=f"{2 * SIZE} of {2 * SIZE} are in use"):
        where.begin(shard(2))
    assert held(where) == {"s": [(1, (0, 1))]}
    assert where.drop(Drop("actor", "s", 1, 1))
    receive(where, shard(2))
    assert held(where) == {"s": [(1, (0,)), (2, (0,))]}


def test_a_floor_drops_what_is_older_but_not_its_anchor():
    where = holdings()
    for step in (1, 2, 3, 4):
        receive(where, shard(step))
    late = where.begin(shard(3, rank=1))
    assert late is not None
    late.guard.release()
    where.retain("actor", "s", Floor(Place(1, 4, "s"), Place(1, 2, "s")))
    assert held(where) == {"s": [(2, (0,)), (4, (0,))]}
    assert late.ended


def test_what_is_read_stays_until_it_was_read():
    where = holdings()
    receive(where, shard(1))
    with where.reading(Fetch("actor", "s", 0, 1)) as kept:
        assert not where.drop(Drop("actor", "s", 0, 1))
        assert held(where) == {"s": []}
        with pytest.raises(StaleVersion):
            where.begin(shard(1))
        assert where.older(shard(2)) is None
        assert kept.region.memory.nbytes == SIZE
        assert where.memory.buffer(SIZE, "another") is not kept.region
    assert where.drop(Drop("actor", "s", 0, 1))
    assert where.memory.buffer(SIZE, "a third") is kept.region


def test_a_change_wakes_those_who_watch():
    where = holdings()
    known = where.inventory("actor", 0, 0.0).generation
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(where.inventory("actor", known, 30.0)))
    thread.start()
    receive(where, shard(1))
    thread.join(10)
    assert seen[0].generation > known
    assert where.inventory("actor", seen[0].generation, 0.01).generation == seen[0].generation
    where.close()
    with pytest.raises(Closed):
        where.inventory("actor", seen[0].generation, 30.0)


def test_what_is_dropped_is_no_news_but_shows_with_the_next_shard():
    where = holdings()
    for step in (1, 2):
        receive(where, shard(step))
    known = where.inventory("actor", 0, 0.0).generation
    where.retain("actor", "s", Floor(Place(1, 2)))
    where.drop(Drop("actor", "s", 0, 2))
    assert where.inventory("actor", known, 0.01).generation == known
    receive(where, shard(3))
    assert where.inventory("actor", known, 30.0).generation > known
    assert held(where) == {"s": [(3, (0,))]}


def test_forgetting_a_name_gives_its_memory_back():
    where = holdings()
    receive(where, shard(1))
    where.forget("actor")
    assert held(where) == {"s": []}
    assert where.memory.used_bytes == 0
    where.forget("unknown")


def test_attempts_that_left_nothing_are_forgotten_in_the_end():
    where = holdings()
    receive(where, shard(1))
    for index in range(30):
        where.open("actor", f"later {index}", 0, 2)
    sessions = list(held(where))
    assert sessions[0] == "s"  # it has a shard
    assert sessions[-1] == "later 29"
    assert len(sessions) == 1 + KEPT_ATTEMPTS
