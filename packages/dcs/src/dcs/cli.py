"""The `dcs` command."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version

import msgspec

from dcs import keyfile
from dcs.control.address import TOKEN_VARIABLE, require_token_of_command
from dcs.control.coordinator import LEASE_SECONDS, Coordinator
from dcs.control.process import Failed, Ready
from dcs.errors import DcsError
from dcs.introspection import IntrospectionServer, top
from dcs.scarcity import raise_descriptor_limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["keeper"]:  # it alone needs what keeps state, which takes long to load
        from dcs.replicas import command

        return command.main(given[1:])
    parser = argparse.ArgumentParser(prog="dcs", description="Broadcast model weights, verified and whole.")
    parser.add_argument("--version", action="version", version=f"dcs {version('relax-dcs')}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands)
    top.register(commands)
    commands.add_parser("keeper", help="hold copies of training state in this node's memory", add_help=False)
    keygen = commands.add_parser(
        "keygen",
        help="make the keys that encrypt what a coordinator and its members say",
        description="Write a new secret key to FILE (mode 0600) and its public key to FILE.pub, and print the"
        " latter. `dcs serve --curve-secret-file FILE` uses them; members are given the public one.",
    )
    keygen.add_argument("file", metavar="FILE", help="of the secret key; must not exist")
    keygen.set_defaults(run=_keygen)
    options = parser.parse_args(given)
    try:
        return options.run(options)
    except DcsError as error:
        if getattr(options, "parent", None) is None:
            print(f"dcs {options.command}: {error}", file=sys.stderr)
        else:
            print(msgspec.json.encode(Failed(error.code, str(error))).decode(), flush=True)
        return 1


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="run a coordinator",
        description="Run a coordinator. Prints one line of JSON with its addresses when it is ready; ends on"
        " SIGTERM or SIGINT. A token is read from the environment variable DCS_TOKEN.",
    )
    add: Callable[..., object] = serve.add_argument
    add("--host", default="127.0.0.1", help="address to bind (off loopback a token is required)")
    add("--port", type=int, default=0, help="port to bind; 0 takes a free one")
    add(
        "--lease-seconds",
        type=float,
        default=LEASE_SECONDS,
        metavar="S",
        help=f"a member not heard for so long is evicted (default {LEASE_SECONDS:g})",
    )
    add(
        "--transfer-seconds",
        type=float,
        metavar="S",
        help="a subscriber that takes longer for a version is evicted (default: it may take for ever)",
    )
    add("--no-relay", action="store_true", help="subscribers pull from the training ranks, not each other")
    add("--curve-secret-file", metavar="FILE", help="encrypt what members say; dcs keygen makes the file")
    add(
        "--http-port",
        type=int,
        metavar="PORT",
        help="serve /topology, /versions and /metrics over HTTP (default: no; 0 takes a free port)",
    )
    add("--http-host", default="127.0.0.1", help="address for HTTP (off loopback a token is required)")
    add("--parent", type=int, metavar="PID", help="end when this process ends")
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN_VARIABLE)
    if options.parent is None:  # else a program started it, and is told what it has to give
        require_token_of_command(options.host, token, "the coordinator")
        if options.http_port is not None:
            require_token_of_command(options.http_host, token, "the HTTP server of the coordinator")
    raise_descriptor_limit()
    keys = None if options.curve_secret_file is None else keyfile.read(options.curve_secret_file)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    previous_fd = signal.set_wakeup_fd(writer)
    watched = [reader]
    try:
        if options.parent is not None:
            try:
                watched.append(os.pidfd_open(options.parent))
            except ProcessLookupError as error:
                raise DcsError(f"process {options.parent}, given with --parent, has ended already") from error
        with ExitStack() as opened:
            coordinator = opened.enter_context(
                Coordinator(
                    options.host,
                    options.port,
                    token,
                    options.lease_seconds,
                    relay=not options.no_relay,
                    transfer_seconds=options.transfer_seconds,
                    curve=keys,
                )
            )
            url = ""
            if options.http_port is not None:
                http = IntrospectionServer(coordinator, options.http_host, options.http_port, token)
                url = opened.enter_context(http).url
            ready = Ready(coordinator.address, os.getpid(), url)
            print(msgspec.json.encode(ready).decode(), flush=True)
            select.select([*watched, coordinator.ended], [], [])
            return 0 if coordinator.alive else 1
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for descriptor in (*watched, writer):
            os.close(descriptor)


def _keygen(options: argparse.Namespace) -> int:
    print(keyfile.write(options.file).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
