"""One program, run with the PyPI package in an environment of its own and with this store: the same lines.

TRANSFER_QUEUE_PEER_PYTHON names the Python of an environment in which ``transferqueue==0.1.11`` is installed.
"""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import asyncio, json, os, sys, warnings

warnings.filterwarnings("ignore")
os.environ["RAY_DEDUP_LOGS"] = "0"
PEER = sys.argv[1] == "peer"
import torch
from tensordict import NonTensorStack, TensorDict

if PEER:
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
else:
    import transferqueue.compat.transfer_queue as tq
torch.set_num_threads(1)


def plain(value):
    if isinstance(value, torch.Tensor):
        rows = value.unbind() if value.is_nested else value
        layout = str(value.layout) if value.is_nested else "dense"
        return [layout, str(value.dtype), [row.tolist() for row in rows]]
    if isinstance(value, TensorDict):
        return {name: plain(value[name]) for name in sorted(value.keys())}
    if isinstance(value, tq.BatchMeta):
        schema = {
            name: [
                str(known["dtype"]),
                [list(shape or ()) for shape in value.get_shapes(name)],
                known["is_non_tensor"],
            ]
            for name, known in sorted(value.field_schema.items())
        }
        return [str(value), value.partition_ids, value.production_status.tolist(), value.custom_meta, schema]
    if isinstance(value, tq.KVBatchMeta):
        return [str(value), value.keys, value.tags, value.partition_id]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value


def say(title, call):
    try:
        print("LINE", title, json.dumps(plain(call()), sort_keys=True), flush=True)
    except (ValueError, KeyError, RuntimeError) as error:
        kinds = [kind.__name__ for kind in (ValueError, KeyError, RuntimeError) if isinstance(error, kind)]
        print("LINE", title, "raises", kinds[0], flush=True)


def td(rows, **fields):
    return TensorDict(fields, batch_size=rows)


