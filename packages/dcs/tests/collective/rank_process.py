"""Forks ranks of collective groups from a process that has imported torch once.

The zygote takes a file descriptor a rank from its socket, and answers with the pid. A rank reads one JSON
command a line and answers each with one JSON line; what goes wrong in a group is part of the answer.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed
from dcs.wire.collective import CollectiveBroken, CollectiveStore, Group


class Rank:
    def __init__(self) -> None:
        self.group: Group | None = None

    def make(self, port: int, key: str, rank: int, size: int, deadline: float) -> dict:
        self.group = Group("gloo", "127.0.0.1", port, key, rank, size, deadline)
        return {}

    def serve(self) -> dict:
        self.store = CollectiveStore()
        return {"port": self.store.port}

    def broadcast(
        self, nbytes: int, fill: int, source: int, bucket: int, act: list | None = None, **options
    ) -> dict:
        """`act` is [bucket, what]: a signal number for itself, `abort` (from another thread) or `raise`."""
        assert self.group is not None
        group = self.group
        own = torch.arange(nbytes, dtype=torch.int64).mul_(fill).to(torch.uint8)
        flat = own.clone() if group.rank == source else torch.zeros(nbytes, dtype=torch.uint8)
        buckets: list[list[int]] = []

        def on_bucket(start: int, end: int) -> None:
            buckets.append([start, end])
            if act is None or len(buckets) != act[0]:
                return
            if act[1] == "abort":
                threading.Thread(target=group.abort, args=("the test aborts it",)).start()
            elif act[1] == "raise":
                raise LookupError("the test raises")
            else:
                os.kill(os.getpid(), act[1])

        answer: dict = {"buckets": buckets, "quiet": True}
        began = time.monotonic()
        try:
            group.broadcast(flat, source, bucket, on_bucket, **options)
        except LookupError as error:
            answer["raised"] = str(error)
        except CollectiveBroken as error:
            answer |= {"broken": error.cause, "bucket": error.bucket, "quiet": error.quiet}
        answer["seconds"] = time.monotonic() - began
        answer["equal"] = bool(torch.equal(flat, own))
        arrived = buckets[-1][1] if buckets else 0
        answer["prefix"] = bool(torch.equal(flat[:arrived], own[:arrived]))
        self.flat = flat
        return answer

    def digest(self) -> dict:
        """Of the buffer of the last broadcast: it must not change after an error."""
        return {"digest": hashlib.sha256(self.flat.numpy()).hexdigest()}

    def close(self) -> dict:
        began = time.monotonic()
        if self.group is not None:
            self.group.close()
        self.group = None
        return {"seconds": time.monotonic() - began}

    def held(self) -> dict:
        """Threads (of any language) and descriptors of this process."""
        return {
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        }

    def default_group(self, path: str = "") -> dict:
        """Whether the process has one; `path` makes one, of this process alone, and uses it."""
        if path:
            torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
        answer: dict = {"initialized": torch.distributed.is_initialized()}
        if answer["initialized"]:
            tensor = torch.ones(3)
            torch.distributed.all_reduce(tensor)
            answer |= {"size": torch.distributed.get_world_size(), "sum": tensor.sum().item()}
        return answer


def serve(near: socket.socket) -> None:
    torch.set_num_threads(1)
    rank = Rank()
    with near.makefile("r") as lines:
        for line in lines:
            command = json.loads(line)
            try:
                answer = getattr(rank, command.pop("do"))(**command)
            except CollectiveBroken as error:
                answer = {"broken": error.cause, "bucket": error.bucket}
            near.sendall(f"{json.dumps(answer)}\n".encode())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            _, descriptors, _, _ = socket.recv_fds(requests, 16, 1)
            if not descriptors:
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                try:
                    serve(socket.socket(fileno=descriptors[0]))
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
            os.close(descriptors[0])
            requests.sendall(str(pid).encode())


if __name__ == "__main__":
    main()
