"""The entry point of a server process: ``python -m transferqueue.server.process``, started by `launch.serve`.

The parent writes one line of JSON to stdin (what to be, where to listen, the token: nothing secret is in the
arguments) and reads one line from stdout (the port, or why not). The process ends when stdin closes or the
parent is gone, however
the parent ended: a pipe to it and a pidfd of it are in the poll set, so neither a killed parent nor one whose
other children inherited the pipe leaves it behind.
"""

import logging
import os
import signal
import sys

import msgspec
import zmq

from ..controller.service import ControllerService
from ..storage.service import StorageService
from ..wire.node import Node
from .assignment import Assignment, Listening


def main() -> int:
    """Serves until the parent closes stdin or dies; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0  # the parent died or changed its mind
    assignment = msgspec.json.decode(line, type=Assignment)
    name = "controller" if assignment.unit is None else f"storage unit {assignment.unit}"
    logging.basicConfig(format=f"%(asctime)s transferqueue {name}: %(message)s", level=logging.WARNING)
    try:
        parent = os.pidfd_open(assignment.parent)
    except ProcessLookupError:
        return 0
    try:
        node = Node(
            assignment.host,
            assignment.port,
            token=assignment.token,
            max_frame_bytes=assignment.max_frame_bytes,
        )
    except zmq.ZMQError as error:
        _say(Listening(error=f"cannot listen on {assignment.host}:{assignment.port}: {error}"))
        return 1
    if assignment.unit is not None:
        _say(Listening(node.port))
        node.run(StorageService(assignment.unit), [0, parent])
    else:
        service = ControllerService(assignment.units, assignment.token, assignment.max_bytes)
        _say(Listening(node.port))
        node.run(service, [0, parent], assignment.units)
        service.close()
    return 0


def _say(listening: Listening) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(listening) + b"\n")
    sys.stdout.buffer.flush()
    os.dup2(2, 1)  # nothing reads stdout from here on


if __name__ == "__main__":
    sys.exit(main())
