"""The entry point of a server process: ``python -m transferqueue.server.process``, started by `launch.serve`.

The parent writes one line of JSON to stdin (what to be, where to listen, the token: nothing secret is in the
arguments) and reads one line from stdout (the port, or why not). The process ends when stdin closes or the
parent is gone, however the parent ended: a pipe to it and a pidfd of it are in the poll set, so neither a
killed parent nor one whose other children inherited the pipe leaves it behind.
"""

import gc
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from ..controller.backing import Backing, InFiles, InMemory, Spilling
from ..controller.journal import Journal
from ..controller.service import ControllerService
from ..errors import QueueError
from ..storage.overseer import Overseer
from ..storage.unit import StorageUnit
from ..transport.receive_buffers import keep_freed_memory
from ..wire.listeners import LocalListener, ZmqListener
from ..wire.messages import MAX_HEADER_BYTES, UnitAddress
from ..wire.node import Node
from .assignment import Assignment, Listening

_UNIT_MESSAGE_BYTES = 1 << 26  # payload comes in chunks; what may be long is a list of places


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
        remote = ZmqListener(
            assignment.host,
            assignment.port,
            max_message_bytes=MAX_HEADER_BYTES if assignment.unit is None else _UNIT_MESSAGE_BYTES,
            waiting=10_000 if assignment.unit is None else 8,
            keys=None if assignment.curve is None else _keys(assignment.curve),
        )
    except zmq.ZMQError as error:
        _say(
            Listening(error=f"cannot listen on {assignment.host}:{assignment.port}: {error}; choose another")
        )
        return 1
    if assignment.unit is not None:
        _store(assignment, assignment.unit, remote, [0, parent])
        return 0
    try:
        node, service = _controller(assignment, remote)
    except (QueueError, OSError) as error:
        _say(Listening(error=f"cannot begin: {error}"))
        return 1
    # A collection of all the metadata takes long and finds nothing: it has no cycles.
    gc.set_threshold(100_000, 50, 1_000)
    node.run(service, [0, parent])
    service.close()
    return 0


def _controller(assignment: Assignment, remote: ZmqListener) -> tuple[Node, ControllerService]:
    backing: Backing = InMemory()
    journal = None
    if assignment.journal is not None:
        journal = Journal(Path(assignment.journal), fsync=assignment.fsync)
        backing = InFiles(journal.folder)
    elif assignment.spill is not None:
        backing = Spilling(assignment.memory or 0, Path(assignment.spill))

    def ready(error: QueueError | None) -> None:
        if error is None:
            _say(Listening(remote.port))
        else:
            _say(Listening(error=f"cannot begin: {error}"))
            node.stop()

    node = Node(
        remote,
        LocalListener(assignment.local),
        token=assignment.token,
        max_frame_bytes=assignment.max_frame_bytes,
        incarnation=assignment.incarnation,
    )
    service = ControllerService(
        node,
        backing,
        assignment.units,
        assignment.max_bytes,
        assignment.secret,
        journal,
        None if assignment.restore is None else Path(assignment.restore),
        ready,
    )
    return node, service


def _store(assignment: Assignment, number: int, remote: ZmqListener, lifelines: list[int]) -> None:
    node = Node(
        remote,
        None,
        token=assignment.token,
        max_frame_bytes=assignment.max_frame_bytes,
        incarnation=assignment.incarnation,
    )
    keep_freed_memory()
    overseer = Overseer(assignment.local, assignment.token, assignment.secret, node.poll)
    # What comes before the controller has said what may be written would be refused.
    node.paused = True

    def known() -> None:
        node.paused = False

    address = UnitAddress(number, assignment.host, remote.port)
    unit = StorageUnit(address, overseer, known, confirmed=assignment.journal is not None)
    if assignment.ucx:
        unit.offer_ucx(node.poll, assignment.token or "", assignment.max_frame_bytes)
    unit.start()
    _say(Listening(remote.port))
    node.run(unit, lifelines)
    unit.close()


def _keys(curve: tuple[str, str]) -> tuple[bytes, bytes]:
    return curve[0].encode(), curve[1].encode()


def _say(listening: Listening) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(listening) + b"\n")
    sys.stdout.buffer.flush()
    os.dup2(2, 1)  # nothing reads stdout from here on


if __name__ == "__main__":
    sys.exit(main())
