"""A line between two hosts: what goes through it takes a while, and loses packets now and then.

Run as `long_line.py HOST PORT UPSTREAM SECONDS LOSS`: accepts at HOST:PORT, connects to UPSTREAM:PORT and
delivers every byte SECONDS after it came. A share LOSS of the packets (of 1,460 bytes) is lost: a connection
then stands still for a retransmission timeout, as in TCP. Says "ready" when it accepts.
"""

import contextlib
import random
import socket
import sys
import threading
import time
from collections import deque

PACKET = 1460
SEGMENT = 10 * PACKET
TIMEOUT_SECONDS = 0.2
IN_FLIGHT = 1 << 20  # bytes of a connection


def pump(source: socket.socket, sink: socket.socket, seconds: float, loss: float, seed: int) -> None:
    """One direction of one connection, until either end hangs up."""
    coming: deque[tuple[float, bytes]] = deque()
    changed, dice = threading.Condition(), random.Random(seed)

    def read() -> None:
        data = b"?"
        while data:
            with contextlib.suppress(OSError):
                data = b""
                data = source.recv(SEGMENT)
            with changed:
                changed.wait_for(lambda: len(coming) < IN_FLIGHT // SEGMENT)
                coming.append((time.monotonic() + seconds, data))
                changed.notify_all()

    threading.Thread(target=read, daemon=True).start()
    lost_until = 0.0
    while True:
        with changed:
            changed.wait_for(lambda: coming)
            due, data = coming.popleft()
            changed.notify_all()
        if dice.random() > (1 - loss) ** (len(data) / PACKET):
            lost_until = max(due, time.monotonic(), lost_until) + TIMEOUT_SECONDS
        time.sleep(max(0.0, max(due, lost_until) - time.monotonic()))
        try:
            sink.sendall(data)
        except OSError:
            data = b""
        if not data:
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            return


def main(host: str, port: int, upstream: str, seconds: float, loss: float) -> None:
    listener = socket.create_server((host, port), backlog=128)
    print("ready", flush=True)
    for number in range(1 << 30):
        near, _ = listener.accept()
        far = socket.create_connection((upstream, port))
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index, (source, sink) in enumerate(((near, far), (far, near))):
            arguments = (source, sink, seconds, loss, 2 * number + index)
            threading.Thread(target=pump, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
