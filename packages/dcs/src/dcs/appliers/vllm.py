"""New weights into a running vLLM server.

Written after vLLM's documentation of 0.16 and tested against a stand-in over real HTTP only: vLLM itself
does not run on the machines that test dcs. Servers with quantised weights, which vLLM repacks after
loading, are not supported.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from dcs.appliers.checkpoint import write
from dcs.appliers.http import EngineServer
from dcs.appliers.names import NameMap, SameNames
from dcs.appliers.served import published_layout
from dcs.appliers.version import Applied, Version, check
from dcs.errors import ApplyFailed
from dcs.layout import Layout

_SAME = SameNames()


class VllmApplier:
    """Pushes every version into a running vLLM server: a file in shared memory that each of its workers
    loads.

    The server has to run on this machine, with dcs installed beside vLLM, and be started so:

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL
            --worker-extension-cls dcs.appliers.vllm_worker.DcsWorkerExtension

    pause -> load in every worker -> reset the prefix cache -> resume. Names, shapes and dtypes are checked
    first, against the model folder, as `SglangApplier` does. An error before the loading leaves the server
    as it was; one after that leaves it paused, on purpose, until a new applier pushes a whole version or it
    is started anew.

    Args:
        url: of the server, `http://127.0.0.1:8000`.
        layout, model, dtype, names, api_key, timeout_seconds: as for `SglangApplier`.
        pause: what becomes of running requests. `abort`: they end with what they have. `wait`: they end
            first. `keep`: they go on afterwards, and their tokens so far are recomputed with the new
            weights.
        directory: where to make the folder that both sides see; default `/dev/shm`.

    Attributes: as of `SglangApplier`.

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
        pause: Literal["abort", "wait", "keep"] = "keep",
        api_key: str | None = None,
        timeout_seconds: float = 600.0,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if pause not in ("abort", "wait", "keep"):
            raise ValueError(f"pause is {pause!r}; it must be abort, wait or keep")
        self._server = EngineServer(url, api_key=api_key, timeout_seconds=timeout_seconds)
        self._names = names
        self._pause = pause
        folder = self._server.get("/v1/models")["data"][0]["root"] if model is None else model
        self.layout = published_layout(
            self._server.url, folder, layout, dtype, names, required=model is not None
        )
        self.usable = True
        self.last: Applied | None = None
        parent = directory or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self._folder = Path(tempfile.mkdtemp(prefix="dcs-vllm-", dir=parent))

    def __call__(self, version: Version) -> None:
        """Put a version into the server; it computes with it when this returns.

        Raises:
            LayoutMismatch: it does not fit; the server was not spoken to.
            ApplyFailed: see the class; the message says whether the server still serves what it did.
        """
        began = perf_counter()
        url = self._server.url
        if not self.usable:
            raise ApplyFailed(
                f"an earlier version failed half way, so {url} is left paused; start it anew, or push a whole"
                " version with a new applier"
            )
        nbytes = check(version, self.layout, url)
        file = self._folder / "model.safetensors"
        try:
            write(file, {self._names.engine(name): tensor for name, tensor in version.tensors.items()})
        except OSError as error:
            raise ApplyFailed(
                f"version {version.version} cannot be written: {error}; {url} serves on"
            ) from error
        paused = perf_counter()
        try:
            self._server.post(f"/pause?mode={self._pause}")
        except ApplyFailed as error:
            raise self._as_before(error) from error
        self.usable = False
        try:
            self._load(file, version.version)
            self._server.post("/reset_prefix_cache?reset_running_requests=true")
            self._server.post("/resume")
        except Exception as error:
            raise ApplyFailed(
                f"version {version.version} failed half way, so {url} is left paused and must not serve:"
                f" {error}"
            ) from error
        self.usable = True
        done = perf_counter()
        self.last = Applied(version.version, version.epoch, nbytes, done - began, done - paused)

    def close(self) -> None:
        """Remove the folder. The server goes on. May be called twice."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> VllmApplier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _as_before(self, error: ApplyFailed) -> ApplyFailed:
        """Resume a server whose weights nobody has touched; the error to raise."""
        try:
            self._server.post("/resume")
        except ApplyFailed as second:
            return ApplyFailed(
                f"{error}; its weights are the old ones, but it could not be resumed: {second}"
            )
        return ApplyFailed(f"{error}; {self._server.url} serves on as before")

    def _load(self, file: Path, version: int) -> None:
        answer = self._server.post(
            "/collective_rpc",
            {"method": "dcs_load_weights", "kwargs": {"file": str(file), "version": version}},
        )
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results or any(not isinstance(r, dict) or r.get("version") != version for r in results):
            raise ApplyFailed(
                f"/collective_rpc answered {answer!r}; every worker should have said that it loaded"
                f" {version}: was the server started with --worker-extension-cls"
                " dcs.appliers.vllm_worker.DcsWorkerExtension?"
            )