def jagged(*lengths, start=0):
    rows = [torch.arange(start, start + length, dtype=torch.float32) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def key_values():
    ids = torch.arange(1, 4).view(1, 3)
    say("kv_put", lambda: tq.kv_put("0_0", "Train", td(1, input_ids=ids, mask=torch.ones(1, 3)), {"step": 0}))
    keys = ["1_0", "1_1", "1_2", "2_0"]
    ids = torch.arange(4, 16).view(4, 3)
    fields = td(4, input_ids=ids, mask=torch.ones(4, 3))
    tags = [{"step": 1, "at": at} for at in range(4)]
    say("kv_batch_put", lambda: tq.kv_batch_put(keys, "Train", fields, tags))
    text = NonTensorStack("a", {"b": [1, None]})
    more = td(2, response=jagged(2, 3), score=torch.tensor([0.5, 1.5]), text=text)
    say("append", lambda: tq.kv_batch_put(["1_1", "2_0"], "Train", more, [{"status": "finish"}] * 2))
    say("tag only", lambda: tq.kv_put("0_0", "Train", tag={"status": "finish"}))
    one = {"x": torch.tensor([1, 2]), "s": torch.tensor(2.5), "t": "text"}
    say("dict", lambda: tq.kv_put("d", "Dict", one))
    say("dict back", lambda: tq.kv_batch_get("d", "Dict"))
    say("list", lambda: tq.kv_list())
    say("list one", lambda: tq.kv_list("Train"))
    say("list none", lambda: tq.kv_list("Nowhere"))
    everything = ["0_0", *keys]
    say("column", lambda: tq.kv_batch_get(everything, "Train", "input_ids"))
    say("common", lambda: tq.kv_batch_get(everything, "Train"))
    say("all fields", lambda: tq.kv_batch_get(["2_0", "1_1"], "Train"))
    meta = tq.kv_batch_put(["1_1", "2_0"], "Train", tags=[{}, {}])
    say("by meta", lambda: tq.kv_batch_get_by_meta(meta, ["score", "response"]))
    say("chunks", lambda: meta.chunk(3))
    say("concat", lambda: tq.KVBatchMeta.concat(meta.chunk(2)))
    say("select", lambda: meta.select_keys(["2_0"]))
    say("by meta, wrong", lambda: tq.kv_batch_get_by_meta(meta, "nothing"))
    say("no such key", lambda: tq.kv_batch_get("zz", "Train"))
    say("nothing to put", lambda: tq.kv_put("a", "Train"))
    say("clear", lambda: tq.kv_clear(everything[:2] + ["zz"], "Train"))
    say("after clear", lambda: tq.kv_list("Train"))
    say("clear nowhere", lambda: tq.kv_clear("a", "Nowhere"))
    for at, length in enumerate((1, 2, 3)):
        tq.kv_put(f"n{at}", "Nested", td(1, data=torch.arange(length).view(1, length)))
    say("nested", lambda: tq.kv_batch_get(["n2", "n0"], "Nested"))
    images = td(2, image=torch.arange(12.0).view(2, 2, 3), flag=torch.tensor([True, False]))
    tq.kv_batch_put(["a", "b"], "Images", images)
    say("images", lambda: tq.kv_batch_get(["b", "a"], "Images"))

    async def awaited():
        fields = td(2, v=torch.ones(2, 1))
        meta = await tq.async_kv_batch_put(["x", "y"], "Async", fields, [{"v": 1}, {"v": 2}])
        data = await tq.async_kv_batch_get(["y"], "Async", "v")
        by_meta = await tq.async_kv_batch_get_by_meta(meta)
        await tq.async_kv_clear("x", "Async")
        return [meta, data, by_meta, await tq.async_kv_list("Async")]

    say("async", lambda: asyncio.run(awaited()))
    for name in ("Train", "Dict", "Nested", "Images", "Async"):
        tq.get_client().clear_partition(name)
    say("nothing left", lambda: tq.kv_list())


def metadata():
    def make(indexes, *fields):
        known = {"shape": (4,), "is_nested": False, "is_non_tensor": False, "dtype": torch.int64}
        return tq.BatchMeta(indexes, ["p"] * len(indexes), {name: dict(known) for name in fields})

    batch = make(list(range(5)), "a", "b")
    say("not ready", lambda: batch)
    say("add_fields", lambda: batch.add_fields(td(5, c=torch.zeros(5, 2), d=torch.zeros(5))))
    batch.update_custom_meta([{"uid": at} for at in range(5)])
    batch.set_extra_info("epoch", 1)
    say("select_fields", lambda: batch.select_fields(["a", "zz"]))
    say("select_samples", lambda: batch.select_samples([4, 0]))
    say("wrong sample", lambda: batch.select_samples([5]))
    say("chunk", lambda: batch.chunk(3))
    say("concat", lambda: tq.BatchMeta.concat(batch.chunk(2)))
    say("concat, other fields", lambda: tq.BatchMeta.concat([batch, make([9], "a")]))
    say("union", lambda: make([0, 1], "a", "b").union(make([0, 1], "b", "c")))
    say("union, other samples", lambda: make([0, 1], "a").union(make([0, 2], "b")))
    say("index", lambda: [batch[-1], batch[1:3], len(batch)])
    batch.reorder([4, 3, 2, 1, 0])
    say("reorder", lambda: batch)
    say("reorder, wrong", lambda: batch.reorder([0, 0, 1, 2, 3]))
    say("by partition", lambda: tq.BatchMeta([0, 1, 2], ["q", "p", "q"]).chunk_by_partition())
    say("empty", lambda: tq.BatchMeta.empty())


def samplers():
    groups = tq.GRPOGroupNSampler(n_samples_per_prompt=3)
    say("groups", lambda: groups.sample([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6))
    say("too few groups", lambda: groups.sample([0, 1, 3, 4, 6, 7], 6))
    say("wrong group size", lambda: groups.sample([0, 1, 2], 2))
    say("sequential", lambda: tq.SequentialSampler()([3, 4, 5], 2))
    ranks = tq.RankAwareSampler()
    for rank, index, ready in ((0, 0, [0, 1, 2, 3]), (0, 0, [2, 3]), (1, 0, [2, 3]), (0, 1, [])):
        say("rank", lambda: ranks(ready, 2, dp_rank=rank, batch_index=index, task_name="t", partition_id="p"))


def client_calls():
    client = tq.get_client()

    def get(task, count, fields=("x",)):
        return client.get_meta(list(fields), count, "p", task_name=task)

    def values(meta):
        return client.get_data(meta)["x"]

    say("put", lambda: client.put(td(6, x=torch.arange(6).view(6, 1)), partition_id="p"))
    say("A takes 3", lambda: values(get("A", 3)))
    say("A takes 3 more", lambda: values(get("A", 3)))
    say("A finds nothing", lambda: get("A", 1))
    say("B takes 2", lambda: values(get("B", 2)))
    say("consumed", lambda: [client.check_consumption_status(task, "p") for task in "AB"])
    say("consumption of B", lambda: client.get_consumption_status("B", "p")[1])
    say("produced", lambda: [client.check_production_status(fields, "p") for fields in (["x"], ["x", "y"])])
    say("reset", lambda: [client.reset_consumption("p", "A"), client.check_consumption_status("A", "p")])
    meta = get("A", 6)
    ranks = enumerate(meta.chunk(4))
    parts = [client.put(td(len(one), y=jagged(*[rank + 1] * len(one))), metadata=one) for rank, one in ranks]
    joined = tq.BatchMeta.concat(parts)
    say("joined", lambda: joined)
    say("joined data", lambda: client.get_data(joined))
    say("both fields", lambda: client.get_data(get("C", 6, ("y", "x")).select_samples([5, 0])))
    meta.update_custom_meta([{"at": at} for at in range(6)])
    client.set_custom_meta(meta)
    say("custom meta", lambda: get("D", 6).custom_meta)
    say("production", lambda: client.get_production_status(["x", "y"], "p")[1])
    say("no such field", lambda: list(client.get_production_status(["zz"], "p")))
    async def awaited():
        meta = await client.async_put(td(2, x=torch.tensor([[7], [8]])), partition_id="q")
        got = await client.async_get_meta(data_fields=["x"], batch_size=2, partition_id="q", task_name="t")
        data = await client.async_get_data(got)
        done = await client.async_check_consumption_status("t", "q")
        await client.async_clear_partition("q")
        return [meta.size, data, done]

    # The peer's coroutines belong to the loop of its client.
    say("async client", lambda: client._run_coroutine(awaited()) if PEER else asyncio.run(awaited()))
    client.clear_samples(meta.select_samples([0, 1]))
    say("cleared", lambda: values(get("E", 4)))
    say("stale", lambda: client.get_data(meta))
    say("partitions", lambda: client.get_partition_list())
    client.clear_partition("p")
    say("no partitions", lambda: [client.get_partition_list(), client.check_consumption_status("A", "p")])


def streaming(config):
    client = tq.get_client()
    for at in range(8):
        client.put(td(1, x=torch.full((1, 4), at), at=torch.tensor([at])), partition_id="train")

    def loader(rank):
        dataset = tq.StreamingDataset(
            config=config, batch_size=4, micro_batch_size=2, data_fields=["at"], partition_id="train",
            task_name="update", dp_rank=rank,
        )
        return tq.StreamingDataLoader(dataset)

    def take(loader, count):
        seen = []
        for batch, meta in loader:
            seen.append([batch["at"].view(-1).tolist(), meta.size, meta.field_names])
            if len(seen) == count:
                return seen

    first, second = loader(0), loader(1)
    say("rank 0", lambda: take(first, 2))
    say("rank 1", lambda: take(second, 2))
    say("rank 0, another process", lambda: take(loader(0), 2))
    first.reset()
    say("rank 0, again", lambda: take(first, 2))
    say("buffer", lambda: len(first.get_buffer()))


if sys.argv[2] == "calls":
    tq.init({"controller": {"polling_mode": True}})
    client_calls()
    key_values()
    metadata()
    samplers()
else:
    config = {"controller": {"sampler": tq.RankAwareSampler, "polling_mode": True}}
    if PEER:
        from omegaconf import OmegaConf

        config = OmegaConf.create(config, flags={"allow_objects": True})
    streaming(tq.init(config))
tq.close()
"""


def lines(python: str, side: str, part: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", PROGRAM, side, part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{side} ended with {done.returncode}: {done.stderr[-3000:]}"
    return [line for line in done.stdout.splitlines() if line.startswith("LINE")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("part", "count"), [("calls", 69), ("streaming", 5)])
def test_the_same_program_says_the_same_with_the_peer_and_with_this_store(part: str, count: int):
    python = os.environ.get("TRANSFER_QUEUE_PEER_PYTHON")
    if not python:
        pytest.skip("TRANSFER_QUEUE_PEER_PYTHON names no environment with transferqueue==0.1.11")
    pytest.importorskip("tensordict")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours = lines(sys.executable, "ours", part, dict(os.environ))
    theirs = lines(python, "peer", part, bare)
    assert len(ours) == count
    assert ours == theirs
