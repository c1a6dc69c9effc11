"""No descriptor or thread left: said before it is too late, and as one error.

libzmq ends the process (abort) when it is refused a descriptor while it makes a socket, so whoever is about
to make one asks for as many first. Others of the process may still take them between the two: that is a
moment, where a process that runs out of them does so for good.
"""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from dcs.errors import NoMemory

OF_A_SOCKET = 24
"""More than a context with one socket, its thread's poll and its monitor take; 15 were counted."""

SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SCARCE_SECONDS = 0.1  # before a connection is accepted again when there was no descriptor for it
_WAY = "free some, or raise their limit (ulimit -n)"


def require_descriptors(count: int, what: str) -> None:
    """Raise `NoMemory` unless this process can open so many more just now."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        raise NoMemory(
            f"{what} needs {count} descriptors and this process gets {len(opened)} more: {error.strerror};"
            f" {_WAY}"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may: a command that serves needs one for each peer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def opening(what: str) -> Iterator[None]:
    """What is opened here may be refused for want of descriptors or memory: that is `NoMemory`."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno not in SCARCE:
            raise
        raise NoMemory(f"{what} cannot be opened: {os.strerror(error.errno)}; {_WAY}") from error


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread, or raise `NoMemory`: the system gives this process no more of them."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoMemory(
            f"{what} gets no thread: {error}; free memory, or raise the limit (ulimit -u)"
        ) from error
