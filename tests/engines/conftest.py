"""Real engines for the tests: SGLang on CPUs, from the environment that `make engines` installs."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax.backends.inference.sglang.guard import mapped

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / "sglang" / "bin" / "python"
_JSON = {"Content-Type": "application/json"}
START_SECONDS = 420.0
"""26 s on an idle machine with two cores; most of it is imports."""

DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
"""Runs what follows, to be killed when pytest is: a server in a session of its own would outlive it."""

LIBCUDA = """
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) { return 100; }
"""
"""SGLang's kernels load libcuda even where they will not use it; this one says that there is no device."""


@dataclass(eq=False)
class SglangServer:
    """A running server.

    Attributes:
        url: where it listens.
        lines: the last of what it has printed.
    """

    url: str
    process: subprocess.Popen[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=60))

    def post(self, path: str, body: object = None, timeout: float = 60.0) -> Any:
        """The JSON that it answers; raises AssertionError with what it said, for an error."""
        return self._ask(path, json.dumps({} if body is None else body).encode(), timeout)

    def get(self, path: str, timeout: float = 60.0) -> Any:
        return self._ask(path, None, timeout)

    def generate(self, input_ids: list[int], max_new_tokens: int, **options: Any) -> Any:
        """What `/generate` answers for a prompt, log probabilities included, sampled at temperature 1."""
        return self.post("/generate", _request(input_ids, max_new_tokens) | options)

    @contextmanager
    def stream(self, input_ids: list[int], max_new_tokens: int) -> Iterator[Iterator[Any]]:
        """`generate` by and by: each answer has all that was said so far, and the first comes at once."""
        body = _request(input_ids, max_new_tokens) | {"stream": True}
        request = urllib.request.Request(self.url + "/generate", json.dumps(body).encode(), _JSON)
        with urllib.request.urlopen(request, timeout=60.0) as lines:
            yield (json.loads(line[5:]) for line in lines if line.startswith(b"data: {"))

    def weights(self) -> str:
        """A digest of all weights that it holds."""
        return self.post("/weights_checker", {"action": "checksum"})["per_engine_checksum"]

    def _ask(self, path: str, data: bytes | None, timeout: float) -> Any:
        request = urllib.request.Request(self.url + path, data, _JSON)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} answered {error.code}: {error.read().decode()}") from error
        return json.loads(text) if text else None


def _request(input_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": input_ids, "return_logprob": True, "sampling_params": sampling}


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH with a libcuda.so.1 that finds no device."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of libcuda that SGLang needs on CPUs")
    folder = tmp_path_factory.mktemp("libcuda")
    source = folder / "libcuda.c"
    source.write_text(LIBCUDA)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(source)], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def launch_sglang(libcuda: Path) -> Iterator[Callable[..., SglangServer]]:
    """`launch_sglang(model_folder, *arguments)` is a server that is ready; it ends with the module."""
    if not PYTHON.exists():
        pytest.skip("SGLang is not installed: make engines")
    with ExitStack() as running:

        def launch(model: Path, *arguments: str) -> SglangServer:
            server = _started(model, libcuda, arguments)
            running.callback(_end, server.process)
            return server

        yield launch


def _started(model: Path, libcuda: Path, arguments: tuple[str, ...]) -> SglangServer:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-c", DIE_WITH_PARENT),
        *(str(PYTHON), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--skip-tokenizer-init", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        "--skip-server-warmup",
        "--sleep-on-idle",  # an idle server would take a core
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": f"{libcuda}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    server = SglangServer(f"http://127.0.0.1:{port}", process)
    told = threading.Event()  # that it is ready, or has ended
    ready = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if "Uvicorn running on" in line:
                ready.set()
                told.set()
        told.set()

    threading.Thread(target=listen, name="sglang-output", daemon=True).start()
    told.wait(START_SECONDS)
    if not ready.is_set():
        _end(process)
        pytest.fail(f"SGLang did not start within {START_SECONDS} s:\n{''.join(server.lines)}", pytrace=False)
    return server


def _end(process: subprocess.Popen[str]) -> None:
    """End the server and its children, which have names of their own but are of its session, and remove the
    semaphores and counters that it would remove itself.
    """
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    shared = _shared([process.pid, *(child.pid for child in children)])
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=30)
    process.wait(30)
    for path in shared:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _shared(processes: list[int]) -> list[str]:
    """The files in /dev/shm that these have mapped."""
    inodes = set[int]().union(*map(mapped, processes))
    with os.scandir("/dev/shm") as files:
        return [file.path for file in files if file.inode() in inodes]


MOE_ON_CPUS = """
def install():
    import torch
    from sglang.srt.layers.moe import topk
    from sglang.srt.mem_cache.pool_host import common

    plain = topk.fused_topk_torch_native

    def choose(hidden_states, gating_output, topk, renormalize, correction_bias=None, **named):
        how = named.get("scoring_func", "softmax")
        found = plain(hidden_states, gating_output, topk, renormalize, correction_bias, how)
        return found[0].float(), found[1].int()

    topk.fused_topk = choose
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, *_, **__: torch.empty(dims, dtype=dtype)
"""
"""SGLang's mixtures of experts on CPUs without AMX: plain torch where its kernels do not go, by its own way
for plugins, which it loads in each of its processes.
"""


VISION_ON_CPUS = """
def install():
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(name + "() -> ()")
    install.library = library
"""
"""SGLang's processor of Qwen's pictures imports models (Qwen3.5) that look up kernels for CPUs with AMX; the
names are enough, as nothing here calls them.
"""


def _plugin(name: str, source: str, folder: Path) -> Path:
    """A folder for PYTHONPATH with something that SGLang installs in each of its processes."""
    (folder / f"{name}.py").write_text(source)
    described = folder / f"{name}-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n"
    )
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:install\n")
    return folder


@pytest.fixture(scope="session")
def moe_on_cpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH."""
    return _plugin("moe_on_cpus", MOE_ON_CPUS, tmp_path_factory.mktemp("sglang-plugin"))


@pytest.fixture(scope="session")
def vision_on_cpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a server; without compiling its rotary embeddings, which takes it twenty seconds."""
    folder = _plugin("vision_on_cpus", VISION_ON_CPUS, tmp_path_factory.mktemp("sglang-plugin"))
    return {"PYTHONPATH": str(folder), "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture
def sglang_settings(libcuda: Path) -> Callable[..., dict[str, Any]]:
    """`rollout.sglang` for a server that an engine starts here; skips where SGLang is not installed."""
    if not PYTHON.exists():
        pytest.skip("SGLang is not installed: make engines")

    def settings(env: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        around = f"{libcuda}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        return {
            "python": str(PYTHON),
            "cache_tokens": 8192,
            "start_seconds": START_SECONDS,
            "env": {"LD_LIBRARY_PATH": around, "HF_HUB_OFFLINE": "1", **(env or {})},
            **more,
        }

    return settings
