"""The weights by broadcast: `update_weights_from_distributed`, over a gloo or nccl group of us and the
server's ranks.

The group is torch.distributed's, but of its own: it neither needs nor touches the default group of this
process. Both sides have to find each other's keys in the store, so the prefixes below are those that torch
itself gives them.
"""

import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dcs.appliers.buckets import Bucket, cut, fill
from dcs.appliers.http import EngineServer
from dcs.errors import ApplyFailed

_LEAVE_SECONDS = 30.0
_DEVICE_OF = {"gloo": "cpu", "nccl": "cuda"}


class Distributed:
    """See the module.

    Args:
        ranks: the server's tensor-parallel size.
        host: the address at which the server reaches this process; None finds the one that reaches the
            server.
        backend: `gloo`, or `nccl` with a GPU on this side.
        join_seconds: for how long a server may take to join the group.
        timeout_seconds: of one bucket.
    """

    in_session = True

    def __init__(
        self,
        server: EngineServer,
        ranks: int,
        bucket_bytes: int,
        *,
        host: str | None,
        backend: Literal["gloo", "nccl"],
        join_seconds: float,
        timeout_seconds: float,
    ) -> None:
        if backend not in _DEVICE_OF:
            raise ValueError(f"backend is {backend!r}; it must be gloo or nccl")
        self._server = server
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._host = host
        self._backend = backend
        self._join = timedelta(seconds=join_seconds)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._name = f"dcs-{secrets.token_hex(8)}"
        self._group: Any = None
        self._flat = torch.empty(0, dtype=torch.uint8)

    def prepare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        if self._group is None:
            self._group = self._meet()
        buckets = cut(tensors, self._bucket_bytes)
        largest = max(bucket.nbytes for bucket in buckets)
        if self._flat.numel() < largest:
            self._flat = torch.empty(largest, dtype=torch.uint8, device=_DEVICE_OF[self._backend])
        fill(self._flat, buckets[0].names, tensors)

        def send() -> None:
            for number, bucket in enumerate(buckets, start=1):
                if number > 1:
                    fill(self._flat, bucket.names, tensors)
                self._broadcast(bucket, tensors, version if number == len(buckets) else None)

        return send

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        # The server's side first: that ends a broadcast which it refused to take, and gloo waits for its
        # operations. (A server that does not answer is gone, or has had as long as a bucket may take.)
        with suppress(ApplyFailed):
            self._server.post("/destroy_weights_update_group", {"group_name": self._name}, _LEAVE_SECONDS)
        group.abort()

    def _meet(self) -> Any:
        host = self._host or _address_towards(self._server)
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            # The store takes the descriptor over and closes it.
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._join,
                master_listen_fd=listener.detach(),
            )
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": self._name,
            "backend": self._backend,
        }
        with ThreadPoolExecutor(1, thread_name_prefix="dcs-sglang") as beside:
            answer = beside.submit(
                self._server.post, "/init_weights_update_group", body, self._join.total_seconds()
            )
            try:
                group = self._group_over(store, host)
            except RuntimeError as error:
                answer.result()  # what the server says tells more
                raise ApplyFailed(
                    f"{self._server.url} did not join a group at {host}:{port}: {error}"
                ) from error
            answer.result()
        return group

    def _group_over(self, store: Store, host: str) -> Any:
        for prefix in (self._name, f"{self._name}/", f"{_DEVICE_OF[self._backend]}/"):
            store = PrefixStore(prefix, store)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, 0, 1 + self._ranks, options)
        options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._join  # meeting each other counts as an operation
        group = dist.ProcessGroupGloo(store, 0, 1 + self._ranks, options)
        group.set_timeout(self._timeout)
        return group

    def _broadcast(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor], version: int | None) -> None:
        work = self._group.broadcast([self._flat[: bucket.nbytes]], dist.BroadcastOptions())
        try:
            self._server.post(
                "/update_weights_from_distributed",
                {
                    "names": bucket.names,
                    "dtypes": [str(tensors[name].dtype).removeprefix("torch.") for name in bucket.names],
                    "shapes": [list(tensors[name].shape) for name in bucket.names],
                    "group_name": self._name,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                    "weight_version": None if version is None else str(version),
                },
            )
        except ApplyFailed:
            # A server that refuses does not receive, and our half of the broadcast would wait for it.
            self.close()
            raise
        work.wait(self._timeout)


def _address_towards(server: EngineServer) -> str:
    """The address of this machine from which the server is reached."""
    try:
        with socket.create_connection((server.host, server.port), timeout=30.0) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        raise ApplyFailed(f"{server.url} cannot be reached: {error}") from error
