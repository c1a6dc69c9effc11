"""The Ray under a run: started inside the command and ended with it, or a cluster that is only visited."""

import contextlib
import functools
import logging
import os
import select
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relax.config import RunConfig
from relax.orchestration.plan import plan

THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""One computing thread a worker: many workers share few cores here, and sums keep their order."""


EMBEDDED = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's switch for systems whose firewalls ask: its daemons then listen on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment of a Ray that lives and dies with the command."""

OBJECT_STORE_BYTES = 256 << 20
"""Samples and weights travel over the queue and dcs, so Ray's own store stays small."""


FOLDER = "relax-ray-"
"""Name of an embedded Ray's folder in the temporary directory, followed by the process that owns it."""


class Daemons:
    """Ray's own processes under an embedded Ray: without one of them nothing goes on, but nothing says so
    either.
    """

    NAMES = ("gcs_server", "raylet")

    def __init__(self) -> None:
        self._watched: dict[str, int] = {}

    def watch(self) -> None:
        """Watch the daemons that this process has started."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                if name in self.NAMES and int(rest.split()[1]) == os.getpid():
                    self._watched[name] = os.pidfd_open(int(entry.name))

    def dead(self) -> str | None:
        """The name of a daemon that has ended."""
        for name, descriptor in self._watched.items():
            if select.select([descriptor], [], [], 0)[0]:
                return name
        return None

    def close(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}


@contextlib.contextmanager
def cluster(config: RunConfig, namespace: str) -> Iterator[Daemons]:
    """A Ray with Serve, for as long as the block runs. An embedded one keeps its files in a folder that goes
    with it.
    """
    embedded = config.ray.address is None
    for name, value in (THREADS | EMBEDDED if embedded else THREADS).items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    init = functools.partial(ray.init, namespace=namespace, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _sweep()
    daemons = Daemons()
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        try:
            if embedded:
                init(
                    num_cpus=config.ray.num_cpus,
                    # Ray counts the GPUs of this machine only where the run has a use for them.
                    num_gpus=None if any(role.gpus for role in plan(config).roles) else 0,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=folder,
                )
            else:
                init(address=config.ray.address)
            daemons.watch()
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            yield daemons
        finally:
            daemons.close()
            if ray.is_initialized():
                ray.shutdown()


def _sweep() -> None:
    """Remove what embedded Rays left whose commands were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
