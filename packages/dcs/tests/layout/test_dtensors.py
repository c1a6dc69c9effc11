"""DTensor layouts: what a rank of FSDP2 and of tensor parallelism says that it holds, is what it holds."""

import subprocess
import sys
from pathlib import Path

import dcs.layout
import msgspec
import numpy as np
import pytest
import torch
from dcs.layout import Layout, TensorSpec
from dcs.plan import blocks, plan
from torch import distributed as dist

RANKS = 4


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_on_one_rank_a_dtensor_is_all_of_its_tensor(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    plain = torch.arange(12.0).view(3, 4)
    expected = dcs.layout.of({"w": plain})
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(plain, mesh, [placement])
        assert dcs.layout.of({"w": tensor}) == expected
        assert torch.equal(dcs.layout.local(tensor), plain)
    assert dcs.layout.local(plain) is plain
    assert dcs.layout.of(
        {"w": distribute_tensor(plain, mesh, [Shard(0)])}, dtype="bfloat16"
    ) == dcs.layout.of({"w": plain.bfloat16()})


@pytest.mark.slow
def test_four_ranks_hold_what_their_layouts_say(tmp_path):
    script = Path(__file__).with_name("dtensor_ranks.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    layouts = [
        msgspec.msgpack.decode((tmp_path / f"{rank}.layout").read_bytes(), type=Layout)
        for rank in range(RANKS)
    ]
    for rank in range(RANKS):
        refused = (tmp_path / f"{rank}.refused").read_text()
        assert "'gradient' is a DTensor with a pending reduction" in refused

    # Together they fill a receiver that has every tensor whole.
    shapes = {
        spec.name: (spec.pieces[0].shape if spec.pieces else spec.shape, spec.dtype)
        for spec in layouts[0].tensors
    }
    whole = Layout(tuple(TensorSpec(name, *found) for name, found in shapes.items()))
    starts, nbytes = whole.offsets()
    filled = np.zeros(nbytes, np.uint8)
    sent = []
    for rank, rows in enumerate(plan(whole, layouts).blocks):
        own_starts, own_bytes = layouts[rank].offsets()
        memory = np.zeros(own_bytes, np.uint8)
        for start, spec in zip(own_starts, layouts[rank].tensors, strict=True):
            held = np.ascontiguousarray(np.load(tmp_path / f"{rank}.{spec.name}.npy"))
            memory[start : start + spec.nbytes] = held.reshape(-1).view(np.uint8)
        packed = np.zeros(blocks.nbytes(blocks.source_side(rows)), np.uint8)
        sent.append(blocks.gather(blocks.source_side(rows), memory, packed))
        blocks.scatter(blocks.destination_side(rows), filled, packed)
    assert sum(sent) == sum(spec.nbytes for spec in whole.tensors)

    torch.manual_seed(5)
    linear = torch.nn.Linear
    expected = torch.nn.Sequential(
        linear(6, 12, bias=False), linear(12, 7), torch.nn.LayerNorm(7)
    ).state_dict()
    grid = torch.arange(70.0).view(7, 10)
    for start, spec in zip(starts, whole.tensors, strict=True):
        value = (
            torch.from_numpy(filled[start : start + spec.nbytes])
            .view(getattr(torch, spec.dtype))
            .view(spec.shape)
        )
        if spec.name.startswith("fsdp"):
            assert torch.equal(value, expected[spec.name.split(".", 1)[1]]), spec.name
        elif spec.name == "plain":
            assert torch.equal(value, torch.arange(5))
        else:
            assert torch.equal(value, grid[: len(value)]), spec.name
    for name in ("rows", "both", "twice", "fsdp.0.weight", "fsdp_tp.0.weight", "fsdp_tp.1.weight"):
        parts = {
            layout.tensors[[spec.name for spec in layout.tensors].index(name)].pieces for layout in layouts
        }
        assert len(parts) == RANKS, name  # no two ranks hold the same part
