"""The far end of two raw TCP hops: takes bytes into a reused buffer, then sends them back out of it.

    python tcp_relay.py '{"nbytes": N}'

Its first line says {"port": P}. One connection; {"do": "take"} and {"do": "give"} move N bytes each.
"""

import socket

from answering import answer, work
from buffers import touched


def main() -> None:
    buffer = touched(work()["nbytes"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def connection() -> socket.socket:
            if not connections:
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections.append(accepted)
            return connections[0]

        def take() -> dict[str, int]:
            view, at = memoryview(buffer), 0
            while at < len(view):
                at += connection().recv_into(view[at:])
            return {"taken": at}

        def give() -> dict[str, int]:
            connection().sendall(buffer)
            return {"given": len(buffer)}

        answer({"take": take, "give": give}, {"port": listener.getsockname()[1]})
        for accepted in connections:
            accepted.close()


if __name__ == "__main__":
    main()
