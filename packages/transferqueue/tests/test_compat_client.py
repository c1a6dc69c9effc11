"""The client's calls, as the tutorials of the PyPI package use them: data workflow, metadata, controller,
samplers.
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
import transferqueue.compat.transfer_queue as tq  # noqa: E402

TensorDict = tensordict.TensorDict
torch.set_num_threads(1)


def started(**controller: Any) -> tq.TransferQueueClient:
    tq.init({"controller": controller, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    return tq.get_client()


@pytest.fixture(scope="module")
def shared() -> Iterator[tq.TransferQueueClient]:
    yield started()
    tq.close()


@pytest.fixture
def client(shared: tq.TransferQueueClient) -> Iterator[tq.TransferQueueClient]:
    """Of a store with the default sampler, where a `get_meta` waits."""
    yield shared
    for name in shared.get_partition_list():
        shared.clear_partition(name)


def numbers(count: int, start: int = 0, field: str = "data") -> Any:
    return TensorDict({field: torch.arange(start, start + count).view(count, 1)}, batch_size=count)


def values(data: Any) -> list[Any]:
    return [row.tolist() for row in data]


def test_put_get_and_clear_a_partition(client: tq.TransferQueueClient):
    ids = torch.arange(1, 13).view(4, 3)
    put = client.put(
        TensorDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, batch_size=4),
        partition_id="t0",
    )
    assert put.is_ready
    meta = client.get_meta(
        data_fields=["input_ids", "attention_mask"], batch_size=4, partition_id="t0", task_name="task"
    )
    assert meta.global_indexes == put.global_indexes
    got = client.get_data(meta)
    assert values(got["input_ids"]) == ids.tolist()
    client.clear_partition(partition_id="t0")
    assert client.get_partition_list() == []
    with pytest.raises(KeyError, match="stale"):
        client.get_data(meta)


def test_tags_of_samples_are_seen_by_whoever_gets_them(client: tq.TransferQueueClient):
    meta = client.put(numbers(8), partition_id="demo")
    meta.update_custom_meta([{"uid": at, "version": 0} for at in range(8)])
    client.set_custom_meta(meta)
    got = client.get_meta(["data"], 8, "demo", task_name="task")
    assert got.get_all_custom_meta() == meta.custom_meta
    assert values(client.get_data(got.select_samples([6, 0]))["data"]) == [[6], [0]]
    chunks = got.chunk(2)
    assert [values(client.get_data(chunk)["data"]) for chunk in chunks] == [
        [[0], [1], [2], [3]],
        [[4], [5], [6], [7]],
    ]


def test_ranks_take_chunks_write_them_back_and_the_parts_join(client: tq.TransferQueueClient):
    """What a single controller does: get, chunk over ranks, each rank puts its field, concat, get."""
    client.put(numbers(7, field="ids"), partition_id="p")
    meta = client.get_meta(["ids"], 7, "p", task_name="log_probs")
    parts = []
    for rank, chunk in enumerate(meta.chunk(3)):
        ids = client.get_data(chunk)["ids"]
        lengths = torch.nested.as_nested_tensor(
            [torch.full((rank + 1,), float(row)) for row in ids.unbind()], layout=torch.jagged
        )
        parts.append(client.put(TensorDict({"log_probs": lengths}, batch_size=len(chunk)), metadata=chunk))
    joined = tq.BatchMeta.concat(parts)
    assert joined.is_ready
    assert joined.field_names == ["ids", "log_probs"]
    assert joined.get_shapes("log_probs") == [(1,)] * 3 + [(2,)] * 2 + [(3,)] * 2
    joined.reorder(list(reversed(range(7))))
    got = client.get_data(joined)
    assert values(got["log_probs"])[:3] == [[6.0] * 3, [5.0] * 3, [4.0] * 2]
    assert client.get_meta(["ids", "log_probs"], 7, "p", task_name="train").get_shapes("log_probs")[6] == (3,)


def test_partitions_do_not_see_each_other(client: tq.TransferQueueClient):
    for name, start in (("train", 0), ("val", 2)):
        client.put(numbers(2, start), partition_id=name)
    for name, start in (("train", 0), ("val", 2)):
        meta = client.get_meta(["data"], 2, name, task_name="task")
        assert values(client.get_data(meta)["data"]) == [[start], [start + 1]]


def test_rows_and_fields_are_added_at_any_time(client: tq.TransferQueueClient):
    first = client.put(numbers(2, field="a"), partition_id="dynamic")
    client.put(numbers(3, 2, field="a"), partition_id="dynamic")
    everything = client.get_meta(["a"], 5, "dynamic", task_name="task")
    assert len(everything) == 5
    more = client.put(numbers(2, 20, field="b"), metadata=first)
    assert more.field_names == ["a", "b"]
    status = client.get_production_status(["a", "b"], "dynamic")
    assert status[0].tolist() == everything.global_indexes
    assert status[1].tolist() == [[1, 1], [1, 1], [1, 0], [1, 0], [1, 0]]
    assert status[1].dtype == torch.int8
    assert client.check_production_status(["a"], "dynamic")
    assert not client.check_production_status(["a", "b"], "dynamic")
    assert client.get_production_status(["zz"], "dynamic") == (None, None)
    assert not client.check_production_status(["a"], "nowhere")


def test_each_task_consumes_in_order_and_by_itself(client: tq.TransferQueueClient):
    first = client.put(numbers(6), partition_id="sampling").global_indexes[0]

    def take(task: str, count: int) -> list[int]:
        meta = client.get_meta(
            data_fields=["data"], batch_size=count, partition_id="sampling", task_name=task
        )
        return [at - first for at in meta.global_indexes]

    assert take("A", 3) == [0, 1, 2]
    assert not client.check_consumption_status("A", "sampling")
    assert take("A", 3) == [3, 4, 5]
    assert take("B", 2) == [0, 1]
    assert client.check_consumption_status("A", "sampling")
    assert client.get_consumption_status("B", "sampling")[1].tolist() == [1, 1, 0, 0, 0, 0]
    assert client.reset_consumption("sampling", "A")
    assert take("A", 6) == [0, 1, 2, 3, 4, 5]
    assert client.reset_consumption("sampling")
    assert take("B", 6) == [0, 1, 2, 3, 4, 5]
    assert not client.reset_consumption("nowhere")
    assert client.get_consumption_status("A", "nowhere") == (None, None)


def test_two_consumer_groups_stream_what_a_producer_writes(client: tq.TransferQueueClient):
    """Reference reads prompts and writes a field; the actor takes what has both; all at once, each sample
    once.
    """
    count, seen = 40, {"reference": [], "actor": []}

    def consume(task: str, fields: list[str], size: int) -> None:
        while len(seen[task]) < count:
            meta = client.get_meta(fields, size, "p", task_name=task)
            rows = [row[0] for row in values(client.get_data(meta)["ids"])]
            if task == "reference":
                client.put(TensorDict({"ref": torch.tensor(rows).view(-1, 1) * 2}, batch_size=size), meta)
            else:
                assert values(client.get_data(meta)["ref"]) == [[row * 2] for row in rows]
            seen[task] += rows

    threads = [
        threading.Thread(target=consume, args=("reference", ["ids"], 4)),
        threading.Thread(target=consume, args=("actor", ["ids", "ref"], 8)),
    ]
    for thread in threads:
        thread.start()
    for start in range(0, count, 2):
        client.put(numbers(2, start, field="ids"), partition_id="p")
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert seen == {"reference": list(range(count)), "actor": list(range(count))}


def test_get_meta_waits_for_the_put_that_makes_enough(client: tq.TransferQueueClient):
    client.put(numbers(1), partition_id="p")
    got: list[tq.BatchMeta] = []
    waiting = threading.Thread(target=lambda: got.append(client.get_meta(["data"], 2, "p", task_name="t")))
    waiting.start()
    client.put(numbers(1, 1), partition_id="p")
    waiting.join(30)
    assert values(client.get_data(got[0])["data"]) == [[0], [1]]


def test_too_few_samples_are_a_runtime_error_and_none_is_consumed(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0.05")
    client.put(numbers(1), partition_id="p")
    with pytest.raises(RuntimeError, match="fewer than 2 samples of partition 'p'"):
        client.get_meta(["data"], 2, "p", task_name="t")
    assert len(client.get_meta(["data"], 1, "p", task_name="t")) == 1


def test_force_fetch_shows_all_samples_and_insert_makes_new_ones(client: tq.TransferQueueClient):
    made = client.get_meta(["data"], 3, "p", mode="insert")
    assert not made.is_ready
    assert made.field_names == ["data"]
    client.put(numbers(1), metadata=made[1:2])
    seen = client.get_meta(["data"], 99, "p", mode="force_fetch")
    assert seen.global_indexes == made.global_indexes
    assert seen.production_status.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="'data' is missing in 2"):
        client.get_data(seen)
    client.put(numbers(3, 5), metadata=made)
    everything = client.get_meta(partition_id="p", mode="force_fetch")
    assert values(client.get_data(everything)["data"]) == [[5], [6], [7]]
    assert client.get_meta(["data"], 1, "nowhere", mode="force_fetch").size == 0


def test_keys_and_indexes_translate(client: tq.TransferQueueClient):
    meta = client.kv_retrieve_meta(["a", "b"], "p", create=True)
    client.put(numbers(2), metadata=meta)
    assert client.kv_retrieve_keys(meta.global_indexes, "p") == ["a", "b"]
    assert client.kv_retrieve_keys(meta.global_indexes[1], "p") == ["b"]
    assert client.kv_retrieve_meta(["b", "zz"], "p").global_indexes == meta.global_indexes[1:]
    assert client.kv_list("p") == {"p": {"a": {}, "b": {}}}
    plain = client.put(numbers(1), partition_id="p")
    with pytest.raises(KeyError, match="without a key"):
        client.kv_retrieve_keys(plain.global_indexes, "p")


def test_clearing_samples_leaves_the_rest_and_an_old_index_reads_nothing(client: tq.TransferQueueClient):
    meta = client.put(numbers(4), partition_id="p")
    client.clear_samples(meta[:2])
    client.clear_samples(meta[:3])
    client.put(numbers(3, 10), partition_id="p")
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(meta)
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.put(numbers(4, field="more"), metadata=meta)
    taken = client.get_meta(["data"], 4, "p", task_name="t")
    assert values(client.get_data(taken)["data"]) == [[3], [10], [11], [12]]


def test_wrong_arguments_are_refused(client: tq.TransferQueueClient):
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("partition_id must say", lambda: client.put(numbers(1))),
        ("batch is empty", lambda: client.put(numbers(1), metadata=tq.BatchMeta.empty())),
        (
            "1 rows of data for 2 samples",
            lambda: client.put(numbers(1), client.put(numbers(2), partition_id="p")),
        ),
        ("needs data_fields and batch_size", lambda: client.get_meta(partition_id="p")),
        ("needs the task_name", lambda: client.get_meta(["data"], 1, "p")),
        ("mode is 'steal'", lambda: client.get_meta(["data"], 1, "p", mode="steal", task_name="t")),
        ("must be positive", lambda: client.get_meta(["data"], 0, "p", task_name="t")),
    ]
    for message, call in wrong:
        with pytest.raises(tq.InvalidRequest, match=message):
            call()
    assert client.get_data(tq.BatchMeta.empty()).batch_size == torch.Size([0])


async def test_every_call_can_be_awaited(client: tq.TransferQueueClient):
    meta = await client.async_put(numbers(4), partition_id="p")
    meta.update_custom_meta([{"at": at} for at in range(4)])
    await client.async_set_custom_meta(meta)
    got = await client.async_get_meta(["data"], 4, "p", task_name="t")
    assert got.custom_meta[3] == {"at": 3}
    assert values((await client.async_get_data(got))["data"]) == [[0], [1], [2], [3]]
    assert await client.async_check_consumption_status("t", "p")
    assert (await client.async_get_consumption_status("t", "p"))[1].tolist() == [1] * 4
    assert await client.async_check_production_status(["data"], "p")
    assert (await client.async_get_production_status(["data"], "p"))[1].tolist() == [[1]] * 4
    assert await client.async_reset_consumption("p", "t")
    await client.async_ack(got, "t")
    assert await client.async_get_partition_list() == ["p"]
    keyed = await client.async_kv_retrieve_meta("k", "p", create=True)
    assert await client.async_kv_retrieve_keys(keyed.global_indexes, "p") == ["k"]
    assert await client.async_kv_list() == {"p": {"k": {}}}
    await client.async_clear_samples(meta)
    await client.async_clear_partition("p")
    assert await client.async_get_partition_list() == []


# -- samplers of a user's own, each in a store of its own ----------------------------------------------------


class RandomSampler(tq.BaseSampler):
    """Draws at random; with replacement it consumes nothing."""

    def __init__(self, replace: bool, seed: int = 0) -> None:
        super().__init__()
        self.replace = replace
        self._generator = np.random.default_rng(seed)

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any):
        chosen = self._generator.choice(ready_indexes, batch_size, replace=False).tolist()
        return chosen, [] if self.replace else list(chosen)


class PrioritySampler(tq.BaseSampler):
    """The highest of the scores that the call brings along, one a sample."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, priority_scores: Any, **kwargs: Any
    ):
        assert isinstance(priority_scores, np.ndarray)
        ranked = sorted(ready_indexes, key=lambda at: -priority_scores[kwargs["partition"].ordinal(at)])
        return ranked[:batch_size], ranked[:batch_size]


