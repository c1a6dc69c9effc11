"""The ``transferqueue`` command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .client.blocking import Client, connect
from .errors import QueueError
from .introspection import sidecar, top
from .server.launch import serve
from .wire.messages import MAX_FRAME_BYTES


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
    command.add_argument(
        "--journal", metavar="DIR", help="keep everything in DIR: a store started on it again goes on"
    )
    command.add_argument(
        "--fsync", action="store_true", help="with --journal: acknowledge only what is on the disk"
    )
    command.add_argument("--memory", metavar="SIZE", help="with --spill: shared memory to use before files")
    command.add_argument("--spill", metavar="DIR", help="folder for payload that does not fit into --memory")
    command.add_argument("--restore", metavar="DIR", help="begin with a snapshot")
    command.add_argument(
        "--curve", action="store_true", help="encrypt TCP; prints the public key that clients need"
    )
    command.add_argument("--ucx", action="store_true", help="let large payload go by UCX too (extra [ucx])")
    command.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve /metrics to Prometheus (extra [metrics])"
    )
    command.set_defaults(run=_serve)
    for name, what in (
        ("snapshot", "write what a store holds to a folder of its host"),
        ("restore", "fill an empty store with a snapshot on its host"),
    ):
        command = commands.add_parser(
            name,
            help=what,
            epilog="The environment variables TRANSFERQUEUE_TOKEN and TRANSFERQUEUE_SERVER_KEY are used.",
        )
        command.add_argument("address", help="tcp://host:port of the controller")
        command.add_argument("folder", help="of the snapshot")
        command.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
        command.set_defaults(run=_snapshot if name == "snapshot" else _restore)
    top.register(commands)
    sidecar.register(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except QueueError as error:
        print(f"transferqueue: {error}", file=sys.stderr)
        return 1


def _serve(options: argparse.Namespace) -> int:
    ending = os.eventfd(0, os.EFD_CLOEXEC)
    with serve(
        options.storage,
        max_bytes=options.max_bytes,
        host=options.host,
        port=options.port,
        token=os.environ.get("TRANSFERQUEUE_TOKEN"),
        max_frame_bytes=options.max_frame_bytes,
        journal=options.journal,
        fsync=options.fsync,
        memory=options.memory,
        spill=options.spill,
        restore=options.restore,
        curve=options.curve,
        ucx=options.ucx,
        metrics_port=options.metrics_port,
    ) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os.eventfd_write(ending, 1))
        server.on_failure(lambda: os.eventfd_write(ending, 1))
        print(f"transferqueue serves at {server.address} ({options.storage} storage units)", flush=True)
        for name, value in (("server key", server.server_key), ("metrics", server.metrics_url)):
            if value is not None:
                print(f"  {name}: {value}", flush=True)
        if server.failure is None:
            os.read(ending, 8)
        if server.failure is not None:
            print(f"transferqueue: {server.failure}", file=sys.stderr)
            return 1
    return 0


def _client(options: argparse.Namespace) -> Client:
    return connect(
        options.address,
        os.environ.get("TRANSFERQUEUE_TOKEN"),
        server_key=os.environ.get("TRANSFERQUEUE_SERVER_KEY"),
    )


def _snapshot(options: argparse.Namespace) -> int:
    with _client(options) as client:
        client.snapshot(options.folder, timeout=options.timeout)
    print(f"transferqueue: the snapshot is in {options.folder}")
    return 0


def _restore(options: argparse.Namespace) -> int:
    with _client(options) as client:
        client.restore(options.folder, timeout=options.timeout)
    print(f"transferqueue: {options.folder} is restored")
    return 0
