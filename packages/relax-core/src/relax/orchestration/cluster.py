"""The Ray under a run: started inside the command and ended with it, or a cluster that is only visited."""

import contextlib
import functools
import logging
import os
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


@contextlib.contextmanager
def cluster(config: RunConfig, namespace: str) -> Iterator[None]:
    """A Ray with Serve, for as long as the block runs. An embedded one keeps its files in a folder that goes
    with it.
    """
    embedded = config.ray.address is None
    for name, value in (THREADS | EMBEDDED if embedded else THREADS).items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    init = functools.partial(ray.init, namespace=namespace, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="relax-ray-", ignore_cleanup_errors=True) as folder:
        try:
            if embedded:
                init(
                    num_cpus=config.ray.num_cpus,
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=folder,
                )
            else:
                init(address=config.ray.address)
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
            yield
        finally:
            if ray.is_initialized():
                ray.shutdown()
