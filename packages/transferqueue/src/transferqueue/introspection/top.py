"""``transferqueue top``: a store's depth, rates, lag and leases, as they change."""

import argparse
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from types import FrameType
from typing import NoReturn, TextIO

import msgspec

from ..errors import InvalidArgument
from .extras import load
from .frames import Frame, frames
from .reader import StatsReader
from .statistics import plain


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command; `main` runs it."""
    command = commands.add_parser(
        "top",
        help="watch a store",
        description="Shows depth, rates, lag and leases of every task of a store until Ctrl-C. Rates are "
        "differences between two readings.",
        epilog="The environment variables TRANSFERQUEUE_TOKEN and TRANSFERQUEUE_SERVER_KEY give the token "
        "and the public CURVE key of the store.",
    )
    command.add_argument("address", help="of the store, tcp://host:port")
    command.add_argument(
        "--once", action="store_true", help="read twice, one interval apart; show that and end"
    )
    command.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between readings (default 1)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object a line")
    command.add_argument(
        "--timeout", type=float, default=3.0, metavar="S", help="seconds the store has to answer (default 3)"
    )
    command.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Runs the command on standard output until Ctrl-C, SIGTERM, or nobody reads it; returns the exit status.

    Raises:
        ControllerLost, Timeout: there is no store at that address.
        Unauthorized: the token is wrong.
        MissingExtra: rich is not installed, which all but ``--json`` needs.
    """
    if not 0 < options.interval < math.inf:
        raise InvalidArgument(f"interval is {options.interval}; it must be a positive number of seconds")
    view = _view(sys.stdout, as_json=options.json, live=not options.once)
    reader = StatsReader(
        options.address,
        os.environ.get("TRANSFERQUEUE_TOKEN"),
        server_key=os.environ.get("TRANSFERQUEUE_SERVER_KEY"),
        timeout=options.timeout,
    )
    try:
        with _ended_by_sigterm(), _ended_while_it_waits() as pause:
            first = reader.read()
            with view as show:
                for frame in frames(reader, first, options.interval, once=options.once, pause=pause):
                    show(frame)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever read our output has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        reader.close()
    return 0


def _view(
    out: TextIO | None, *, as_json: bool, live: bool
) -> AbstractContextManager[Callable[[Frame], None]]:
    if out is None:  # so it is where a process starts without one
        raise InvalidArgument("standard output is closed; nothing can be shown")
    if as_json:
        return _json_lines(out)
    table = load("table", "top")
    return table.on_screen(out) if live and out.isatty() else table.one_below_another(out)


@contextmanager
def _json_lines(out: TextIO) -> Iterator[Callable[[Frame], None]]:
    def show(frame: Frame) -> None:
        line = {
            "time": time.time(),
            "address": frame.address,
            "up": frame.away is None,
            "error": None if frame.away is None else str(frame.away),
            "restarted": frame.restarted,
            "stats": plain(frame.reading.stats),
            "rates": None if frame.rates is None else asdict(frame.rates),
        }
        out.write(msgspec.json.encode(line).decode() + "\n")
        out.flush()

    yield show


@contextmanager
def _ended_while_it_waits() -> Iterator[Callable[[float], object]]:
    """Gives a wait that a signal ends also when it comes just before the wait begins: it leaves a byte."""
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        try:
            yield lambda seconds: select.select([here], [], [], seconds)
        finally:
            signal.set_wakeup_fd(before)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that the terminal is put in order."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
