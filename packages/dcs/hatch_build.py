"""Compiles the loops of `dcs` into the wheel. Without a C compiler it is pure; numpy and torch do the work.

A library needs no other and no Python, so one wheel is for every Python of its platform.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]  # there while a wheel is built

FLAGS = ["-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffreestanding", "-nostdlib", "-Wall", "-Wextra"]
PACKAGE = "src/dcs"
# The library, its source, and the machines that it is written for.
KERNELS = (
    ("delta/_kernel.so", "delta/kernel.c", ("x86_64", "aarch64")),
    ("memory/_streaming.so", "memory/streaming.c", ("x86_64",)),
)


class KernelBuildHook(BuildHookInterface):
    """Puts the libraries beside their sources, for a wheel and an editable installation alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform; environment: `CC`, and `DCS_KERNEL=0` for a wheel without."""
        for name, source, machines in KERNELS:
            library = Path(self.root) / PACKAGE / name
            why = self._compile(Path(self.root) / PACKAGE / source, library, machines)
            if why:
                library.unlink(missing_ok=True)
                self.app.display_warning(
                    f"relax-dcs without compiled {source} ({why}): slower, the same bits"
                )
                continue
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_17_{platform.machine()}"
            build_data["artifacts"].append(f"{PACKAGE}/{name}")

    def _compile(self, source: Path, library: Path, machines: tuple[str, ...]) -> str:
        """Why there is no library; "" when there is."""
        if os.environ.get("DCS_KERNEL") == "0":
            return "DCS_KERNEL is 0"
        if sys.platform != "linux" or platform.machine() not in machines:
            return f"no loops for {sys.platform} on {platform.machine()}"
        compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
        if not compiler[0]:
            return "no C compiler on PATH"
        fresh = library.with_suffix(f".{os.getpid()}")  # processes may have the old one mapped
        try:
            done = subprocess.run(
                [*compiler, *FLAGS, "-o", str(fresh), str(source)],
                capture_output=True,
                text=True,
                timeout=120,
            )
        except OSError as error:
            return f"{shlex.join(compiler)}: {error}"
        if done.returncode:
            return f"{shlex.join(compiler)} answered {done.returncode}: {done.stderr.strip()}"
        fresh.replace(library)
        return ""
