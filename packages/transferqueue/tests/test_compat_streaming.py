"""`StreamingDataset` and `StreamingDataLoader`, as the tutorial of the PyPI package uses them."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
import transferqueue.compat.transfer_queue as tq  # noqa: E402
from transferqueue.compat.transfer_queue.dataloader import chunk_batch_fn  # noqa: E402

TensorDict = tensordict.TensorDict
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    tq.init({"controller": {"sampler": tq.RankAwareSampler, "polling_mode": True}})
    yield
    tq.close()


Make = Callable[..., tq.StreamingDataset]


@pytest.fixture
def dataset() -> Iterator[Make]:
    """Datasets over fresh partitions, closed with the test."""
    made: list[tq.StreamingDataset] = []

    def make(**other: Any) -> tq.StreamingDataset:
        arguments = {
            "config": tq.init(),
            "batch_size": 2,
            "micro_batch_size": 2,
            "data_fields": ["meta_idx"],
            "partition_id": "train",
            "task_name": "update_task",
            "dp_rank": 0,
        }
        made.append(tq.StreamingDataset(**arguments | other))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for name in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(name)


def put(start: int, count: int, partition: str = "train") -> None:
    for at in range(start, start + count):
        one = {"input_ids": torch.full((1, 16), at), "meta_idx": torch.tensor([at])}
        tq.get_client().put(TensorDict(one, batch_size=1), partition_id=partition)


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch["meta_idx"].view(-1).tolist() for batch, _ in batches]


def first(loader: Any, count: int) -> list[Any]:
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(count)]
    del iterator  # ends the worker processes
    return batches


def test_ranks_of_a_group_get_the_same_batches_and_groups_share_the_samples(dataset: Make):
    """The tutorial: two producers, four ranks in two groups, all at once, five steps each."""
    results: dict[int, list[list[int]]] = {}

    def train(rank: int, dp_rank: int) -> None:
        loader = tq.StreamingDataLoader(dataset(dp_rank=dp_rank))
        results[rank] = numbers(first(loader, 5))

    threads = [threading.Thread(target=train, args=(rank, rank // 2)) for rank in range(4)]
    threads += [threading.Thread(target=put, args=(10_000 * at, 10)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert results[0] == results[1]
    assert results[2] == results[3]
    every = sorted(at for batch in results[0] + results[2] for at in batch)
    assert every == [*range(10), *range(10_000, 10_010)], "each sample went to one group, once"


def test_worker_processes_give_each_batch_once_and_in_order(dataset: Make):
    put(0, 12)
    loader = tq.StreamingDataLoader(dataset(), num_workers=2, prefetch_factor=2)
    every = [[at, at + 1] for at in range(0, 12, 2)]
    assert numbers(first(loader, 6)) == every
    other = tq.StreamingDataLoader(dataset(), num_workers=0)
    assert numbers(first(other, 6)) == every, "the rank's other process"


def test_a_finite_stream_ends_for_every_process_of_a_rank(dataset: Make):
    put(0, 10)
    for workers in (2, 0):
        finite = dataset(should_check_consumption_status=True)
        batches = list(tq.StreamingDataLoader(finite, num_workers=workers))
        assert numbers(batches) == [[at, at + 1] for at in range(0, 10, 2)]


def test_announced_samples_keep_a_finite_stream_open(dataset: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tq.session._current.started.catalog._catalog, "_announced", 4)  # type: ignore[union-attr]
    put(0, 2, "announced")
    seen: list[list[int]] = []
    finite = dataset(partition_id="announced", should_check_consumption_status=True)
    reading = threading.Thread(target=lambda: seen.extend(numbers(list(finite))))
    reading.start()
    put(2, 2, "announced")
    reading.join(30)
    assert seen == [[0, 1], [2, 3]]


def test_micro_batches_split_a_batch_and_its_metadata(dataset: Make):
    put(0, 7)
    loader = tq.StreamingDataLoader(dataset(batch_size=7, micro_batch_size=3))
    batches = first(loader, 3)
    assert numbers(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(meta) for _, meta in batches] == [3, 3, 1]
    assert len({at for _, meta in batches for at in meta.global_indexes}) == 7
    assert list(tq.get_client().get_data(batches[1][1])["meta_idx"]) == [3, 4, 5]


def test_reset_starts_over_and_step_goes_on_with_another_partition(dataset: Make):
    put(0, 4)
    put(10, 2, "val")
    loader = tq.StreamingDataLoader(dataset())
    assert numbers(first(loader, 2)) == [[0, 1], [2, 3]]
    assert len(loader.get_buffer()) == 2
    loader.reset()
    assert numbers(first(loader, 2)) == [[0, 1], [2, 3]]
    loader.step("val")
    assert numbers(first(loader, 1)) == [[10, 11]]
    assert len(loader.get_buffer()) == 1


def test_a_users_functions_fetch_and_process(dataset: Make):
    put(0, 4)
    asked: list[int] = []

    def fetch(tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index):
        asked.append(batch_index)
        config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
        meta = tq_client.get_meta(data_fields, batch_size, partition_id, "fetch", task_name, config)
        return (tq_client.get_data(meta) if meta.size else None), meta

    def process(td, batch_meta, micro_batch_size):
        return [(td, batch_meta)] * micro_batch_size

    loader = tq.StreamingDataLoader(dataset(fetch_batch_fn=fetch, process_batch_fn=process))
    assert numbers(first(loader, 4)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert asked == [0, 1]


def test_a_waiting_stream_is_woken_by_the_put(dataset: Make):
    put(0, 1)
    seen: list[Any] = []
    reading = threading.Thread(target=lambda: seen.extend(first(dataset(), 1)))
    reading.start()
    put(1, 1)
    reading.join(30)
    assert numbers(seen) == [[0, 1]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"micro_batch_size": 0}, "positive"),
        ({"batch_size": 0}, "positive"),
        ({"data_fields": []}, "data_fields"),
        ({"dp_rank": -1}, "dp_rank"),
    ],
)
def test_wrong_arguments_are_refused(dataset: Make, wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataset(**wrong)


def test_chunks_keep_nested_and_plain_fields():
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6])]
    batch = TensorDict(
        {
            "a": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "b": torch.arange(3),
            "c": tensordict.NonTensorStack("x", "y", "z"),
        },
        batch_size=3,
    )
    meta = tq.BatchMeta([7, 8, 9], ["p"] * 3)
    chunks = chunk_batch_fn(batch, meta, micro_batch_size=2)
    assert [td.batch_size[0] for td, _ in chunks] == [2, 1]
    assert [one.global_indexes for _, one in chunks] == [[7, 8], [9]]
    assert [row.tolist() for row in chunks[0][0]["a"].unbind()] == [[1, 2], [3, 4, 5]]
    assert (chunks[1][0]["b"].tolist(), list(chunks[1][0]["c"])) == ([2], ["z"])
    strided = torch.nested.as_nested_tensor([torch.ones(2, 2), torch.ones(1, 3)], layout=torch.strided)
    only = chunk_batch_fn(TensorDict({"a": strided}, batch_size=2), tq.BatchMeta([0, 1], ["p"] * 2))
    assert [tuple(td["a"].unbind()[0].shape) for td, _ in only] == [(2, 2), (1, 3)]
    for wrong, message in ((0, "positive"), (4, "exceeds"), (True, "positive")):
        with pytest.raises(ValueError, match=message):
            chunk_batch_fn(batch, meta, micro_batch_size=wrong)
    with pytest.raises(TypeError, match="TensorDict"):
        chunk_batch_fn({"b": torch.arange(3)}, meta)
