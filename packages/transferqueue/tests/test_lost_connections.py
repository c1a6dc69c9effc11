"""Clients of other hosts whose connections are cut, or that hear no answer any more."""

import socket
import threading
from collections.abc import Callable

import numpy as np
import transferqueue as tq


class Relay:
    """A TCP relay whose connections a test can cut."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.accepted = 0
        self.mute = False  # what servers say is lost
        self.refuses = False
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.refuses:
                near.close()
                continue
            far = socket.create_connection(self.target)
            self.pairs.append((near, far))
            self.accepted += 1
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink, sink is near))
                self.threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65_536):
                if not (answers and self.mute):
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # cut

    def cut(self) -> None:
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the other side was faster

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def test_cut_connections_lose_and_repeat_nothing(store: tq.Server, name: str) -> None:
    relay = Relay(store.address)
    try:
        with tq.connect(relay.address, transport="zmq") as queue, tq.connect(store) as direct:
            part = queue.partition(name, tasks={"t": ["x"]})
            seen: list[int] = []

            def consume() -> None:
                for batch in part.stream("t", 3):
                    seen.extend(batch["x"].values.tolist())
                    batch.ack()

            consumer = threading.Thread(target=consume)
            consumer.start()
            for start in range(0, 60, 2):
                if start % 6 == 0:
                    relay.cut()
                part.put({"x": np.arange(start, start + 2)})
            part.close()
            consumer.join(60)
            assert seen == list(range(60))
            assert relay.accepted >= 5
            ledger = direct.partition(name).ledger("t")
            assert (len(ledger.acked), ledger.dropped, ledger.leased, ledger.pending) == (60, {}, [], [])
    finally:
        relay.close()


def test_what_failed_for_want_of_the_controller_is_undone_when_it_is_reached_again(
    store: tq.Server, queue: tq.Client, name: str, eventually: Callable
) -> None:
    """What raised may have been done, and its caller may do it again: it must not stay."""
    relay = Relay(store.address)
    try:
        with tq.connect(relay.address, transport="zmq", reconnect_seconds=0.2) as remote:
            part, here = remote.partition(name, tasks={"t": ["x"]}), queue.partition(name)
            part.put({"x": np.arange(3)})
            relay.mute = True
            failed: list[BaseException] = []

            def attempt(call: Callable[[], object]) -> None:
                try:
                    call()
                except tq.QueueError as error:
                    failed.append(error)

            calls: list[Callable[[], object]] = [
                lambda: part.fetch("t", 3, timeout=60),
                lambda: part.put({"x": np.arange(10, 12)}, timeout=60),
            ]
            callers = [threading.Thread(target=attempt, args=(call,)) for call in calls]
            for caller in callers:
                caller.start()
            eventually(lambda: len(here.ledger("t").leased) == 3)
            eventually(lambda: queue.stats().partitions[name].samples == 5)
            relay.refuses = True
            relay.cut()
            for caller in callers:
                caller.join(20)
            assert [type(error) for error in failed] == [tq.ControllerLost] * 2
            relay.refuses = relay.mute = False
            assert here.fetch("t", 3, timeout=20)["x"].values.tolist() == [0, 1, 2]
            eventually(lambda: queue.stats().partitions[name].samples == 3)
            assert len(here.ledger("t").dropped) == 2
    finally:
        relay.close()