@pytest.fixture
def own() -> Iterator[Callable[..., tq.TransferQueueClient]]:
    """Starts a store for one test, beside that of the module."""
    session = tq.session
    kept, session._current = session._current, None
    address = {name: os.environ.pop(name, None) for name in (session.ADDRESS, session.TOKEN)}
    yield started
    tq.close()
    session._current = kept
    os.environ.update({name: value for name, value in address.items() if value})


def test_a_sampler_with_replacement_gives_samples_again(own: Callable[..., tq.TransferQueueClient]):
    client = own(sampler=RandomSampler(replace=True))
    client.put(numbers(5), partition_id="test")
    taken = [client.get_meta(["data"], 3, "test", task_name="t").global_indexes for _ in range(4)]
    assert all(len(set(one)) == 3 and set(one) <= set(range(5)) for one in taken)
    assert client.get_consumption_status("t", "test")[1].tolist() == [0] * 5


def test_a_sampler_without_replacement_gives_each_sample_once(own: Callable[..., tq.TransferQueueClient]):
    client = own(sampler=RandomSampler(replace=False))
    client.put(numbers(6), partition_id="test")
    taken = [client.get_meta(["data"], count, "test", task_name="t").global_indexes for count in (3, 1, 2)]
    assert sorted(at for one in taken for at in one) == list(range(6))


