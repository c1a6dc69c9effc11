"""How a server of SGLang is started: its command line and environment, as data."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from agentic import derive_seed

from relax.backends.inference.base import EngineSpec
from relax.backends.inference.sglang.tensors import ENVIRONMENT, IN_SERVER
from relax.config.sglang import CPU_CACHE_TOKENS, SglangSettings

CONTEXT_MARGIN = 8
"""SGLang keeps some tokens of its context for itself; that many more are asked for, so that the run's own
limit is the one that counts. No token ever comes to lie beyond that.
"""

OTHER_MODULES = {"PYTHONPATH", "PYTHONHOME"}
"""Say where the modules of this python are, which another environment has at other versions."""

NVIDIA, AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")


def device_of(settings: SglangSettings) -> str:
    """`cpu` or `cuda`: what a server of this machine computes on."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if NVIDIA.exists() or AMD.exists() else "cpu"


def python_of(settings: SglangSettings) -> str:
    """The python that runs the server."""
    return settings.python or sys.executable


def command(
    spec: EngineSpec,
    folder: Path,
    port: int,
    capacity: int,
    *,
    pictures: bool = False,
    hollow: bool = False,
) -> list[str]:
    """The command line of one replica's server, which listens on loopback.

    Args:
        spec: of the engine.
        folder: the model that it loads, with weights.
        port: where it listens.
        capacity: tokens of its context.
        pictures: it is sent pictures, which have their final size.
        hollow: the folder has no weights after all.
    """
    settings = spec.settings.sglang
    device = device_of(settings)
    flags: dict[str, object] = {
        "model_path": folder,
        "host": "127.0.0.1",
        "port": port,
        "dtype": spec.dtype,
        "context_length": capacity + CONTEXT_MARGIN,
        "random_seed": derive_seed(spec.seed, spec.name) % 2**31,
        "max_running_requests": spec.max_running,
        "tp_size": settings.tensor_parallel,
        "ep_size": settings.expert_parallel,
        "dp_size": settings.data_parallel,
        "pp_size": settings.pipeline_parallel,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "log_level_http": "warning",  # each question how it fares would be a line
        "enable_return_routed_experts": spec.routes,
        "enable_deterministic_inference": settings.deterministic,
        "mem_fraction_static": settings.memory_fraction,
        "max_total_tokens": settings.cache_tokens,
        "attention_backend": settings.attention,
        "load_format": "dummy" if hollow else None,
    }
    if pictures:
        flags["mm_process_config"] = json.dumps({"image": {"do_resize": False}})
    if device == "cpu":
        flags |= {
            "device": "cpu",
            "max_total_tokens": settings.cache_tokens or _cache_on_cpus(spec, capacity),
            "attention_backend": settings.attention or "torch_native",
            "cuda_graph_backend_decode": "disabled",
            "cuda_graph_backend_prefill": "disabled",
            "sleep_on_idle": True,  # an idle server would take a core
        }
    else:
        flags["base_gpu_id"] = _first_gpu(spec, os.environ)
    return [python_of(settings), "-m", "sglang.launch_server", *words(flags | plain(settings.extra))]


def _cache_on_cpus(spec: EngineSpec, capacity: int) -> int | None:
    """Tokens of the cache where nobody has said: on CPUs SGLang would take most of the machine's memory."""
    if spec.settings.sglang.memory_fraction is not None:
        return None
    one = capacity + 2 * CONTEXT_MARGIN
    return max(one, min(spec.max_running * one, CPU_CACHE_TOKENS))


def _first_gpu(spec: EngineSpec, around: Mapping[str, str]) -> int:
    """Replicas of one machine follow each other. Where a launcher shows this process exactly the GPUs of one
    server, they are its own.
    """
    settings = spec.settings.sglang
    seen = [word for word in around.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if len(seen) == gpus(settings):
        return 0
    return settings.first_gpu + spec.number * gpus(settings)


def gpus(settings: SglangSettings) -> int:
    """GPUs of one server: data-parallel ranks have their own, but with data-parallel attention they share."""
    own = 1 if plain(settings.extra).get("enable_dp_attention") else settings.data_parallel
    return settings.tensor_parallel * settings.pipeline_parallel * own


def environment(spec: EngineSpec, around: Mapping[str, str], *, shown: bool = False) -> dict[str, str]:
    """The environment of a server: that around it, and what the settings say.

    Bytecode is written, as each of its processes imports for half a minute without, and a longer context than
    the model's may be named (see `CONTEXT_MARGIN`). A python of its own does not look for modules where this
    one does; where it is shown something, it finds there what takes that (`tensors`).
    """
    settings = spec.settings.sglang
    found = own_modules(settings, around)
    found |= {"PYTHONUNBUFFERED": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if device_of(settings) == "cpu":
        found |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        found.setdefault("OMP_NUM_THREADS", "1")
    found |= settings.env
    if shown:
        found = ENVIRONMENT | found
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(IN_SERVER), found.get("PYTHONPATH")]))
    return found


def own_modules(settings: SglangSettings, around: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a python that the settings name finds its own modules."""
    without = {"PYTHONDONTWRITEBYTECODE"} | (OTHER_MODULES if settings.python is not None else set())
    return {name: value for name, value in around.items() if name not in without}


def plain(extra: Mapping[str, object]) -> dict[str, object]:
    """Flags of the settings under the names that are used here: an underscore for each dash."""
    return {name.replace("-", "_"): value for name, value in extra.items()}


def words(flags: Mapping[str, object]) -> list[str]:
    """`{"tp_size": 2, "trust_remote_code": True}` -> `["--tp-size", "2", "--trust-remote-code"]`; what is
    None or False is left out.
    """
    found: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        found.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            found += [str(one) for one in value]
        elif value is not True:
            found.append(str(value))
    return found
