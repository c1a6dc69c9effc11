"""The catalog's state, without sockets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transferqueue.compat.transfer_queue import (
    BaseSampler,
    GRPOGroupNSampler,
    InvalidRequest,
    RankAwareSampler,
    RequestFailed,
    SequentialSampler,
    StorageKeyNotFoundError,
)
from transferqueue.compat.transfer_queue.catalog import Catalog, Session
from transferqueue.compat.transfer_queue.messages import FieldWrite
from transferqueue.compat.transfer_queue.packing import pack, unpack


def ints(name: str, *shape: int, dtype: str = "int64") -> FieldWrite:
    return FieldWrite(name, dtype, False, f"{dtype}[*]", shape or (3,))


def make(sampler: BaseSampler | None = None, announced: int = 1) -> Catalog:
    return Catalog(sampler or SequentialSampler(), announced)


def test_indexes_go_on_after_a_clear_and_stale_metadata_names_nothing():
    catalog = make()
    assert catalog.insert("p", [101, 102], [ints("x")]).indexes == [0, 1]
    assert catalog.clear([0, 1], "p") == [101, 102]
    assert catalog.insert("q", [103], [ints("x")]).indexes == [2]
    assert catalog.insert("p", [104], [ints("x")]).indexes == [3]
    with pytest.raises(StorageKeyNotFoundError, match="stale"):
        catalog.locate([0], "p", ["x"])
    with pytest.raises(StorageKeyNotFoundError):
        catalog.locate([3], "q", ["x"])  # of another partition


def test_each_task_consumes_each_sample_once():
    catalog, session = make(), Session()
    catalog.insert("p", [1, 2, 3], [ints("x")])

    def take(task, count):
        places = catalog.take(session, "p", ["x"], task, count, {})
        return None if places is None else places.indexes

    assert take("a", 2) == [0, 1]
    assert take("a", 2) is None
    assert take("a", 1) == [2]
    assert take("b", 3) == [0, 1, 2]
    assert catalog.consumption("p", "a").states == b"\1\1\1"
    catalog.partitions["p"].reset("a")
    assert take("a", 3) == [0, 1, 2]
    assert take("b", 1) is None


def test_a_sample_is_ready_when_the_last_of_the_fields_is_written():
    catalog, session = make(), Session()
    catalog.insert("p", [1, 2], [ints("x")])
    assert catalog.take(session, "p", ["x", "y"], "t", 1, {}) is None
    catalog.commit([1], "p", [2], [ints("y")], None)
    places = catalog.take(session, "p", ["y", "x"], "t", 1, {})
    assert places is not None
    assert places.indexes == [1]
    assert catalog.production("p", ["x", "y"]).states == b"\1\0\1\1"


def test_what_a_dead_session_took_last_returns_and_what_it_was_through_with_does_not():
    catalog, session = make(), Session()
    catalog.insert("p", [1, 2, 3, 4], [ints("x")])
    first = catalog.take(session, "p", ["x"], "t", 2, {})
    assert first is not None
    assert catalog.take(session, "p", ["x"], "t", 2, {}, [first.ticket]) is not None
    assert catalog.leave(session) == {"p"}
    places = catalog.take(Session(), "p", ["x"], "t", 2, {})
    assert places is not None
    assert places.indexes == [2, 3]


def test_acked_samples_do_not_return():
    catalog, session = make(), Session()
    catalog.insert("p", [1, 2, 3], [ints("x")])
    catalog.take(session, "p", ["x"], "t", 3, {})
    catalog.ack(session, "p", "t", [0, 2])
    catalog.leave(session)
    assert catalog.consumption("p", "t").states == b"\1\0\1"


def test_a_rank_keeps_its_batch_when_one_of_its_processes_dies():
    catalog, session = make(RankAwareSampler()), Session()
    catalog.insert("p", [1, 2], [ints("x")])
    config = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}
    taken = catalog.take(session, "p", ["x"], "t", 2, config)
    catalog.leave(session)
    assert catalog.take(Session(), "p", ["x"], "t", 2, config) == taken
    assert catalog.take(Session(), "p", ["x"], "t", 2, config | {"dp_rank": 1}) is None
    assert not catalog.drained("p", "t", config)
    turns = [catalog.in_turn("p", "t", config | {"batch_index": at}) for at in range(3)]
    assert turns == [True, True, False], "batch 2 waits for batch 1"
    assert catalog.drained("p", "t", config | {"batch_index": 1})


def test_groups_are_counted_within_their_partition():
    catalog, session = make(GRPOGroupNSampler(2)), Session()
    catalog.insert("other", [9], [ints("x")])
    catalog.insert("p", [1, 2, 3, 4], [ints("x")])
    catalog.clear([2], "p")  # the second member of the first group
    places = catalog.take(session, "p", ["x"], "t", 2, {"task_name": "t", "partition_id": "p"})
    assert places is not None
    assert places.indexes == [3, 4]


def test_announced_samples_count_before_they_are_put():
    catalog = make(announced=4)
    assert catalog.insert("p", [1], [ints("x")]).indexes == [0]
    assert catalog.production("p", ["x"]).states == b"\1\0\0\0"
    assert catalog.consumption("p", "t").indexes == [0, 1, 2, 3]
    assert catalog.insert("p", [2, 3, 4, 5], [ints("x")]).indexes == [1, 2, 3, 4]
    assert catalog.consumption("p", "t").indexes == [0, 1, 2, 3, 4]


def test_a_field_keeps_its_dtype_while_a_sample_has_it():
    catalog = make()
    catalog.insert("p", [1], [ints("x")])
    with pytest.raises(InvalidRequest, match="'x' of partition 'p' is int64, got float32"):
        catalog.insert("p", [2], [ints("x", dtype="float32")])
    assert list(catalog.partitions["p"].samples) == [0], "nothing was made"
    catalog.insert("q", [3], [ints("x", dtype="float32")])
    catalog.clear([0], "p")
    catalog.insert("p", [4], [ints("x", dtype="float32")])


def test_two_first_writes_of_a_sample_agree_on_one_row():
    catalog = make()
    places = catalog.retrieve("p", ["a", "b"], True, False, None)
    assert places.rows == [0, 0]
    assert catalog.commit(places.indexes, "p", [7, 8], [ints("x")], None) == [7, 8]
    assert catalog.commit(places.indexes, "p", [9, 10], [ints("y")], None) == [7, 8]
    assert catalog.production("p", ["x", "y"]).indexes is None, "the refused commit wrote nothing"


def test_two_first_writes_of_a_key_agree_on_one_row():
    catalog = make()
    assert catalog.rows_of("p", ["a", "b"]) == [0, 0]
    first = catalog.commit_keys("p", ["a", "b"], [0, 0], [7, 8], [ints("x")], pack([{"v": 1}, {}]))
    assert (first.indexes, first.rows) == ([0, 1], [7, 8])
    beaten = catalog.commit_keys("p", ["a", "c"], [0, 0], [9, 10], [ints("y")], None)
    assert (beaten.indexes, beaten.rows) == ([], [7, 0])
    assert catalog.list_keys("p") == {"p": {"a": {"v": 1}, "b": {}}}, "the refused commit made nothing"
    again = catalog.commit_keys("p", ["a", "c"], [7, 0], [7, 11], [ints("y")], None)
    assert (again.indexes, again.rows) == ([0, 2], [7, 11])
    assert [field.name for field in again.fields] == ["y"]
    catalog.clear([0], "p")
    with pytest.raises(StorageKeyNotFoundError, match="cleared while"):
        catalog.commit_keys("p", ["a"], [7], [7], [ints("x")], None)


def test_keys_that_are_missing_are_left_out_made_or_an_error():
    catalog = make()
    catalog.retrieve("p", ["a"], True, False, None)
    assert catalog.retrieve("p", ["b", "a"], False, False, None).indexes == [0]
    with pytest.raises(KeyError, match="'b'"):
        catalog.retrieve("p", ["b", "a"], False, True, None)
    with pytest.raises(ValueError, match="were not found"):
        catalog.retrieve("nowhere", ["a"], False, True, None)
    assert list(catalog.partitions) == ["p"], "asking makes no partition"
    assert catalog.keys_of("p", [0]) == ["a"]


def test_shapes_that_differ_make_a_field_nested():
    catalog, session = make(), Session()
    catalog.insert("p", [1], [ints("x", 3)])
    catalog.insert("p", [2], [ints("x", 5)])
    places = catalog.take(session, "p", ["x"], "t", 2, {})
    assert places is not None
    [field] = places.fields
    assert (field.nested, field.shape, field.shapes) == (True, None, [(3,), (5,)])


class Broken(BaseSampler):
    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        raise LookupError("no luck")


class Greedy(BaseSampler):
    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        ready_indexes.append(99)
        return [99], []


def test_a_sampler_that_raises_or_invents_samples_consumes_nothing():
    for sampler, error in ((Broken(), RequestFailed), (Greedy(), StorageKeyNotFoundError)):
        catalog = make(sampler)
        catalog.insert("p", [1], [ints("x")])
        with pytest.raises(error):
            catalog.take(Session(), "p", ["x"], "t", 1, {})
        assert catalog.consumption("p", "t").states == b"\0"
        assert catalog.partitions["p"].ready("t", ["x"]) == [0]


def test_a_dumped_catalog_comes_back_with_consumption_tags_and_the_sampler():
    catalog, config = make(RankAwareSampler()), {"dp_rank": 0, "batch_index": 0}
    config |= {"task_name": "t", "partition_id": "p"}
    places = catalog.retrieve("p", ["a", "b"], True, False, None)
    catalog.commit(places.indexes, "p", [7, 8], [ints("x")], pack([{"v": 1}, {"v": 2}]))
    catalog.insert("p", [9], [ints("x", 5)])
    taken = catalog.take(Session(), "p", ["x"], "t", 2, config)
    again = make(RankAwareSampler())
    again.insert("old", [1, 2], [ints("x")])
    assert again.load(catalog.dump(), {0: 17, 1: 18, 2: 19}) == [1, 2]
    assert list(again.partitions) == ["p"]
    assert again.list_keys(None) == {"p": {"a": {"v": 1}, "b": {"v": 2}}}
    assert again.consumption("p", "t").states == b"\1\1\0"
    replayed = again.take(Session(), "p", ["x"], "t", 2, config)
    assert taken is not None
    assert replayed is not None
    assert (replayed.indexes, replayed.rows) == (taken.indexes, [17, 18])
    assert again.scan("p", ["x"]).fields[0].shapes == [(3,), (3,), (5,)]
    assert again.insert("p", [20], [ints("x")]).indexes == [3]
    assert unpack(again.dump())["next"] == 4


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "write", "take", "clear", "die", "reset"]), st.integers(0, 2**16)),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_ready_samples_are_those_that_have_the_fields_and_are_not_consumed(steps):
    """Held against the definition after every step, for two tasks and two sets of fields."""
    catalog, session, rows = make(), Session(), 0
    consumed: dict[str, list[int]] = {"a": [], "b": []}
    for step, number in steps:
        partition = catalog.partitions.get("p")
        there = list(partition.samples) if partition else []
        task = "ab"[number % 2]
        match step:
            case "put":
                rows += 1
                catalog.insert("p", [rows], [ints("x")])
            case "write" if there:
                index = there[number % len(there)]
                assert partition is not None
                catalog.commit([index], "p", [partition.samples[index].row], [ints("y")], None)
            case "take":
                places = catalog.take(
                    session, "p", ["x", "y"][: 1 + number % 3 % 2], task, 1 + number % 2, {}
                )
                taken = [] if places is None else places.indexes
                assert not set(taken) & set(consumed[task]), "a sample was taken twice"
                consumed[task] += taken
            case "clear" if there:
                catalog.clear([there[number % len(there)]], "p")
            case "die":
                catalog.leave(session)
                assert partition is None or not any(one.taken for one in partition.tasks.values())
                consumed = {"a": [], "b": []}
            case "reset" if partition:
                partition.reset(task)
                consumed[task] = []
        partition = catalog.partitions.get("p")
        if partition is None:
            continue
        for name, done in consumed.items():
            for fields in (["x"], ["x", "y"]):
                expected = [
                    at
                    for at, one in partition.samples.items()
                    if set(fields) <= set(one.cells) and at not in done
                ]
                assert partition.ready(name, fields) == sorted(expected)