def test_a_sampler_gets_the_arguments_of_the_call(own: Callable[..., tq.TransferQueueClient]):
    client = own(sampler=PrioritySampler)
    client.put(numbers(8), partition_id="test")
    scores = np.array([0.01, 0.01, 88, 999, 0.01, 0.01, 0.01, 10])

    def take(count: int) -> list[int]:
        config = {"priority_scores": scores}
        return client.get_meta(["data"], count, "test", task_name="t", sampling_config=config).global_indexes

    assert take(1) == [3]
    assert take(2) == [2, 7]
    with pytest.raises(RuntimeError, match="PrioritySampler raised TypeError"):
        client.get_meta(["data"], 1, "test", task_name="t")


def test_whole_groups_and_balanced_ranks(own: Callable[..., tq.TransferQueueClient]):
    client = own(sampler=tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2), polling_mode=True)
    meta = client.put(numbers(8), partition_id="train")
    meta.update_custom_meta([{"total_lengths": length} for length in (100, 90, 10, 20, 50, 60, 55, 45)])
    client.set_custom_meta(meta)

    def take(rank: int, index: int) -> list[int]:
        config = {"dp_rank": rank, "batch_index": index, "task_name": "t", "partition_id": "train"}
        return client.get_meta(["data"], 4, "train", task_name="t", sampling_config=config).global_indexes

    first, second = take(0, 0), take(1, 0)
    assert sorted(first + second) == list(range(8))
    assert take(0, 0) == first
    assert take(0, 1) == []
    lengths = [tag["total_lengths"] for tag in meta.custom_meta]
    assert sorted(sum(lengths[at] for at in share) for share in (first, second)) == [210, 220]


def test_polling_returns_an_empty_batch_at_once(own: Callable[..., tq.TransferQueueClient]):
    client = own(polling_mode=True, sampler=tq.GRPOGroupNSampler(n_samples_per_prompt=2))
    client.put(numbers(3), partition_id="p")
    assert client.get_meta(["data"], 4, "p", task_name="t").size == 0
    client.put(numbers(1, 3), partition_id="p")
    assert client.get_meta(["data"], 4, "p", task_name="t").global_indexes == [0, 1, 2, 3]
