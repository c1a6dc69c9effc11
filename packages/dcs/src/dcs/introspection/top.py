"""``dcs top``: the runs of a coordinator and their subscribers, as they change."""

import argparse
import math
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn, TextIO

from dcs.errors import DcsError
from dcs.introspection import plain
from dcs.introspection.extras import load
from dcs.introspection.frames import Frame, frames
from dcs.introspection.reader import TopologyReader


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command; `main` runs it."""
    command = commands.add_parser(
        "top",
        help="watch a coordinator",
        description="Shows the runs of a coordinator and how far each subscriber is, until Ctrl-C. On a"
        " terminal this is a table that changes in place (extra 'top'), else text.",
        epilog="The environment variable DCS_TOKEN gives the coordinator's token.",
    )
    command.add_argument(
        "address", help="of the coordinator's HTTP server: HOST:PORT or http://HOST:PORT, as dcs serve prints"
    )
    command.add_argument("--once", action="store_true", help="print what is there now, and end")
    command.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between readings (default 1)"
    )
    command.add_argument(
        "--timeout", type=float, default=3.0, metavar="S", help="seconds an answer may take (default 3)"
    )
    command.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Run the command on standard output until Ctrl-C, SIGTERM, or nobody reads it; returns the exit status.

    Raises:
        CoordinatorLost, Timeout: nothing answers at that address.
        Unauthorized: the token is missing or wrong.
        MissingExtra: rich is not installed, which the table on a terminal needs.
    """
    if not 0 < options.interval < math.inf:
        raise DcsError(f"interval is {options.interval}; it must be a positive number of seconds")
    reader = TopologyReader(options.address, os.environ.get("DCS_TOKEN"), options.timeout)
    view = _view(sys.stdout, live=not options.once)
    try:
        with _ended_by_sigterm(), _ended_while_it_waits() as pause:
            first = reader.read()
            with view as show:
                if options.once:
                    show(Frame(reader.url, first))
                    return 0
                for frame in frames(reader, first, options.interval, pause):
                    show(frame)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever read our output has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _view(out: TextIO | None, *, live: bool) -> AbstractContextManager[Callable[[Frame], None]]:
    if out is None:  # so it is where a process starts without one
        raise DcsError("standard output is closed; nothing can be shown")
    if live and out.isatty():
        return load("table", "top").on_screen(out)
    return plain.one_below_another(out)


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
