"""The order of SGLang's calls for one version, and what is done when one of them fails."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any, Literal

import torch

from dcs.appliers.http import EngineServer
from dcs.appliers.names import NameMap, SameNames
from dcs.appliers.served import published_layout
from dcs.appliers.sglang.disk import Disk
from dcs.appliers.sglang.distributed import Distributed
from dcs.appliers.sglang.in_band import InBand
from dcs.appliers.sglang.transport import Transport
from dcs.appliers.version import Applied, Version, check
from dcs.errors import ApplyFailed
from dcs.layout import Layout

_JOIN_SECONDS = 60.0
_FLUSH_SECONDS = 30.0
_SAME = SameNames()


class SglangApplier:
    """Pushes every version into a running SGLang server, whole, while it computes nothing.

    pause -> begin -> buckets -> end -> flush the cache -> continue. What the server holds can be asked for
    only by loading it, and a tensor that does not fit kills the server in the middle of that, so all checks
    are made here and first. SGLang loads models under the names of their checkpoint, hence the headers of
    the safetensors in its model folder say what it takes. Where that folder cannot be read from here, `model`
    names a copy, or `layout` says it.

    An error before the first bucket leaves the server as it was, continued, and this applier usable. An
    error after that leaves it paused, on purpose, with a mix of versions. Start it anew, or push a whole
    version with a new applier, which heals it, as it does after this process died in the middle.

    Args:
        url: of the server, `http://127.0.0.1:30000`.
        layout: what is published (published names); it has to fit the model folder, but may leave out what
            never changes. Default: all that the folder holds.
        model: folder to read instead of the server's own model path.
        dtype: without `layout`: in which floating tensors are published, if not as in the folder; the server
            casts while it loads.
        names: how published names differ from those of the checkpoint.
        mode: `distributed` broadcasts the weights (gloo, or nccl with a GPU here). `tensor` carries them
            inside HTTP calls: as CUDA-IPC handles when they are on a GPU that the server shares, else as
            bytes, which pass any proxy but cost SGLang some 25 CPU-seconds a GB. `disk` writes a file that
            the server reads.
        pause: what becomes of running requests. `abort`: they end with what they have. `retract`: they go
            on afterwards, and their tokens so far are recomputed with the new weights. `in_place`: they go
            on with the cache of the old weights, and so do prefixes that the server has cached: cheapest,
            but what it then says of log probabilities is of no single version.
        api_key: the server's (admin) key.
        bucket_bytes: weights that are sent at once; `tensor` needs some five times that in memory here.
        timeout_seconds: of each call to the server.
        host: `distributed`: where the server reaches this process; default: the address that reaches the
            server.
        backend: `distributed`: `gloo` or `nccl`.
        directory: `disk`: where to make the folder that both sides see; default `/dev/shm`.

    Attributes:
        layout: what to give `Subscriber(layout=...)`.
        usable: False after an error in the middle of a version.
        last: what the newest version cost, or None. SGLang's stock calls receive while paused, so
            `pause_seconds` has the transfer in it.

    Raises:
        ApplyFailed: the server does not answer.
        LayoutMismatch: what it takes cannot be told, or `layout` does not fit it.
    """

    def __init__(
        self,
        url: str,
        *,
        layout: Layout | None = None,
        model: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        names: NameMap = _SAME,
        mode: Literal["tensor", "distributed", "disk"] = "distributed",
        pause: Literal["abort", "retract", "in_place"] = "retract",
        api_key: str | None = None,
        bucket_bytes: int = 512 << 20,
        timeout_seconds: float = 600.0,
        host: str | None = None,
        backend: Literal["gloo", "nccl"] = "gloo",
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if pause not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause is {pause!r}; it must be abort, retract or in_place")
        self._server = EngineServer(url, api_key=api_key, timeout_seconds=timeout_seconds)
        self._names = names
        self._pause = pause
        self.usable = True
        self.last: Applied | None = None
        info = self._server.get("/server_info")
        folder = self._server.get("/model_info")["model_path"] if model is None else model
        self.layout = published_layout(
            self._server.url, folder, layout, dtype, names, required=model is not None
        )
        self._transport: Transport
        if mode == "disk":
            self._transport = Disk(self._server, directory)
        elif mode == "tensor":
            self._transport = InBand(self._server, _ranks(info, mode), bucket_bytes)
        elif mode == "distributed":
            self._transport = Distributed(
                self._server,
                _ranks(info, mode),
                bucket_bytes,
                host=host,
                backend=backend,
                join_seconds=_JOIN_SECONDS,
                timeout_seconds=timeout_seconds,
            )
        else:
            raise ValueError(f"mode is {mode!r}; it must be tensor, distributed or disk")

    def __call__(self, version: Version) -> None:
        """Put a version into the server; it computes with it when this returns.

        Raises:
            LayoutMismatch: it does not fit; the server was not spoken to.
            ApplyFailed: see the class; the message says whether the server still serves what it did.
        """
        began = perf_counter()
        if not self.usable:
            raise ApplyFailed(
                f"an earlier version failed half way, so {self._server.url} is left paused; start it anew, or"
                " push a whole version with a new applier"
            )
        nbytes = check(version, self.layout, self._server.url)
        tensors = {self._names.engine(name): tensor for name, tensor in version.tensors.items()}
        try:
            send = self._transport.prepare(version.version, tensors)
        except ApplyFailed as error:
            raise ApplyFailed(f"{error}; {self._server.url} serves on as before") from error
        paused = perf_counter()
        try:
            self._server.post("/pause_generation", {"mode": self._pause})
            if self._transport.in_session:
                self._begin()
        except ApplyFailed as error:
            raise self._as_before(error) from error
        self.usable = False
        try:
            send()
            if self._transport.in_session:
                self._server.post("/end_weight_update")
            if self._pause == "retract":
                self._server.post("/flush_cache")
            elif self._pause == "abort":
                # What was aborted may still be leaving. (Retracted requests stay until the pause ends, and a
                # flush with a timeout would wait for them.)
                self._server.post(f"/flush_cache?timeout={_FLUSH_SECONDS}")
            self._server.post("/continue_generation")
        except Exception as error:
            raise ApplyFailed(
                f"version {version.version} failed half way, so {self._server.url} is left paused and must"
                f" not serve: {error}"
            ) from error
        self.usable = True
        done = perf_counter()
        self.last = Applied(version.version, version.epoch, nbytes, done - began, done - paused)

    def close(self) -> None:
        """Leave the group, remove the folder. The server goes on. May be called twice."""
        self._transport.close()

    def __enter__(self) -> SglangApplier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        try:
            self._server.post("/begin_weight_update")
        except ApplyFailed as error:
            if "already open" not in str(error):
                raise
            # Somebody died in the middle of an update; the whole version that comes now overwrites it.
            self._server.post("/end_weight_update")
            self._server.post("/begin_weight_update")

    def _as_before(self, error: ApplyFailed) -> ApplyFailed:
        """Continue a server whose weights nobody has touched; the error to raise."""
        try:
            self._server.post("/continue_generation")
        except ApplyFailed as second:
            return ApplyFailed(
                f"{error}; its weights are the old ones, but it could not be continued: {second}"
            )
        return ApplyFailed(f"{error}; {self._server.url} serves on as before")


def _ranks(info: dict[str, Any], mode: str) -> int:
    """The server's tensor-parallel size; raises `ApplyFailed` for a server that SGLang cannot update in
    this mode.
    """
    for key, what in (("dp_size", "data-parallel"), ("pp_size", "pipeline-parallel")):
        if info.get(key, 1) != 1:
            raise ApplyFailed(
                f"the server has {info[key]} {what} ranks, and SGLang takes weights by {mode} without those"
                " only; use mode='disk', or a server a replica"
            )
    return int(info["tp_size"])
