"""Whether this machine has the GPUs that a run computes on, asked of torch before anything is started."""

import os
import subprocess
import sys

from relax.config import ConfigError, RunConfig
from relax.orchestration.plan import Plan, engine_gpus

LOOK_SECONDS = 120.0
LOOK = """
import contextlib, importlib.util, sys, torch
if "megatron" in sys.argv:  # whoever changes what CUDA is for megatron-core does so before it is imported
    with contextlib.suppress(ImportError):
        importlib.util.find_spec("megatron.core")
device = True
try:
    torch.cuda.current_device()
except (AssertionError, RuntimeError):  # a torch for CPUs; no driver, or no device
    device = False
print(torch.cuda.device_count(), int(device))
"""
"""Tells how many GPUs torch sees, and whether there is a current CUDA device, as megatron-core wants it."""


def check_gpus(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError where roles that run on this machine would not have the GPUs that they compute on.
    On a cluster that is visited only its nodes know.
    """
    if config.launcher == "ray" and config.ray.address is not None:
        return
    megatron = config.actor.backend == "megatron"
    asking = _asking(config)
    if not asking and not megatron:
        return
    there, device = look(megatron=megatron)
    if asking and there < (needed := _needed(plan, config)):
        raise ConfigError(
            f"too few GPUs: the roles take {needed} ({' and '.join(asking)}), and torch sees "
            f"{there or 'none'} on this machine; set these to cpu, ask for fewer ranks or replicas, or start "
            f"the run where there are as many (nvidia-smi lists them; a torch built for CPUs sees none)"
        )
    if megatron and not device:
        raise ConfigError(
            "actor.backend = megatron: megatron-core computes on GPUs only, and torch sees none on this "
            "machine; set actor.backend=torch_native, or start this where there are GPUs"
        )


def look(*, megatron: bool = False) -> tuple[int, bool]:
    """How many GPUs torch sees in a process as the roles will be, and whether a CUDA device is current there.

    Raises:
        ConfigError: torch cannot be asked.
    """
    command = [sys.executable, "-c", LOOK, *(["megatron"] if megatron else [])]
    try:
        found = subprocess.run(
            command, env=os.environ, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True
        )
        count, device = found.stdout.split()[-2:]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise ConfigError(f"torch cannot be asked for GPUs: {' '.join(told)}") from error
    return int(count), device == "1"


def _asking(config: RunConfig) -> list[str]:
    """The settings that name a GPU of this machine, as they are written."""
    rollout = config.rollout
    devices = {"actor.device": config.actor.device}
    if rollout.engine != "sglang":
        devices["rollout.device"] = rollout.device
    elif not rollout.sglang.urls:
        devices["rollout.sglang.device"] = rollout.sglang.device
    return [f"{key} = cuda" for key, device in devices.items() if device == "cuda"]


def _needed(plan: Plan, config: RunConfig) -> int:
    """GPUs that have to be there: under Ray as many as are reserved, in one process one for each rank and
    each GPU of a server. Engines that share those of the actor need no more.
    """
    if config.launcher == "ray":
        reserved = sum(role.gpus for role in plan.roles)
    else:
        servers = engine_gpus(config) * config.rollout.replicas if config.rollout.engine == "sglang" else 0
        reserved = servers + (config.actor.ranks if config.actor.device == "cuda" else 0)
    return max(reserved, 1)
