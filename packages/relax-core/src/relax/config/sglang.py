"""Settings of SGLang: servers that a run starts and supervises, or servers that are there (`urls`)."""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from relax.config.base import Settings

CPU_CACHE_TOKENS = 131_072
"""Most tokens of a server's cache on CPUs when nothing is said of it."""

OURS = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "host": "nothing: a server listens on loopback",
    "port": "nothing: a free port is taken",
    "dtype": "model.dtype",
    "context_length": "model.context_length",
    "random_seed": "seed",
    "max_running_requests": "rollout.max_running",
    "tp_size": "rollout.sglang.tensor_parallel",
    "tensor_parallel_size": "rollout.sglang.tensor_parallel",
    "ep_size": "rollout.sglang.expert_parallel",
    "expert_parallel_size": "rollout.sglang.expert_parallel",
    "dp_size": "rollout.sglang.data_parallel",
    "data_parallel_size": "rollout.sglang.data_parallel",
    "pp_size": "rollout.sglang.pipeline_parallel",
    "pipeline_parallel_size": "rollout.sglang.pipeline_parallel",
    "device": "rollout.sglang.device",
    "base_gpu_id": "rollout.sglang.first_gpu",
    "mem_fraction_static": "rollout.sglang.memory_fraction",
    "max_total_tokens": "rollout.sglang.cache_tokens",
    "attention_backend": "rollout.sglang.attention",
    "enable_deterministic_inference": "rollout.sglang.deterministic",
    "api_key": "rollout.sglang.api_key_env",
    "admin_api_key": "rollout.sglang.api_key_env",
    "enable_return_routed_experts": "actor.routing_replay",
    "skip_tokenizer_init": "nothing: requests and answers are token ids",
    "skip_server_warmup": "nothing: nothing is served before the first version",
    "incremental_streaming_output": "nothing: it is how answers are read",
    "weight_version": "nothing: versions are counted by the run",
    "load_format": "nothing: a folder without weights is completed with zeros",
}
"""Flags of SGLang's server that a run sets itself, and the setting to use in their place."""


class SglangSettings(Settings):
    """One SGLang server for each replica of `rollout.replicas`."""

    python: str | None = None
    """The python of the environment that holds SGLang; the running one when not given. One that is given does
    not see this process's PYTHONPATH (`env` can give it another).
    """
    urls: list[str] = Field(default_factory=list)
    """Servers that are there already, one for each replica, such as http://10.0.0.5:30000. None is started
    then, and what concerns starting one has no effect.
    """
    api_key_env: str | None = None
    """Name of the environment variable with the servers' (admin) key."""
    tensor_parallel: int = Field(default=1, ge=1)
    expert_parallel: int = Field(default=1, ge=1)
    data_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU where the machine has one."""
    first_gpu: int = Field(default=0, ge=0)
    """GPUs are handed out from this one on: as many to each replica as its parallelism asks for."""
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory for weights and cache; SGLang's own choice when not given."""
    cache_tokens: int | None = Field(default=None, ge=64)
    """Tokens that the cache of one server holds. When not given, SGLang's own choice on GPUs; on CPUs, where
    that is most of the machine's memory, `rollout.max_running` contexts, but no more than 131,072 tokens
    unless one context is longer (with `memory_fraction` it is that share of the machine's memory).
    """
    attention: str | None = None
    """SGLang's attention backend; its own choice when not given (`torch_native` on CPUs)."""
    deterministic: bool = False
    """Batch-invariant kernels, and draws that are a function of a request's seed. SGLang has them on GPUs."""
    weights: Literal["distributed", "tensor", "disk"] = "distributed"
    """How a version gets from this engine's process into its server: by broadcast, inside HTTP calls (for a
    server that cannot open connections to here; costly), or through a file that both see (the last resort,
    and the only way with `data_parallel` or `pipeline_parallel`).
    """
    weights_backend: Literal["gloo", "nccl"] = "gloo"
    """What broadcasts with `weights = distributed`; nccl takes a GPU of its own on this side."""
    weights_host: str | None = None
    """Address of this machine for a server on another one; found by itself when not given."""
    weights_folder: str | None = None
    """Folder for `weights = disk` that the server sees too; memory of this machine when not given."""
    pause: Literal["auto", "retract", "resume", "in_place"] = "auto"
    """What becomes of running requests while a version is put in. `retract`: SGLang holds them and computes
    their cache anew. `resume`: they are ended and asked again with what they have, so that the routes of the
    first sampling are kept and pictures are looked at anew; `auto` does this when routes are wanted or the
    model sees, and else the former. `in_place`: they go on with the cache of the old weights (mode = async
    only).
    """
    start_seconds: float = Field(default=170.0, gt=0)
    """Longest start of a server, the model loaded. The run waits as long, the first time and every time that
    it starts the server again; `rollout.stall_seconds` counts from then on.
    """
    call_seconds: float = Field(default=600.0, gt=0)
    """Longest call to a server in an update of weights."""
    health_seconds: float = Field(default=10.0, gt=0)
    """Longest wait for what a server says of itself."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers, beside those that are there."""
    extra: dict[str, bool | int | float | str | list[int | float | str]] = Field(default_factory=dict)
    """More flags of `sglang.launch_server`: chunked_prefill_size: 4096 is `--chunked-prefill-size 4096`, true
    is the flag alone, a list is its values, false leaves it out.
    """

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no address of a server; it looks like http://10.0.0.5:30000")
        if len(set(urls)) < len(urls):
            raise ValueError("a server is named twice: each replica needs one of its own")
        return urls

    @field_validator("extra")
    @classmethod
    def _flags(cls, extra: dict[str, object]) -> dict[str, object]:
        for name in extra:
            plain = name.replace("-", "_")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", plain):
                raise ValueError(f"{name!r} is no flag; write it without dashes, as in chunked_prefill_size")
            if plain in OURS:
                raise ValueError(f"{name!r} is set by the run; use {OURS[plain]}")
        return extra


def sglang_faults(settings: SglangSettings, *, replicas: int, mode: str) -> list[str]:
    """What single fields cannot see.

    Args:
        replicas: engines of the run.
        mode: of the run.
    """
    faults = []
    if settings.urls and len(settings.urls) != replicas:
        faults.append(
            f"rollout.sglang.urls names {len(settings.urls)} servers with rollout.replicas = {replicas}: "
            f"each replica needs a server of its own; set rollout.replicas={len(settings.urls)}"
        )
    if settings.expert_parallel > 1 and settings.tensor_parallel % settings.expert_parallel:
        faults.append(
            f"rollout.sglang.expert_parallel = {settings.expert_parallel} does not divide "
            f"rollout.sglang.tensor_parallel = {settings.tensor_parallel}, over whose ranks experts are dealt"
        )
    split = [key for key in ("data_parallel", "pipeline_parallel") if getattr(settings, key) > 1]
    if split and settings.weights != "disk":
        faults.append(
            f"rollout.sglang.weights = {settings.weights} with rollout.sglang.{split[0]} = "
            f"{getattr(settings, split[0])}: such a server takes weights from files only; set "
            f"rollout.sglang.weights=disk, or use more replicas"
        )
    if settings.pause == "in_place" and mode == "colocate":
        faults.append(
            "rollout.sglang.pause = in_place with mode = colocate: what goes on with the cache of older "
            "weights is not on-policy; set rollout.sglang.pause=auto"
        )
    return faults
