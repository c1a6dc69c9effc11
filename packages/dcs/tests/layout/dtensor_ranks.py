"""Four ranks with DTensors, forked so that torch is imported once: `python dtensor_ranks.py FOLDER`.

Each leaves its layout (`rank.layout`), and its own part of every tensor (`rank.NAME.npy`).
"""

import multiprocessing
import sys
import traceback
from pathlib import Path

import dcs.layout
import msgspec
import numpy as np
import torch
from dcs.errors import LayoutMismatch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4


def model() -> nn.Sequential:
    """Every rank makes the same one. The first dimension of some of its tensors cannot be cut evenly."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.Linear(12, 7), nn.LayerNorm(7))


def tensors() -> dict[str, torch.Tensor]:
    """What this rank holds."""
    line = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, torch.Tensor] = {}
    source = torch.arange(70.0).view(7, 10)
    for name, mesh, placements in (
        ("rows", line, [Shard(0)]),
        ("columns", line, [Shard(1)]),
        ("everywhere", line, [Replicate()]),
        ("both", square, [Shard(0), Shard(1)]),
        ("twice", square, [Shard(0), Shard(0)]),
        ("half", square, [Replicate(), Shard(-1)]),
        ("few", line, [Shard(0)]),
    ):
        found[name] = distribute_tensor(source[:2] if name == "few" else source, mesh, placements)
    found["plain"] = torch.arange(5)

    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=line)
    found |= {f"fsdp.{name}": tensor for name, tensor in sharded.state_dict().items()}

    twofold = model()
    parallelize_module(twofold, square["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in twofold:
        fully_shard(layer, mesh=square["dp"])
    found |= {f"fsdp_tp.{name}": tensor for name, tensor in twofold.state_dict().items()}
    return found


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        held = tensors()
        layout = dcs.layout.of(held)
        (folder / f"{rank}.layout").write_bytes(msgspec.msgpack.encode(layout))
        for name, tensor in held.items():
            np.save(folder / f"{rank}.{name}.npy", dcs.layout.local(tensor).numpy())
        pending = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (RANKS,)), [Partial()])
        try:
            dcs.layout.of({"gradient": pending})
        except LayoutMismatch as error:
            (folder / f"{rank}.refused").write_text(str(error))
    finally:
        dist.destroy_process_group()


def guarded(rank: int, folder: Path) -> None:
    try:
        run(rank, folder)
    except BaseException:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=guarded, args=(rank, Path(sys.argv[1]))) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    sys.exit(0 if codes == [0] * RANKS else f"exit codes {codes}")
