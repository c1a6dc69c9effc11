"""A bare ZMQ server: a ROUTER that sends back what comes, for as long as standard input is open.

    python zmq_echo.py '{"ipc": PATH}'

Its first line says {"tcp": "tcp://127.0.0.1:P"}; it listens on the path, too.
"""

import json
import sys

import zmq
from answering import work


def main() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        router.bind(f"ipc://{work()['ipc']}")
        print(json.dumps({"tcp": f"tcp://127.0.0.1:{port}"}), flush=True)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(sys.stdin, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if sys.stdin.fileno() in events:
                return
            router.send_multipart(router.recv_multipart(copy=False), copy=False)


if __name__ == "__main__":
    main()
