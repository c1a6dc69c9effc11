"""Batches of metadata: what their methods give, without a store."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transferqueue.compat.transfer_queue import BatchMeta, InvalidRequest, KVBatchMeta

SCHEMA = {
    "input_ids": {"dtype": "int64", "shape": (512,), "is_nested": False, "is_non_tensor": False},
    "attention_mask": {"dtype": "int64", "shape": (512,), "is_nested": False, "is_non_tensor": False},
    "responses": {"dtype": "int64", "shape": (128,), "is_nested": False, "is_non_tensor": False},
}


def make(indexes: list[int], *fields: str, ready: int = 0, **more) -> BatchMeta:
    return BatchMeta(
        indexes,
        ["train_0"] * len(indexes),
        {name: SCHEMA[name] for name in fields or SCHEMA},
        np.full(len(indexes), ready, np.int8),
        **more,
    )


def test_a_batch_is_ready_when_it_has_samples_and_all_are_produced():
    assert not make([0, 1]).is_ready
    assert make([0, 1], ready=1).is_ready
    assert not BatchMeta.empty().is_ready
    partly = make([0, 1])
    partly.production_status[0] = 1
    assert not partly.is_ready


def test_field_names_are_sorted_and_the_schema_is_copied():
    batch = make([3])
    assert batch.field_names == ["attention_mask", "input_ids", "responses"]
    batch.field_schema["input_ids"]["shape"] = (1,)
    assert SCHEMA["input_ids"]["shape"] == (512,)


def test_a_sample_view_shows_its_own_shape_and_cannot_be_written():
    nested = {"dtype": "int64", "shape": None, "is_nested": True, "is_non_tensor": False}
    batch = BatchMeta([4, 5], ["p", "q"], {"x": nested | {"per_sample_shapes": [(2,), (3,)]}}, [1, 0])
    view = batch.samples[1]
    assert (view.global_index, view.partition_id, view.production_status) == (5, "q", 0)
    assert view.fields["x"]["shape"] == (3,)
    assert "per_sample_shapes" not in view.fields["x"]
    with pytest.raises(TypeError):
        view.fields["x"]["shape"] = (9,)  # type: ignore[index]
    assert batch.get_shapes("x") == [(2,), (3,)]
    assert batch.get_dtypes("x") == ["int64", "int64"]
    with pytest.raises(KeyError, match="no field 'y'"):
        batch.get_dtypes("y")


def test_add_fields_notes_dtype_and_shape_and_makes_the_batch_ready():
    batch = make([0, 1, 2], "input_ids")
    batch.add_fields(
        {"reward": np.zeros(3, np.float32), "image": np.zeros((3, 4, 5)), "text": ["a", "b", "c"]}
    )
    assert batch.is_ready
    assert batch.field_names == ["image", "input_ids", "reward", "text"]
    assert tuple(batch.field_schema["reward"]["shape"]) == (1,)
    assert tuple(batch.field_schema["image"]["shape"]) == (4, 5)
    assert batch.field_schema["text"] == {
        "dtype": None,
        "shape": None,
        "is_nested": False,
        "is_non_tensor": True,
    }
    with pytest.raises(InvalidRequest, match="2 rows cannot be added to 3"):
        batch.add_fields({"reward": np.zeros(2)})


def test_select_reorder_and_index_take_tags_and_status_along():
    batch = make([10, 11, 12], custom_meta=[{"at": 0}, {"at": 1}, {"at": 2}])
    batch.production_status[:] = [0, 1, 0]
    chosen = batch.select_samples([2, 0])
    assert (chosen.global_indexes, chosen.custom_meta) == ([12, 10], [{"at": 2}, {"at": 0}])
    batch.reorder([1, 2, 0])
    assert (batch.global_indexes, batch.production_status.tolist()) == ([11, 12, 10], [1, 0, 0])
    assert batch[-1].global_indexes == [10]
    assert batch[0:2].global_indexes == [11, 12]
    with pytest.raises(IndexError):
        batch[3]
    with pytest.raises(ValueError, match="positions"):
        batch.select_samples([3])
    with pytest.raises(ValueError, match="permutation"):
        batch.reorder([0, 0, 1])


def test_select_fields_leaves_out_what_is_not_there_and_copies():
    batch = make([0], extra_info={"epoch": [1]})
    chosen = batch.select_fields(["responses", "nothing"])
    assert chosen.field_names == ["responses"]
    chosen.extra_info["epoch"].append(2)
    assert batch.extra_info == {"epoch": [1]}


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_cover_the_batch_and_differ_by_one_at_most(size: int, chunks: int):
    batch = make(list(range(size)), custom_meta=[{"at": at} for at in range(size)])
    parts = batch.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    joined = BatchMeta.concat(parts)
    assert joined.global_indexes == batch.global_indexes
    assert joined.custom_meta == batch.custom_meta


def test_concat_refuses_other_fields_dtypes_and_conflicting_info():
    with pytest.raises(ValueError, match="has fields"):
        BatchMeta.concat([make([0]), make([1], "input_ids")])
    other = make([1])
    other.field_schema["responses"]["dtype"] = "float32"
    with pytest.raises(ValueError, match="'responses' is float32"):
        BatchMeta.concat([make([0]), other])
    with pytest.raises(ValueError, match="extra_info 'epoch'"):
        BatchMeta.concat([make([0], extra_info={"epoch": 1}), make([1], extra_info={"epoch": 2})])
    assert BatchMeta.concat([make([0], extra_info={"a": 1}), make([1], extra_info={"b": 2})]).extra_info == {
        "a": 1,
        "b": 2,
    }
    assert BatchMeta.concat([]).size == 0


def test_concat_keeps_the_shape_of_each_sample_where_one_batch_is_nested():
    dense = BatchMeta([0, 1], ["p"] * 2, {"x": SCHEMA["responses"]})
    ragged = BatchMeta(
        [2],
        ["p"],
        {"x": SCHEMA["responses"] | {"shape": None, "is_nested": True, "per_sample_shapes": [(7,)]}},
    )
    joined = BatchMeta.concat([dense, ragged])
    assert joined.field_schema["x"]["is_nested"]
    assert joined.get_shapes("x") == [(128,), (128,), (7,)]


def test_union_joins_fields_and_is_ready_only_where_both_are():
    one, other = make([0, 1], "input_ids", "attention_mask"), make([0, 1], "attention_mask", "responses")
    one.production_status[:] = [1, 1]
    other.production_status[:] = [1, 0]
    both = one.union(other)
    assert both.field_names == ["attention_mask", "input_ids", "responses"]
    assert both.production_status.tolist() == [1, 0]
    with pytest.raises(ValueError, match="same samples"):
        one.union(make([0, 2]))
    assert one.union(BatchMeta.empty()).global_indexes == [0, 1]


def test_chunk_by_partition_groups_and_keeps_the_order():
    batch = BatchMeta([0, 1, 2, 3], ["b", "a", "b", "a"])
    assert [(part.partition_ids, part.global_indexes) for part in batch.chunk_by_partition()] == [
        (["b", "b"], [0, 2]),
        (["a", "a"], [1, 3]),
    ]


def test_extra_info_and_custom_meta_methods():
    batch = make([0, 1])
    batch.set_extra_info("epoch", 1)
    batch.update_extra_info({"step": 2})
    assert batch.get_extra_info("epoch") == 1
    assert batch.has_extra_info("step")
    assert batch.remove_extra_info("step") == 2
    assert batch.get_all_extra_info() == {"epoch": 1}
    batch.clear_extra_info()
    assert batch.get_extra_info("epoch", "gone") == "gone"
    batch.update_custom_meta([{"uid": "a"}, {"uid": "b"}])
    batch.update_custom_meta([{"score": 1}, {}])
    assert batch.get_all_custom_meta() == [{"uid": "a", "score": 1}, {"uid": "b"}]
    with pytest.raises(ValueError, match="1 entries for 2"):
        batch.update_custom_meta([{}])
    batch.clear_custom_meta()
    assert batch.custom_meta == [{}, {}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_ids": ["p"]},
        {"production_status": [1]},
        {"custom_meta": [{}]},
        {"field_schema": {"x": {"per_sample_shapes": [(1,)]}}},
    ],
)
def test_lengths_that_do_not_match_are_refused(wrong: dict):
    with pytest.raises(ValueError, match="1 entries for 2 samples"):
        BatchMeta(**({"global_indexes": [0, 1], "partition_ids": ["p", "p"]} | wrong))


def test_batches_survive_pickling_and_say_what_they_are():
    batch = make([7], ready=1, extra_info={"k": 1})
    copied = pickle.loads(pickle.dumps(batch))  # noqa: S301  # our own bytes
    assert str(copied) == str(batch)
    assert str(batch).startswith("BatchMeta(size=1, field_names=['attention_mask', 'input_ids', 'responses']")
    keys = KVBatchMeta(["a"], [{"t": 1}], "train", ["x"])
    assert pickle.loads(pickle.dumps(keys)) == keys  # noqa: S301
    assert str(keys) == "KVBatchMeta(size=1, field_names=['x'], extra_info={})"


def test_kv_batches_chunk_concat_select_and_reorder():
    batch = KVBatchMeta(list("abcde"), [{"at": at} for at in range(5)], "train", ["x", "y"], {"k": 1})
    parts = batch.chunk(2)
    assert [part.keys for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert KVBatchMeta.concat([*parts, KVBatchMeta()]) == batch
    assert batch.select_keys(["d", "a"]).tags == [{"at": 3}, {"at": 0}]
    batch.reorder([4, 3, 2, 1, 0])
    assert (batch.keys, batch.tags[0]) == (list("edcba"), {"at": 4})
    with pytest.raises(RuntimeError, match=r"\['z'\] are not found"):
        batch.select_keys(["z"])
    with pytest.raises(ValueError, match="twice"):
        batch.select_keys(["a", "a"])
    with pytest.raises(ValueError, match="permutation"):
        batch.reorder([0])


def test_kv_batches_of_other_partitions_or_fields_are_not_joined():
    one = KVBatchMeta(["a"], [{}], "train", ["x"])
    with pytest.raises(ValueError, match="partitions"):
        KVBatchMeta.concat([one, KVBatchMeta(["b"], [{}], "val", ["x"])])
    with pytest.raises(ValueError, match="fields"):
        KVBatchMeta.concat([one, KVBatchMeta(["b"], [{}], "train", ["y"])])
    with pytest.raises(ValueError, match="twice"):
        KVBatchMeta.concat([one, one])


def test_kv_batches_copy_their_tags():
    tags = [{"history": [1]}]
    batch = KVBatchMeta(["a"], tags)
    tags[0]["history"].append(2)
    assert batch.tags == [{"history": [1]}]
