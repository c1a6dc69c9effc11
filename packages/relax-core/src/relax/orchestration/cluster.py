"""The Ray under a run: started inside the command and ended with it, or a cluster that is only visited."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator

from relax.config import RunConfig

THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""One computing thread a worker: many workers share few cores here, and sums keep their order."""


@contextlib.contextmanager
def cluster(config: RunConfig, namespace: str) -> Iterator[None]:
    """A Ray with Serve for as long as the block runs. The files of an embedded one go with it."""
    for name, value in THREADS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if config.ray.address is None:
        os.environ.setdefault(
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
        )  # makes Ray's own daemons use loopback
    import ray
    from ray import serve

    temporary = None
    if config.ray.address is None:
        temporary = tempfile.mkdtemp(prefix="relax-ray-")
    try:
        ray.init(
            address=config.ray.address,
            namespace=namespace,
            logging_level=logging.WARNING,
            log_to_driver=False,
            **(
                {
                    "num_cpus": config.ray.num_cpus,
                    "num_gpus": 0,
                    "include_dashboard": False,
                    "_temp_dir": temporary,
                    "_node_ip_address": "127.0.0.1",
                    "object_store_memory": 256 << 20,
                }
                if temporary
                else {}
            ),
        )
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield
    finally:
        try:
            if ray.is_initialized():
                ray.shutdown()
        finally:
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)
