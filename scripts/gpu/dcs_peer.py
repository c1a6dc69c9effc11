"""The other process of a dcs check: says a JSON line, reads one where it has to.

dcs_peer.py group BACKEND DEVICE PORT RANK NBYTES DEADLINE
dcs_peer.py borrow DEVICE NBYTES
dcs_peer.py subscribe DEVICE NBYTES ADDRESS COLLECTIVE
"""

import json
import sys
import time

import dcs
import torch
from dcs.wire import ipc
from dcs.wire.collective import CollectiveBroken, Group


def weights(nbytes: int, fill: int = 0) -> dict[str, torch.Tensor]:
    """320 bf16 tensors of about `nbytes` together, as in 32 layers; random bits, by `fill`."""
    elements = nbytes // 2 // 32
    shapes = {"gate_up": elements * 2 // 5, "down": elements // 5, "qkv": elements // 5, "out": elements // 6}
    shapes |= {f"norm_{number}": max(elements // 2000, 1) for number in range(6)}
    generator = torch.Generator().manual_seed(1000 + fill)
    noise = torch.randint(-(1 << 15), 1 << 15, (elements,), dtype=torch.int16, generator=generator)
    bits = torch.cat([noise, noise]).view(torch.bfloat16)
    return {
        f"layers.{layer}.{name}": bits[layer * elements // 32 :][:count]
        for layer in range(32)
        for name, count in shapes.items()
    }


def checksum(flat: torch.Tensor) -> int:
    """Depends on the place of every byte of `flat`, uint8 [n], n a multiple of 8."""
    words = flat[: len(flat) // 8 * 8].view(torch.int64)
    total = 0
    for start in range(0, len(words), 1 << 24):
        part = words[start : start + (1 << 24)]
        places = torch.arange(start + 1, start + 1 + len(part), device=flat.device)
        total ^= int((part ^ (places * 0x9E3779B97F4A7C1)).sum())
    return total


def group(backend: str, device: str, port: str, rank: str, nbytes: str, deadline: str) -> dict:
    where = torch.device(device) if backend == "nccl" else torch.device("cpu")
    flat = torch.arange(int(nbytes), dtype=torch.int64).to(torch.uint8)
    own = flat.clone()
    if rank != "0":
        flat.zero_()
    seconds: list[float] = []
    try:
        with Group(backend, "127.0.0.1", int(port), "check", int(rank), 2, float(deadline), where) as members:  # type: ignore[arg-type]
            for _ in range(3):
                began = time.perf_counter()
                members.broadcast(flat)
                seconds.append(time.perf_counter() - began)
    except CollectiveBroken as error:
        return {"broken": error.cause, "quiet": error.quiet}
    return {"equal": torch.equal(flat, own), "seconds": min(seconds)}


def borrow(device: str, nbytes: str) -> dict:
    layout = dcs.layout.of(weights(int(nbytes)))
    torch.ones(1, device=device)  # the context costs a second that is not the loan's
    print(json.dumps({"ready": True}), flush=True)
    loan = ipc.decode(bytes.fromhex(json.loads(sys.stdin.readline())["loan"]))
    began = time.perf_counter()
    borrowed = ipc.borrow(loan, layout, device)
    seconds = time.perf_counter() - began
    answer = {"seconds": seconds, "checksum": checksum(borrowed.flat), "tensors": len(borrowed.tensors)}
    del borrowed
    torch.cuda.ipc_collect()
    return answer


def subscribe(device: str, nbytes: str, address: str, collective: str) -> dict:
    """Takes versions 1 and 2 of a run and compares them, on the device, with what they have to be."""
    layout = dcs.layout.of(weights(int(nbytes)))
    answer: dict = {"versions": []}
    with dcs.Subscriber(
        address,
        run="check",
        name="peer",
        layout=layout,
        wires=("tcp",),
        collective="" if collective == "none" else collective,  # type: ignore[arg-type]
        collective_seconds=10.0,
        device=device,
    ) as engine:
        print(json.dumps({"ready": True}), flush=True)
        for version in (1, 2):
            staged = engine.next(after=version - 1, timeout=60.0)
            if staged is None or staged.version != version:
                return answer | {"reason": f"asked for version {version}, got {staged}"}
            there = {tensor.device.type for tensor in staged.tensors.values()} == {torch.device(device).type}
            equal = all(
                torch.equal(staged.tensors[name].view(torch.int16).cpu(), tensor.view(torch.int16))
                for name, tensor in weights(int(nbytes), version).items()
            )
            live = {name: torch.empty_like(tensor) for name, tensor in staged.tensors.items()}
            began = time.perf_counter()
            for name, tensor in live.items():
                tensor.copy_(staged.tensors[name])
            if there and device.startswith("cuda"):
                torch.cuda.synchronize()
            pause = time.perf_counter() - began
            answer["versions"].append(
                {
                    "equal": equal,
                    "there": there,
                    "wire": staged.wire,
                    "seconds": staged.transfer_seconds,
                    "pause": pause,
                    "staging": engine.health().staging,
                }
            )
            staged.ack(pause)
            del staged
    return answer


if __name__ == "__main__":
    torch.set_num_threads(4)
    chosen = {"group": group, "borrow": borrow, "subscribe": subscribe}[sys.argv[1]]
    print(json.dumps(chosen(*sys.argv[2:])), flush=True)
