"""Beside a vLLM server: it follows a run of dcs, wherever the trainer of that run is.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \\
        --worker-extension-cls dcs.appliers.vllm_worker.DcsWorkerExtension
    python recipes/dcs_vllm.py tcp://COORDINATOR:PORT RUN http://127.0.0.1:8000

The trainer's side is that of recipes/dcs_pytorch_sglang.py. Ctrl-C ends it, and leaves the server as it is.
"""

import sys
from contextlib import suppress

import dcs
from dcs.appliers import VllmApplier


def main(coordinator: str, run: str, url: str, name: str = "vllm-0") -> None:
    with (
        VllmApplier(url) as applier,
        dcs.Subscriber(coordinator, run=run, name=name, layout=applier.layout) as subscriber,
    ):
        follower = subscriber.follow(applier)
        version = -1
        while True:
            with suppress(dcs.Timeout):  # a trainer may take its time
                version = follower.wait_for(version + 1, timeout=3600.0)
                print(f"version {version}: {applier.last}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    with suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
