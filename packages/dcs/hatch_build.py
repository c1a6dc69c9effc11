"""Compiles the loops of `dcs.delta` into the wheel. Without a C compiler it is pure, and numpy does the work.

The library needs no other and no Python, so one wheel is for every Python of its platform.
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
MACHINES = ("x86_64", "aarch64")


class KernelBuildHook(BuildHookInterface):
    """Puts `_kernel.so` beside `kernel.c`, for a wheel and an editable installation alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform; environment: `CC`, and `DCS_KERNEL=0` for a wheel without."""
        source = Path(self.root) / "src/dcs/delta/kernel.c"
        library = source.with_name("_kernel.so")
        why = self._compile(source, library)
        if why:
            library.unlink(missing_ok=True)
            self.app.display_warning(f"relax-dcs without its compiled kernel ({why}): numpy applies deltas")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_17_{platform.machine()}"
        build_data["artifacts"].append("src/dcs/delta/_kernel.so")

    def _compile(self, source: Path, library: Path) -> str:
        """Why there is no library; "" when there is."""
        if os.environ.get("DCS_KERNEL") == "0":
            return "DCS_KERNEL is 0"
        if sys.platform != "linux" or platform.machine() not in MACHINES:
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
