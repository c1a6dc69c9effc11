"""The `dcs` command."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence

import msgspec

from dcs.control.coordinator import LEASE_SECONDS, Coordinator
from dcs.control.process import Failed, Ready
from dcs.errors import DcsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="dcs", description="Broadcast model weights, verified and whole.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="run a coordinator",
        description="Run a coordinator. Prints one line of JSON with its address when it is ready; ends on"
        " SIGTERM or SIGINT. A token is read from the environment variable DCS_TOKEN.",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to bind (off loopback a token is required)"
    )
    serve.add_argument("--port", type=int, default=0, help="port to bind; 0 takes a free one")
    serve.add_argument(
        "--lease-seconds", type=float, default=LEASE_SECONDS, help="a member not heard for so long is evicted"
    )
    serve.add_argument("--parent", type=int, default=None, metavar="PID", help="end when this process ends")
    options = parser.parse_args(arguments)
    try:
        return _serve(options.host, options.port, options.lease_seconds, options.parent)
    except DcsError as error:
        if options.parent is None:
            print(f"dcs serve: {error}", file=sys.stderr)
        else:
            print(msgspec.json.encode(Failed(error.code, str(error))).decode(), flush=True)
        return 1


def _serve(host: str, port: int, lease_seconds: float, parent: int | None) -> int:
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    previous_fd = signal.set_wakeup_fd(writer)
    watched = [reader]
    try:
        if parent is not None:
            try:
                watched.append(os.pidfd_open(parent))
            except ProcessLookupError as error:
                raise DcsError(f"process {parent}, given with --parent, has ended already") from error
        with Coordinator(host, port, os.environ.get("DCS_TOKEN"), lease_seconds) as coordinator:
            print(msgspec.json.encode(Ready(coordinator.address, os.getpid())).decode(), flush=True)
            select.select([*watched, coordinator.ended], [], [])
            return 0 if coordinator.alive else 1
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for descriptor in (*watched, writer):
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
