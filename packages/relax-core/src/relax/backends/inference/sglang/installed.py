"""Whether a python has SGLang, found without importing it, which takes half a minute."""

import os
import subprocess

from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.flags import device_of, gpus, own_modules, python_of
from relax.config.roles import RolloutSettings
from relax.config.sglang import SglangSettings

LOOK_SECONDS = 60.0
LOOK = """
import ctypes, importlib.metadata, importlib.util, pathlib, sys
importlib.util.find_spec("sglang") or sys.exit("no module named sglang")
print(importlib.metadata.version("sglang"))
kernels = importlib.util.find_spec("sgl_kernel") if "cpu" in sys.argv else None
for folder in kernels.submodule_search_locations if kernels else ():
    built = list(pathlib.Path(folder).rglob("common_ops*.so"))
    if built and all(b"libcuda.so.1" in one.read_bytes() for one in built):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            print(error)
"""
"""Prints the version; and where it is to run on CPUs and has kernels for GPUs only, which load libcuda even
where they will not be used, why that cannot be loaded.
"""

WRITTEN_FOR = "0.5.23"


def installed_version(settings: SglangSettings) -> str:
    """The version of SGLang that the configured python would run.

    Raises:
        EngineError: there is no such python, it has no SGLang, or one whose kernels cannot be loaded here.
    """
    cpu = device_of(settings) == "cpu"
    python = python_of(settings)
    way_out = (
        "set rollout.sglang.python to the python of an environment that has SGLang, or rollout.sglang.urls "
        "to servers that are there"
    )
    try:
        found = subprocess.run(
            [python, "-c", LOOK, *(["cpu"] if cpu else [])],
            env=own_modules(settings, os.environ) | settings.env,
            capture_output=True,
            text=True,
            timeout=LOOK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"rollout.sglang.python = {python!r} cannot be run ({error}); {way_out}") from error
    if found.returncode:
        last = found.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        raise EngineError(f"rollout.sglang.python = {python!r} has no SGLang ({last[0]}); {way_out}")
    version, *missing = found.stdout.strip().splitlines()
    if missing:
        raise EngineError(
            f"rollout.engine = sglang would run on CPUs, and the kernels of the SGLang of {python!r} are for "
            f"GPUs: they load libcuda.so.1 all the same ({missing[0]}). Take an SGLang that is built for "
            f"CPUs, name a folder with a libcuda.so.1 in rollout.sglang.env={{LD_LIBRARY_PATH: ...}} (a "
            f"stand-in is enough: docs/how-to/use-sglang.md, On a CPU), or set rollout.engine=transformers"
        )
    return version


def explain(rollout: RolloutSettings) -> str:
    """What would serve, in a line; raises as `installed_version`."""
    settings = rollout.sglang
    pushed = f"weights by {settings.weights}, requests meanwhile: {settings.pause}"
    if settings.urls:
        return f"{_servers(len(settings.urls))} at {', '.join(settings.urls)}; {pushed}"
    version = installed_version(settings)
    noted = "" if version == WRITTEN_FOR else f" (written for and tested with {WRITTEN_FOR})"
    device = device_of(settings)
    if device == "cpu":
        where = "on CPUs"
    else:
        each = gpus(settings)
        last = settings.first_gpu + each * rollout.replicas - 1
        where = f"on GPUs {settings.first_gpu} to {last}, {each} each"
    seeds = "" if settings.deterministic else "; draws differ from run to run (rollout.sglang.deterministic)"
    return f"SGLang {version}{noted}, {_servers(rollout.replicas)} {where}; {pushed}{seeds}"


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"
