"""``transferqueue metrics``: the endpoint for Prometheus as a process beside a store."""

import argparse
import os
import signal
import sys

from ..errors import QueueError
from .endpoint import serve_metrics
from .reader import GONE, StatsReader

_ENDING = {signal.SIGINT, signal.SIGTERM}


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command; `main` runs it."""
    command = commands.add_parser(
        "metrics",
        help="serve the metrics of a store to Prometheus",
        description="Serves /metrics for Prometheus until Ctrl-C or SIGTERM. A store that is away is "
        "transferqueue_up 0.",
        epilog="The environment variables TRANSFERQUEUE_TOKEN and TRANSFERQUEUE_SERVER_KEY give the token "
        "and the public CURVE key of the store.",
    )
    command.add_argument("address", help="of the store, tcp://host:port")
    command.add_argument(
        "--port", type=int, default=9400, help="port to listen on (default 9400; 0: a free one)"
    )
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1; there is no authentication on another)",
    )
    command.add_argument(
        "--timeout", type=float, default=3.0, metavar="S", help="seconds the store has to answer (default 3)"
    )
    command.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Serves until a signal ends it. A store that is not there yet is waited for; one that refuses us is an
    error.
    """
    token = os.environ.get("TRANSFERQUEUE_TOKEN")
    key = os.environ.get("TRANSFERQUEUE_SERVER_KEY")
    reader = StatsReader(options.address, token, server_key=key, timeout=options.timeout)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # in all threads that start from here on
    try:
        try:
            reader.read()
        except GONE as error:
            _say(error)
        finally:
            reader.close()
        with serve_metrics(
            reader.address,
            options.host,
            options.port,
            token=token,
            server_key=key,
            timeout=options.timeout,
            on_change=_say,
        ) as server:
            print(f"transferqueue serves the metrics of {reader.address} at {server.url}", flush=True)
            signal.sigwait(_ENDING)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _say(error: QueueError | None) -> None:
    text = "the store answers again" if error is None else f"the store does not answer: {error}"
    print(f"transferqueue metrics: {text}", file=sys.stderr, flush=True)
