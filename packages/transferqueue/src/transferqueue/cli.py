"""The ``transferqueue`` command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .errors import QueueError
from .introspection import sidecar, top
from .server.launch import serve
from .wire.messages import MAX_FRAME_BYTES

_ENDING = {signal.SIGINT, signal.SIGTERM}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="transferqueue", description="A field-level sample store for post-training."
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "serve",
        help="start a store and serve until Ctrl-C",
        description="Starts a store, prints its address, and serves until Ctrl-C or SIGTERM.",
        epilog="The environment variable TRANSFERQUEUE_TOKEN sets a token; a host off loopback needs one.",
    )
    command.add_argument("--storage", type=int, default=1, metavar="N", help="storage units (default 1)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, default=0, help="port of the controller (default: a free one)")
    command.add_argument("--max-bytes", metavar="SIZE", help='payload limit, such as "8GiB" (default: none)')
    command.add_argument(
        "--max-frame-bytes",
        default=str(MAX_FRAME_BYTES),
        metavar="SIZE",
        help="largest message (default 1GiB)",
    )
    command.set_defaults(run=_serve)
    top.register(commands)
    sidecar.register(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except QueueError as error:
        print(f"transferqueue: {error}", file=sys.stderr)
        return 1


def _serve(options: argparse.Namespace) -> int:
    with serve(
        options.storage,
        max_bytes=options.max_bytes,
        host=options.host,
        port=options.port,
        token=os.environ.get("TRANSFERQUEUE_TOKEN"),
        max_frame_bytes=options.max_frame_bytes,
    ) as server:
        # Blocked only now, so that the processes of the store did not inherit it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING | {signal.SIGCHLD})
        print(f"transferqueue serves at {server.address} ({options.storage} storage units)", flush=True)
        while True:
            ended = [process for process in server.processes if process.poll() is not None]
            if ended:
                print(
                    f"transferqueue: a server process ended with status {ended[0].returncode}",
                    file=sys.stderr,
                )
                return 1
            if signal.sigwait(_ENDING | {signal.SIGCHLD}) in _ENDING:
                return 0
