"""`dcs keeper`: run a keeper until it is told to end."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dcs.arguments import require_seconds
from dcs.control.address import TOKEN_VARIABLE, require_token_of_command
from dcs.errors import DcsError
from dcs.replicas.keeper import Keeper
from dcs.replicas.process import Failed, Ready
from dcs.scarcity import raise_descriptor_limit
from dcs.wire.tls import Tls

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = Any

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    """Add the sub-command `keeper`; `run` takes what is parsed."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "keeper",
        help="hold copies of training state in this node's memory",
        description="Hold copies of training state in memory, for ranks that may die. Prints one line of JSON"
        " with its address when it is ready; ends on SIGTERM or SIGINT, and what it holds is gone then. A "
        "token is read from the environment variable DCS_TOKEN.",
    )
    _arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run a keeper with the options of `add_parser`; returns the command's exit status."""
    try:
        return _serve(options)
    except DcsError as error:
        if options.report:
            print(msgspec.json.encode(Failed(error.code, str(error))).decode(), flush=True)
        else:
            print(f"dcs keeper: {error}", file=sys.stderr)
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m dcs.replicas.command`: what `serve_keeper` starts."""
    parser = argparse.ArgumentParser(prog="dcs keeper")
    _arguments(parser)
    return run(parser.parse_args(arguments))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (off loopback a token is required)"
    )
    parser.add_argument("--port", type=int, default=0, help="port to bind; 0 takes a free one")
    parser.add_argument(
        "--max-bytes",
        type=_bytes,
        default=None,
        metavar="N",
        help="such as 64GiB; default: half of the memory",
    )
    parser.add_argument(
        "--domain", default=None, help="what fails together with this keeper; default: the host's name"
    )
    parser.add_argument(
        "--no-shared-memory", action="store_true", help="have ranks on this machine send their state, too"
    )
    parser.add_argument(
        "--idle-seconds", type=float, default=None, help="end when nobody has been connected for so long"
    )
    parser.add_argument("--certificate", default=None, metavar="PEM", help="for TLS: this keeper's own")
    parser.add_argument("--key", default=None, metavar="PEM", help="its private key")
    parser.add_argument(
        "--authority", default=None, metavar="PEM", help="who signs the certificates of ranks"
    )
    parser.add_argument("--parent", type=int, default=None, metavar="PID", help="end when this process ends")
    parser.add_argument("--report", action="store_true", help="print what is wrong as a line of JSON, too")


def _bytes(text: str) -> int:
    number, factor = text, 1
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            number, factor = text.removesuffix(unit), size
    try:
        return int(float(number) * factor) if factor > 1 else int(number)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes; give one such as 64GiB, in {', '.join(_UNITS)} or none"
        ) from None


def _tls(options: argparse.Namespace) -> Tls | None:
    if options.certificate is None and options.key is None and options.authority is None:
        return None
    if options.certificate is None or options.key is None:
        raise DcsError("--certificate and --key are given together, --authority only with them")
    return Tls(options.certificate, options.key, options.authority)


def _serve(options: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN_VARIABLE)
    if not options.report:  # else a program started it, and is told what it has to give
        require_token_of_command(options.host, token, "the keeper")
    raise_descriptor_limit()
    if options.idle_seconds is not None:
        require_seconds(options.idle_seconds, "idle_seconds", forever=True)
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
        with Keeper(
            options.host,
            options.port,
            token,
            options.max_bytes,
            options.domain,
            not options.no_shared_memory,
            _tls(options),
        ) as keeper:
            print(msgspec.json.encode(Ready(keeper.address, os.getpid())).decode(), flush=True)
            _until_told(watched, keeper, options.idle_seconds)
        return 0
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for descriptor in (*watched, writer):
            os.close(descriptor)


def _until_told(watched: list[int], keeper: Keeper, idle_seconds: float | None) -> None:
    while True:
        left = None if idle_seconds is None else max(idle_seconds - keeper.idle_seconds, 0.05)
        readable, _, _ = select.select(watched, [], [], left)
        if readable or (idle_seconds is not None and keeper.idle_seconds >= idle_seconds):
            return


if __name__ == "__main__":
    sys.exit(main())
