"""Saving a store's whole state and taking it up in another."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
import transferqueue.compat.transfer_queue as tq  # noqa: E402

TensorDict = tensordict.TensorDict
torch.set_num_threads(1)


@pytest.fixture
def restart() -> Iterator[Callable[..., tq.TransferQueueClient]]:
    """Ends the store, if there is one, and starts another, which knows nothing."""

    def start(units: int = 1, **controller: Any) -> tq.TransferQueueClient:
        tq.close()
        conf = {"polling_mode": True} | controller
        tq.init({"controller": conf, "backend": {"SimpleStorage": {"num_data_storage_units": units}}})
        return tq.get_client()

    yield start
    tq.close()


def rows(values: Any) -> list[Any]:
    return [row.tolist() for row in values.unbind()]


def test_samples_tags_and_consumption_come_back_on_another_number_of_units(
    restart: Callable[..., tq.TransferQueueClient], tmp_path: Path
):
    client = restart(units=1)
    ragged = [torch.arange(at, dtype=torch.float32).to(torch.bfloat16) for at in (3, 0, 2)]
    fields = {
        "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
        "score": torch.tensor([1.0, 2.0, 3.0]),
        "image": torch.arange(12, dtype=torch.uint8).view(3, 2, 2),
        "text": tensordict.NonTensorStack("a", None, {"b": 1}),
    }
    tq.kv_batch_put(list("abc"), "train", TensorDict(fields, batch_size=3), [{"v": at} for at in range(3)])
    tq.kv_put("bare", "train", tag={"only": "a tag"})
    put = client.put(TensorDict({"x": torch.arange(300).view(300, 1)}, batch_size=300), partition_id="many")
    taken = client.get_meta(["x"], 100, "many", task_name="t")
    tq.save_checkpoint(tmp_path / "step" / "tq", metadata={"step": 10})

    client = restart(units=2)
    tq.kv_put("old", "gone", {"x": torch.ones(1)})
    tq.load_checkpoint(tmp_path / "step" / "tq")
    assert sorted(tq.kv_list()) == ["many", "train"]
    assert tq.kv_list("train")["train"] == {
        "a": {"v": 0},
        "b": {"v": 1},
        "c": {"v": 2},
        "bare": {"only": "a tag"},
    }
    got = tq.kv_batch_get(["c", "a", "b"], "train")
    assert got["ragged"].dtype == torch.bfloat16
    assert rows(got["ragged"]) == [[0.0, 1.0], [0.0, 1.0, 2.0], []]
    assert got["score"].tolist() == [3.0, 1.0, 2.0]
    assert rows(got["image"])[1] == [[0, 1], [2, 3]]
    assert list(got["text"]) == [{"b": 1}, "a", None]
    rest = client.get_meta(["x"], 200, "many", task_name="t")
    assert rest.global_indexes == put.global_indexes[100:]
    assert rows(client.get_data(rest)["x"])[0] == [100]
    assert client.get_meta(["x"], 1, "many", task_name="t").size == 0
    assert rows(client.get_data(taken)["x"])[99] == [99], "metadata from before the restart is good"
    [partition] = client._queue.stats().partitions.values()
    assert partition.samples == 303, "what was there before the load is gone from the store"
    said = json.loads((tmp_path / "step" / "tq" / "metadata.json").read_text())
    assert said["user_metadata"] == {"step": 10}


@pytest.mark.slow
def test_a_rank_gets_the_same_batches_after_a_restart(
    restart: Callable[..., tq.TransferQueueClient], tmp_path: Path
):
    def take(client: tq.TransferQueueClient, index: int) -> list[int]:
        config = {"dp_rank": 0, "batch_index": index, "task_name": "t", "partition_id": "p"}
        return client.get_meta(["x"], 2, "p", task_name="t", sampling_config=config).global_indexes

    client = restart(sampler=tq.RankAwareSampler)
    client.put(TensorDict({"x": torch.arange(4)}, batch_size=4), partition_id="p")
    assert take(client, 0) == [0, 1]
    tq.save_checkpoint(tmp_path / "c")
    client = restart(sampler=tq.RankAwareSampler)
    tq.load_checkpoint(tmp_path / "c")
    assert (take(client, 0), take(client, 1)) == ([0, 1], [2, 3])


def test_a_checkpoint_replaces_the_one_before_and_survives_a_save_that_ended_early(
    restart: Callable[..., tq.TransferQueueClient], tmp_path: Path
):
    restart()
    folder = tmp_path / "c"
    for at in range(2):
        tq.kv_put(f"k{at}", "p", tag={})
        tq.save_checkpoint(folder)
    assert [one.name for one in tmp_path.iterdir()] == ["c"]
    folder.rename(tmp_path / "c.old")  # as a save leaves it that ends between its renames
    tq.load_checkpoint(folder)
    assert list(tq.kv_list("p")["p"]) == ["k0", "k1"]
    tq.save_checkpoint(folder)
    tq.load_checkpoint(folder)
    assert list(tq.kv_list("p")["p"]) == ["k0", "k1"]


def test_a_folder_that_is_no_checkpoint_is_refused_and_changes_nothing(
    restart: Callable[..., tq.TransferQueueClient], tmp_path: Path
):
    restart()
    tq.kv_put("a", "p", tag={"v": 1})
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        tq.load_checkpoint(tmp_path)
    tq.save_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "metadata.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        tq.load_checkpoint(tmp_path / "c")
    assert tq.kv_list() == {"p": {"a": {"v": 1}}}
