"""The Ray under a run: started inside the command and ended with it, or a cluster that is only visited."""

import contextlib
import functools
import logging
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from relax.config import ConfigError, RunConfig
from relax.orchestration.launcher import RoleFailed
from relax.orchestration.nodes import await_nodes
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
    # A SIGTERM while Ray starts ends it at once; by itself it drains its node for half a minute first.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's switch for systems whose firewalls ask: its daemons then listen on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment of a Ray that lives and dies with the command."""

OBJECT_STORE_BYTES = 256 << 20
"""Samples and weights travel over the queue and dcs, so Ray's own store stays small."""


REACH_SECONDS = 10.0
"""Longest wait for a cluster that is visited to take a connection."""

LEAVE_SECONDS = 3.0
"""How long processes of an embedded Ray may take to leave once it has ended; then they are killed."""

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

    Raises:
        RoleFailed: an embedded one did not start.
        ConfigError: none is reached at `ray.address`, or it has not `ray.nodes` nodes that are alike.
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
            with _own_sigterm(), _said_in_words(config.ray.address):
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
                    _reach(config.ray.address)
                    init(address=config.ray.address)
            if config.ray.nodes is not None:
                await_nodes(ray.nodes, config.ray.nodes, config.ray.start_seconds)
            daemons.watch()
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            yield daemons
        finally:
            daemons.close()
            if ray.is_initialized():
                ray.shutdown()
            if embedded:
                _end_users(Path(folder))


def check_reached(config: RunConfig) -> None:
    """Raise ConfigError where nobody listens at `ray.address`; "auto", which is Ray's to find, may be."""
    if config.ray.address is not None:
        with _said_in_words(config.ray.address):
            _reach(config.ray.address)


def _reach(address: str | None) -> None:
    """Raise OSError where nobody listens at `host:port`: Ray would try for minutes."""
    where = urlsplit(address if address is not None and "//" in address else f"//{address}")
    if where.hostname is not None and where.port is not None:
        socket.create_connection((where.hostname, where.port), REACH_SECONDS).close()


@contextlib.contextmanager
def _said_in_words(address: str | None) -> Iterator[None]:
    """Ray's start fails with errors of any kind, and of many lines."""
    try:
        yield
    except Exception as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if address is not None:
            raise ConfigError(
                f"ray.address = {address!r}: no Ray is reached there ({why}); start one (ray start --head), "
                f"or leave ray.address out for one inside the command"
            ) from error
        raise RoleFailed(f"Ray did not start: {why}") from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray's start takes SIGTERM over, for good: it would end Ray's processes under a run that is still ending
    tidily. Here that lasts for the start alone, and to be told to exit by it is to be interrupted.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    try:
        yield
    except SystemExit as error:
        if error.code not in (signal.SIGTERM, 1):  # those of Ray's two handlers
            raise
        raise KeyboardInterrupt from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _end_users(folder: Path) -> None:
    """End what is left of the Ray whose files are in a folder, known by its open logs. Ray ends its processes
    by itself, but the agents of one that was ended while it started, which look for it for a minute or more.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    for descriptor in _users(folder):
        try:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _users(folder: Path) -> list[int]:
    """Pidfds of the other processes that have a file of the folder open."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(link.readlink().is_relative_to(folder) for link in (entry / "fd").iterdir()):
                found.append(os.pidfd_open(int(entry.name)))
    return found


def _sweep() -> None:
    """Remove what embedded Rays left whose commands were killed: files, and for a minute two agents."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _end_users(folder)
            shutil.rmtree(folder, ignore_errors=True)
