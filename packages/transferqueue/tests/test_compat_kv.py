"""The key-value calls, as the tutorials and tests of the PyPI package use them."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
import transferqueue.compat.transfer_queue as tq  # noqa: E402

TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    tq.init({"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"total_storage_size": 200}}})
    yield
    tq.close()


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    for name in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(name)
    [partition] = tq.get_client()._queue.stats().partitions.values()
    assert partition.samples == 0, "cleared samples must leave nothing in the store"


class Calls:
    """The kv calls, blocking or awaited in a loop of their own."""

    def __init__(self, awaited: bool) -> None:
        self._awaited = awaited

    def __getattr__(self, name: str) -> Any:
        if not self._awaited:
            return getattr(tq, name)
        call = getattr(tq, f"async_{name}")
        assert inspect.iscoroutinefunction(call)
        return lambda *args, **kwargs: asyncio.run(call(*args, **kwargs))


@pytest.fixture(params=[False, True], ids=["blocking", "async"])
def kv(request: pytest.FixtureRequest) -> Calls:
    return Calls(request.param)


def td(rows: int, **fields: Any) -> Any:
    return TensorDict(fields, batch_size=rows)


def lists(values: Any) -> list[Any]:
    """Rows of a tensor, nested or not, as lists."""
    return [row.tolist() for row in values]


def test_the_tutorial_of_the_kv_interface(kv: Calls):
    """Put one, put many, add a field to some, update a tag, list, get a column, get all, clear."""
    ids = torch.tensor([[1, 2, 3]])
    one = td(1, input_ids=ids, attention_mask=torch.ones(ids.size()))
    kv.kv_put(key="0_0", partition_id="Train", fields=one, tag={"global_steps": 0, "status": "running"})

    ids = torch.arange(4, 16).view(4, 3)
    keys = ["1_0", "1_1", "1_2", "2_0"]
    tags = [{"global_steps": 1, "status": "running", "model_version": 1} for _ in keys]
    batch = td(4, input_ids=ids, attention_mask=torch.ones_like(ids, dtype=torch.float32))
    kv.kv_batch_put(keys=keys, partition_id="Train", fields=batch, tags=tags)

    response = td(2, response=torch.tensor([[4, 5, 6], [7, 8, 9]]))
    finished = [{"status": "finish"}] * 2
    meta = kv.kv_batch_put(keys=["1_1", "2_0"], partition_id="Train", fields=response, tags=finished)
    assert meta.fields == ["attention_mask", "input_ids", "response"]
    assert meta.tags == [{"global_steps": 1, "status": "finish", "model_version": 1}] * 2

    kv.kv_put(key="0_0", partition_id="Train", fields=None, tag={"status": "finish"})

    listed = kv.kv_list()
    assert list(listed) == ["Train"]
    assert list(listed["Train"]) == ["0_0", *keys]
    assert listed["Train"]["0_0"] == {"global_steps": 0, "status": "finish"}
    assert [tag["status"] for tag in listed["Train"].values()] == [
        "finish",
        "running",
        "finish",
        "running",
        "finish",
    ]

    everything = list(listed["Train"])
    column = kv.kv_batch_get(keys=everything, partition_id="Train", select_fields="input_ids")
    assert list(column.keys()) == ["input_ids"]
    assert lists(column["input_ids"]) == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]
    assert sorted(kv.kv_batch_get(keys=everything, partition_id="Train").keys()) == [
        "attention_mask",
        "input_ids",
    ]

    kv.kv_clear(keys=everything[:2], partition_id="Train")
    assert list(kv.kv_list(partition_id="Train")["Train"]) == everything[2:]


def test_a_dict_holds_the_values_of_one_sample(kv: Calls):
    meta = kv.kv_put(
        key="a",
        partition_id="p",
        fields={"x": torch.tensor([1, 2, 3]), "text": "hello", "n": 3, "score": torch.tensor(0.5)},
        tag={"type": "dict"},
    )
    assert (meta.keys, meta.tags, meta.partition_id) == (["a"], [{"type": "dict"}], "p")
    assert meta.fields == ["n", "score", "text", "x"]
    got = kv.kv_batch_get(keys="a", partition_id="p")
    assert got.batch_size == torch.Size([1])
    assert lists(got["x"]) == [[1, 2, 3]]
    assert (list(got["text"]), list(got["n"])) == (["hello"], [3])
    assert torch.equal(got["score"], torch.tensor([0.5]))
    with pytest.raises(ValueError, match="kv_batch_put"):
        kv.kv_put(key="a", partition_id="p", fields={"x": torch.nested.nested_tensor([torch.ones(2)])})


def test_rows_of_different_lengths_come_back_as_a_jagged_nested_tensor(kv: Calls):
    rows = [torch.randn(length) for length in (1, 2, 3)]
    for at, row in enumerate(rows):
        kv.kv_put(key=str(at), partition_id="p", fields=td(1, data=row.unsqueeze(0)))
    got = kv.kv_batch_get(keys=["2", "0", "1"], partition_id="p")["data"]
    assert got.is_nested
    assert got.layout == torch.jagged
    assert all(torch.equal(a, b) for a, b in zip(got, [rows[2], rows[0], rows[1]], strict=True))


def test_containers_dtypes_and_values_survive(kv: Calls):
    jagged = [torch.ones(0, 2), torch.full((3, 2), 2.0), torch.zeros(1, 2)]
    strided = [torch.ones(2, 3), torch.ones(2, 4), torch.ones(1, 1)]
    fields = {
        "jagged": torch.nested.as_nested_tensor(jagged, layout=torch.jagged),
        "strided": torch.nested.as_nested_tensor(strided, layout=torch.strided),
        "half": torch.tensor([[1.5], [2.5], [-1.0]], dtype=torch.bfloat16),
        "eight": torch.tensor([[1.0], [2.0], [4.0]]).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False, True]),
        "image": torch.arange(24, dtype=torch.uint8).view(3, 2, 4),
        "plain": NonTensorStack({"a": [1, None]}, "text", {"image": torch.arange(3), "np": np.arange(2.0)}),
        "bytes": NonTensorStack(b"\0", b"", b"x"),
    }
    kv.kv_batch_put(keys=list("abc"), partition_id="p", fields=td(3, **fields))
    got = kv.kv_batch_get(keys=list("abc"), partition_id="p")
    for name, rows in (("jagged", jagged), ("strided", strided)):
        assert got[name].is_nested
        assert str(got[name].layout).endswith(name)
        assert all(torch.equal(a, b) for a, b in zip(got[name].unbind(), rows, strict=True))
    assert got["half"].dtype == torch.bfloat16
    assert lists(got["half"]) == [[1.5], [2.5], [-1.0]]
    assert got["eight"].dtype == torch.float8_e4m3fn
    assert torch.equal(got["flag"], fields["flag"])
    assert got["image"].dtype == torch.uint8
    assert all(torch.equal(a, b) for a, b in zip(got["image"], fields["image"], strict=True))
    plain = list(got["plain"])
    assert plain[:2] == [{"a": [1, None]}, "text"]
    assert torch.equal(plain[2]["image"], torch.arange(3))
    assert np.array_equal(plain[2]["np"], np.arange(2.0))
    assert list(got["bytes"]) == [b"\0", b"", b"x"]


def test_results_are_private_and_may_be_written(kv: Calls):
    kv.kv_put(key="a", partition_id="p", fields={"x": torch.zeros(3), "s": torch.tensor(1.0)})
    got = kv.kv_batch_get(keys="a", partition_id="p")
    got["x"].values().add_(1)
    got["s"].add_(1)
    again = kv.kv_batch_get(keys="a", partition_id="p")
    assert (lists(again["x"]), again["s"].tolist()) == ([[0.0, 0.0, 0.0]], [1.0])


def test_only_fields_that_all_samples_have_are_read(kv: Calls):
    kv.kv_put(key="0", partition_id="p", fields={"a": torch.tensor([1])})
    kv.kv_put(key="0", partition_id="p", fields={"b": torch.tensor([2])})
    kv.kv_put(key="1", partition_id="p", fields={"a": torch.tensor([3]), "c": torch.tensor([4])})
    assert sorted(kv.kv_batch_get(keys=["0", "1"], partition_id="p").keys()) == ["a"]
    assert sorted(kv.kv_batch_get(keys=["0"], partition_id="p").keys()) == ["a", "b"]


def test_a_missing_key_or_field_is_an_error_and_not_a_shorter_batch(kv: Calls):
    kv.kv_batch_put(keys=["0", "1"], partition_id="p", fields=td(2, a=torch.ones(2, 1)))
    kv.kv_put(key="1", partition_id="p", fields={"b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"no samples under 1 of 2 keys: \['2'\]"):
        kv.kv_batch_get(keys=["0", "2"], partition_id="p")
    with pytest.raises(tq.StorageKeyNotFoundError, match="not found"):
        kv.kv_batch_get(keys="0", partition_id="nowhere")
    with pytest.raises(ValueError, match="'b' is missing in 1"):
        kv.kv_batch_get(keys=["0", "1"], partition_id="p", select_fields=["a", "b"])
    with pytest.raises(ValueError, match="'zz'"):
        kv.kv_batch_get(keys=["0"], partition_id="p", select_fields="zz")
    kv.kv_put(key="bare", partition_id="p", tag={})
    with pytest.raises(ValueError, match="no field in common"):
        kv.kv_batch_get(keys=["bare", "0"], partition_id="p")


def test_a_batch_of_keys_is_read_by_its_metadata(kv: Calls):
    keys = ["m0", "m1"]
    ids = torch.tensor([[1, 2], [3, 4]])
    kv.kv_batch_put(keys=keys, partition_id="p", fields=td(2, ids=ids), tags=[{}, {}])
    meta = kv.kv_batch_put(keys=keys, partition_id="p", fields=td(2, mask=ids + 10))
    assert meta.fields == ["ids", "mask"]
    assert lists(kv.kv_batch_get_by_meta(meta)["ids"]) == [[1, 2], [3, 4]]
    assert list(kv.kv_batch_get_by_meta(meta, select_fields="mask").keys()) == ["mask"]
    assert lists(kv.kv_batch_get_by_meta(meta.select_keys(["m1"]))["mask"]) == [[13, 14]]
    for wrong in ("nothing", ["ids", "nothing"]):
        with pytest.raises(ValueError, match=r"select_fields.*not found"):
            kv.kv_batch_get_by_meta(meta, select_fields=wrong)
    with pytest.raises(ValueError, match="partition_id"):
        kv.kv_batch_get_by_meta(tq.KVBatchMeta(["m0"], [{}]))


def test_a_field_written_again_takes_the_new_value_in_any_shape(kv: Calls):
    kv.kv_put(key="a", partition_id="p", fields={"x": torch.zeros(3, 2)}, tag={"v": 1})
    kv.kv_put(key="a", partition_id="p", fields={"x": torch.ones(1, 4)})
    kv.kv_put(key="b", partition_id="p", fields={"x": torch.ones(2, 2)})
    got = kv.kv_batch_get(keys=["a", "b"], partition_id="p")["x"]
    assert [tuple(row.shape) for row in got.unbind()] == [(1, 4), (2, 2)]
    assert kv.kv_list("p")["p"]["a"] == {"v": 1}


def test_a_changed_dtype_is_refused_and_stores_nothing(kv: Calls):
    kv.kv_put(key="a", partition_id="p", fields={"x": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="'x' of partition 'p' is int64, got float32"):
        kv.kv_batch_put(keys=["a", "b"], partition_id="p", fields=td(2, x=torch.zeros(2, 3)))
    assert lists(kv.kv_batch_get(keys="a", partition_id="p")["x"]) == [[0, 0, 0]]
    assert kv.kv_list() == {"p": {"a": {}}}, "no key is there whose put failed"
    kv.kv_put(key="a", partition_id="other", fields={"x": torch.zeros(3)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": ["a"]}, "nothing to put"),
        ({"keys": ["a"], "tags": [{}, {}]}, "2 tags do not match 1 keys"),
        ({"keys": ["a"], "fields": {"x": [1, 2]}}, "2 rows, which does not match 1 keys"),
        ({"keys": ["a", "a"], "tags": [{}, {}]}, "twice"),
        ({"keys": ["a"], "fields": {"x": [object()]}}, "cannot be stored"),
        ({"keys": [], "tags": []}, "keys is empty"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(kv: Calls, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        kv.kv_batch_put(partition_id="p", **arguments)
    assert kv.kv_list() == {}
    with pytest.raises(TypeError, match="keys are str"):
        kv.kv_batch_get(keys=[1], partition_id="p")


def test_partitions_may_use_the_same_keys(kv: Calls):
    for at, name in enumerate(("p0", "p1")):
        kv.kv_batch_put(
            keys=["a", "b"], partition_id=name, fields=td(2, x=torch.full((2, 1), at)), tags=[{"id": at}] * 2
        )
    assert kv.kv_list() == {f"p{at}": {"a": {"id": at}, "b": {"id": at}} for at in range(2)}
    assert kv.kv_list("p2") == {}
    assert lists(kv.kv_batch_get(keys="b", partition_id="p1")["x"]) == [[1]]


def test_clearing_is_idempotent_and_leaves_the_others(kv: Calls):
    keys = list("abcd")
    kv.kv_batch_put(keys=keys, partition_id="p", fields=td(4, x=torch.arange(4).view(4, 1)))
    for cleared in (["no", "such"], ["a", "no"], "a"):
        kv.kv_clear(keys=cleared, partition_id="p")
    assert list(kv.kv_list("p")["p"]) == ["b", "c", "d"]
    kv.kv_clear(keys=["a"], partition_id="nowhere")
    kv.kv_put(key="a", partition_id="p", fields={"x": torch.tensor([9])})
    assert lists(kv.kv_batch_get(keys=["a", "b"], partition_id="p")["x"]) == [[9], [1]]
    kv.kv_clear(keys=keys, partition_id="p")
    assert kv.kv_list() == {"p": {}}


def test_a_parser_changes_values_before_they_are_stored(kv: Calls):
    def load(fields: dict[str, Any]) -> None:
        fields["url"][:] = [f"content of {url}" for url in fields["url"]]
        fields["x"] += 1

    kv.kv_batch_put(
        keys=["a", "b"],
        partition_id="p",
        fields=td(2, url=NonTensorStack("u1", "u2"), x=torch.zeros(2, 1)),
        data_parser=load,
    )
    got = kv.kv_batch_get(keys=["b"], partition_id="p")
    assert list(got["url"]) == ["content of u2"]
    assert lists(got["x"]) == [[1.0]]
    with pytest.raises(ValueError, match="data_parser"):
        kv.kv_put(
            key="c", partition_id="p", fields={"x": torch.zeros(1)}, data_parser=lambda f: f.update(y=[1])
        )


def test_tags_hold_plain_data_arrays_and_tensors(kv: Calls):
    tag = {"score": 0.5, "ids": [1, 2], "nested": {"a": None}, "np": np.float32(1.5), "t": torch.arange(2)}
    kv.kv_put(key="a", partition_id="p", tag=tag)
    got = kv.kv_list("p")["p"]["a"]
    assert got["np"].dtype == np.float32
    assert torch.equal(got.pop("t"), tag.pop("t"))
    assert got == tag


async def test_many_calls_may_be_in_flight():
    async def one(at: int) -> int:
        await tq.async_kv_put(key=str(at), partition_id="p", fields={"x": torch.tensor([at])}, tag={"at": at})
        got = await tq.async_kv_batch_get(keys=str(at), partition_id="p")
        return int(got["x"][0])

    assert await asyncio.gather(*(one(at) for at in range(50))) == list(range(50))
    assert len((await tq.async_kv_list("p"))["p"]) == 50


def test_two_writers_of_new_keys_lose_nothing(kv: Calls):
    """Both make the samples; each writes a field of its own."""

    async def both() -> None:
        for at in range(20):
            keys = [f"{at}-{n}" for n in range(4)]
            await asyncio.gather(
                *(
                    tq.async_kv_batch_put(
                        keys=keys, partition_id="p", fields=td(4, **{name: torch.ones(4, 1)})
                    )
                    for name in ("a", "b")
                )
            )

    asyncio.run(both())
    keys = list(kv.kv_list("p")["p"])
    assert len(keys) == 80
    assert sorted(kv.kv_batch_get(keys=keys, partition_id="p").keys()) == ["a", "b"]
