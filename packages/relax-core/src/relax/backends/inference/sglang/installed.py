"""Whether a python has SGLang, found without importing it, which takes half a minute."""

import os
import subprocess

from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.flags import device_of, gpus, own_modules, python_of
from relax.config.roles import RolloutSettings
from relax.config.sglang import SglangSettings

LOOK_SECONDS = 60.0
LOOK = (
    "import importlib.metadata, importlib.util, sys\n"
    "importlib.util.find_spec('sglang') or sys.exit('no module named sglang')\n"
    "print(importlib.metadata.version('sglang'))"
)

WRITTEN_FOR = "0.5.23"


def installed_version(settings: SglangSettings) -> str:
    """The version of SGLang that the configured python would run.

    Raises:
        EngineError: there is no such python, or it has no SGLang.
    """
    python = python_of(settings)
    way_out = (
        "set rollout.sglang.python to the python of an environment that has SGLang, or rollout.sglang.urls "
        "to servers that are there"
    )
    try:
        found = subprocess.run(
            [python, "-c", LOOK],
            env=own_modules(settings, os.environ),
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
    return found.stdout.strip()


def explain(rollout: RolloutSettings) -> str:
    """What would serve, in a line; raises as `installed_version`."""
    settings = rollout.sglang
    pushed = f"weights by {settings.weights}, requests meanwhile: {settings.pause}"
    if settings.urls:
        return f"{len(settings.urls)} servers at {', '.join(settings.urls)}; {pushed}"
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
    return f"SGLang {version}{noted}, {rollout.replicas} servers {where}; {pushed}{seeds}"
