"""The dcs part of the GPU check; see scripts/gpu_check.sh."""

import argparse
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import Figures, median_seconds

NO_DEVICE = 2
LIMIT_SECONDS = 170
PEER = Path(__file__).parent / "dcs_peer.py"
GIB = 1 << 30
MIB = 1 << 20


class Peer:
    """A process of dcs_peer.py; `hear` gives its next line, and raises when it ends without one."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def say(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # faulthandler ends the whole check when this waits too long
        if not line:
            raise RuntimeError(f"the peer ended with status {self._process.wait(10)} and said nothing")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def peer(*arguments: object) -> Iterator[Peer]:
    started = Peer(*arguments)
    try:
        yield started
    finally:
        started.close()


class Check:
    """The checks, on one device; `nbytes` is the size of the model that most of them move."""

    def __init__(self, device: str, nbytes: int) -> None:
        import dcs_peer

        self.device, self.nbytes = device, nbytes
        self.backend = "nccl" if device.startswith("cuda") else "gloo"
        self.weights, self.checksum = dcs_peer.weights, dcs_peer.checksum

    def on_gpu(self, ok: bool) -> bool | None:
        """Whether a goal that is about a GPU is met; None where there is none."""
        return ok if self.backend == "nccl" else None

    def unless_on_gpu(self, why: str, how: str) -> str:
        return how if self.backend == "nccl" else f"says nothing on a CPU: {why}; {how}"

    def synchronize(self) -> None:
        import torch

        if self.backend == "nccl":
            torch.cuda.synchronize()

    def machine(self, figures: Figures) -> None:
        import torch
        import torch.cuda.nccl

        how = f"torch {torch.__version__}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}"
        if self.backend == "nccl":
            properties = torch.cuda.get_device_properties(self.device)
            how += f", nccl {torch.cuda.nccl.version()}, {torch.cuda.device_count()} x {properties.name}"
            figures.add("device memory", properties.total_memory / GIB, "GiB", "", True, how)
        else:
            figures.add("rehearsal on a CPU", None, "", "", True, how)

    def group_of_one(self, figures: Figures) -> None:
        """Host -> device bucket -> broadcast, and the default group of the process stays as it is."""
        import torch
        import torch.distributed
        from dcs.wire.collective import CollectiveStore, Group

        host = torch.randint(0, 255, (self.nbytes,), dtype=torch.uint8)
        host = host.pin_memory() if self.backend == "nccl" else host
        before = self.checksum(host)
        spans: list[tuple[int, int]] = []
        with CollectiveStore() as store:
            with Group(self.backend, store.host, store.port, "one", 0, 1, 60.0, self.device) as group:  # type: ignore[arg-type]
                seconds = median_seconds(lambda: group.broadcast(host), 3)
                group.broadcast(host, on_bucket=lambda start, end: spans.append((start, end)))
                whole = spans[0][0] == 0 and spans[-1][1] == self.nbytes and self.checksum(host) == before
                figures.add(
                    f"{self.backend} group of one: every bucket once, the source's bytes unchanged",
                    self.nbytes / seconds / 1e9,
                    "GB/s",
                    "whole and unchanged",
                    whole,
                    f"{self.nbytes} bytes from host memory (pinned: {host.is_pinned()}), 64 MiB buckets",
                )
                on_device = host.to(self.device)
                self.synchronize()
                group.broadcast(on_device)
                figures.add(
                    f"{self.backend} group of one, from device memory",
                    self.checksum(on_device) == before,
                    "",
                    "bytes unchanged",
                    self.checksum(on_device) == before,
                    "broadcast where it lies",
                )
                group.abort("the check aborts it")
                began = time.perf_counter()
                refused = _breaks(lambda: group.broadcast(host))
            took = time.perf_counter() - began
            figures.add(
                f"{self.backend} group that was aborted: refuses, and closes at once",
                took,
                "s",
                "<= 5 s",
                refused and took <= 5,
                "abort, broadcast, close",
            )
            with Group(self.backend, store.host, store.port, "next", 0, 1, 60.0, self.device) as group:  # type: ignore[arg-type]
                group.broadcast(host)
            began = time.perf_counter()
            late = _breaks(
                lambda: Group(self.backend, store.host, store.port, "alone", 0, 2, 2.0, self.device)  # type: ignore[arg-type]
            )
            took = time.perf_counter() - began
            figures.add(
                f"{self.backend} peer missing at init costs the deadline",
                took,
                "s",
                "<= 2 s + 1 s",
                late and took <= 3,
                "a group of 2 with a deadline of 2 s, of which one comes",
            )
        figures.add(
            "the process's default group is left alone",
            torch.distributed.is_initialized(),
            "",
            "false",
            not torch.distributed.is_initialized(),
            "torch.distributed.is_initialized()",
        )

    def group_of_two(self, figures: Figures) -> None:
        """Two processes: on two GPUs, or both on this one where NCCL permits it."""
        import torch
        from dcs.wire.collective import CollectiveStore

        second = "cuda:1" if self.backend == "nccl" and torch.cuda.device_count() > 1 else self.device
        nbytes = self.nbytes // 4
        with CollectiveStore() as store:
            common = (store.port, 0, nbytes, 20)
            with (
                peer("group", self.backend, self.device, *common) as left,
                peer("group", self.backend, second, store.port, 1, nbytes, 20) as right,
            ):
                answers = [left.hear(), right.hear()]
        how = f"{nbytes} bytes, ranks on {self.device} and {second}"
        if all("broken" in answer for answer in answers):
            permitted = second == self.device and self.backend == "nccl"
            causes = " | ".join(str(answer["broken"]) for answer in answers)
            figures.add(
                f"{self.backend} group of two: not possible here, and said so by name",
                None,
                "",
                "CollectiveBroken at both, and quiet buffers",
                permitted and all(answer["quiet"] for answer in answers),
                f"{how}: {causes}",
            )
            return
        equal = all(answer.get("equal", False) for answer in answers)
        gigabytes = nbytes / max(answer.get("seconds", 1e9) for answer in answers) / 1e9
        figures.add(
            f"{self.backend} group of two: every byte equal",
            gigabytes,
            "GB/s",
            "equal",
            equal,
            how if equal else f"{how}: {answers}",
        )

    def staging(self, figures: Figures) -> None:
        """Arena (memfd) -> device, as it is and page-locked in place."""
        import dcs
        import torch
        from dcs.memory.arena import Arena
        from dcs.memory.device import DeviceMirror

        tensors = self.weights(self.nbytes)
        layout = dcs.layout.of(tensors)
        arena = Arena(layout)
        arena.fill(tensors, 4 * MIB)
        host = torch.from_numpy(arena.flat)
        mirror, reason = DeviceMirror.allocate(layout, self.device)
        if mirror is None:
            raise RuntimeError(reason)
        with mirror:

            def unregistered() -> None:
                mirror.flat.copy_(host)
                self.synchronize()

            def through_the_mirror() -> None:
                mirror.copy(host)
                mirror.wait(60.0)

            plain = self.nbytes / median_seconds(unregistered) / 1e9
            began = time.perf_counter()
            refusal = mirror.pin(host)
            registering = (time.perf_counter() - began) / (self.nbytes / 1e9)
            pinned = self.nbytes / median_seconds(through_the_mirror) / 1e9
            equal = all(
                torch.equal(mirror.tensors[name].cpu().view(torch.int16), tensor.view(torch.int16))
                for name, tensor in tensors.items()
            )
            how = f"{self.nbytes} bytes in {len(tensors)} tensors, memfd arena"
            figures.add("staged on the device: every byte equal", equal, "", "equal", equal, how)
            figures.add("host to device, arena as it is", plain, "GB/s", "", True, how)
            figures.add(
                "page-locking an arena in place",
                registering,
                "s/GB",
                "works",
                self.on_gpu(not refusal),
                self.unless_on_gpu("there is no driver to lock pages for", refusal or how),
            )
            figures.add(
                "host to device, arena page-locked",
                pinned,
                "GB/s",
                ">= 1.1x as it is",
                self.on_gpu(pinned >= 1.1 * plain),
                self.unless_on_gpu("nothing is locked, and the device is host memory", how),
            )
            if self.backend == "nccl":
                self._beside(figures, mirror, host, how)
            mirror.unpin(host)
        arena.close()
        huge = dcs.layout.of({"huge": torch.empty(1 << 46, dtype=torch.uint8, device="meta")})
        nothing, reason = DeviceMirror.allocate(huge, self.device)
        figures.add(
            "no memory on the device is a reason, not an error",
            None,
            "",
            "no mirror, and why",
            nothing is None and bool(reason),
            reason,
        )

    def _beside(self, figures: Figures, mirror: Any, host: Any, how: str) -> None:
        """What staging costs the work that the device does meanwhile."""
        import torch

        left = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)

        def work() -> None:
            for _ in range(200):
                torch.mm(left, left)
            torch.cuda.current_stream().synchronize()

        alone = median_seconds(work)

        def both() -> None:
            mirror.copy(host)
            work()

        beside = median_seconds(both)
        mirror.wait(60.0)
        figures.add(
            "matrix products while a version is staged",
            beside / alone,
            "x alone",
            "<= 1.2",
            beside / alone <= 1.2,
            f"200 products of 4096 x 4096 in bf16, {how}",
        )

    def pause(self, figures: Figures) -> None:
        """Staged -> live tensors on the device: what an engine stands still for."""
        import dcs
        import torch
        from dcs.memory.device import DeviceMirror

        tensors = self.weights(self.nbytes)
        layout = dcs.layout.of(tensors)
        mirror, reason = DeviceMirror.allocate(layout, self.device)
        if mirror is None:
            raise RuntimeError(reason)
        with mirror:
            live = {name: torch.empty_like(tensor, device=self.device) for name, tensor in tensors.items()}
            flat = torch.empty_like(mirror.flat)

            def apply() -> None:
                for name, tensor in live.items():
                    tensor.copy_(mirror.tensors[name])
                self.synchronize()

            def bandwidth() -> None:
                flat.copy_(mirror.flat)
                self.synchronize()

            copy, taken = median_seconds(bandwidth), median_seconds(apply)
            figures.add(
                "pause of an engine with a staged version",
                taken / (self.nbytes / 1e9) * 1e3,
                "ms/GB",
                "<= 1.2x one copy of the bytes",
                self.on_gpu(taken <= 1.2 * copy),
                self.unless_on_gpu(
                    "memory of the host, shared with all that runs",
                    f"{len(live)} tensors in {taken * 1e3:.3f} ms, one flat copy {copy * 1e3:.3f} ms",
                ),
            )

    def published(self, figures: Figures) -> None:
        """A publisher here, and a subscriber in another process that stages on the device."""
        import torch

        self._publish(figures, "none", {"tcp"})
        # Two ranks on one GPU: when NCCL refuses them, the same version has to come over tcp.
        together = self.backend == "gloo" or torch.cuda.device_count() > 1
        self._publish(figures, self.backend, {"collective"} if together else {"collective", "tcp"})

    def _publish(self, figures: Figures, collective: str, wires: set[str]) -> None:
        import dcs
        import torch

        nbytes = self.nbytes // 4
        theirs = "cuda:1" if self.backend == "nccl" and torch.cuda.device_count() > 1 else self.device
        with (
            dcs.Coordinator() as coordinator,
            peer("subscribe", theirs, nbytes, coordinator.address, collective) as other,
            dcs.Publisher(
                coordinator.address,
                run="check",
                layout=dcs.layout.of(self.weights(nbytes)),
                wires=("tcp",),
                collective="" if collective == "none" else collective,  # type: ignore[arg-type]
                collective_seconds=10.0,
                device=self.device,
            ) as publisher,
        ):
            other.hear()
            for version in (1, 2):
                publisher.publish(version, self.weights(nbytes, version)).wait(60.0)
            answer = other.hear()
        versions = answer["versions"]
        name = "over tcp" if collective == "none" else f"by a group of {collective}"
        how = f"{nbytes} bytes: {answer.get('reason') or versions}"
        equal = len(versions) == 2 and all(version["equal"] for version in versions)
        figures.add(f"two versions {name}: every byte equal", equal, "", "equal", equal, how)
        came = {version["wire"] for version in versions}
        expected = bool(came) and came <= wires
        goal = " or ".join(sorted(wires))
        figures.add(f"versions {name}: the wire", ", ".join(sorted(came)), "", goal, expected, how)
        for last in versions[-1:]:
            rate = nbytes / last["seconds"] / 1e9
            figures.add(f"versions {name}: pull and staging", rate, "GB/s", "", True, how)
            figures.add(f"versions {name}: staged", last["staging"], "", theirs, last["there"], how)

    def lent(self, figures: Figures) -> None:
        """CUDA-IPC between two processes of one GPU."""
        import dcs
        import torch
        from dcs.memory.device import DeviceMirror
        from dcs.wire import ipc

        if self.backend == "gloo":
            reason = ipc.probe(self.device)
            figures.add("CUDA-IPC: the probe says why not", None, "", "a reason", bool(reason), reason)
            return
        nbytes = self.nbytes // 4
        layout = dcs.layout.of(self.weights(nbytes))
        mirror, reason = DeviceMirror.allocate(layout, self.device)
        if mirror is None:
            raise RuntimeError(reason)
        with mirror, peer("borrow", self.device, nbytes) as other:
            mirror.flat.zero_()
            for name, tensor in self.weights(nbytes, 3).items():
                mirror.tensors[name].copy_(tensor)
            torch.cuda.synchronize()
            other.hear()
            other.say({"loan": ipc.encode(ipc.lend(mirror.flat, layout)).hex()})
            answer = other.hear()
            expected = self.checksum(mirror.flat[: layout.offsets()[1]])
        figures.add(
            "CUDA-IPC: another process reads the same bytes",
            answer["seconds"] * 1e3,
            "ms to map",
            "equal",
            answer["checksum"] == expected,
            f"{nbytes} bytes in {answer['tensors']} tensors",
        )


def _breaks(call: Any) -> bool:
    from dcs.wire.collective import CollectiveBroken

    try:
        call()
    except CollectiveBroken:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small, with gloo")
    rehearse = parser.parse_args().rehearse
    absent = []
    for module in ("torch", "numpy", "msgspec", "zmq", "xxhash", "zstandard"):
        try:
            importlib.import_module(module)
        except ImportError:
            absent.append(module)
    if absent:
        print(f"{sys.executable} lacks {', '.join(absent)}; give another one as PYTHON=...")
        return 1
    import torch

    if not rehearse and not torch.cuda.is_available():
        print("no CUDA device here")
        return NO_DEVICE
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)  # a hang is a failure, with its place
    check = Check("cpu", 32 * MIB) if rehearse else Check("cuda:0", 2 * GIB)
    figures = Figures()
    for part in (
        check.machine,
        check.group_of_one,
        check.group_of_two,
        check.staging,
        check.pause,
        check.published,
        check.lent,
    ):
        figures.run(part.__name__, part)
    faulthandler.cancel_dump_traceback_later()
    return figures.summary()


if __name__ == "__main__":
    sys.exit(main())
