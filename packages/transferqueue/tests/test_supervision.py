"""Processes of a store that die are started again, where nothing is lost by that."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import transferqueue as tq

Eventually = Callable[[Callable[[], bool]], None]


def kill(server: tq.Server, which: int) -> int:
    process = server.processes[which]
    process.kill()
    process.wait(20)
    return process.pid


def test_a_unit_that_dies_is_there_again_at_the_same_address(eventually: Eventually) -> None:
    with (
        tq.serve(1) as server,
        tq.connect(server) as local,
        tq.connect(server, transport="zmq", reconnect_seconds=60) as remote,
    ):
        part = remote.partition("p", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        address = local.stats().units[0].address
        died = kill(server, 1)
        eventually(lambda: server.processes[1].pid != died)
        assert part.get(ids, timeout=60)["x"].values.tolist() == [0, 1, 2]
        more = part.put({"x": np.arange(3)}, timeout=60)
        assert part.fetch("t", 6, timeout=60).ids.tolist() == [*ids, *more]
        eventually(lambda: [unit.address for unit in local.stats().units if unit.alive] == [address])
        assert server.processes[1].poll() is None
        assert server.failure is None


def test_large_puts_of_another_host_survive_the_death_of_their_unit() -> None:
    with tq.serve(2) as server, tq.connect(server, transport="zmq", reconnect_seconds=60) as remote:
        part = remote.partition("p", tasks={"t": ["x"]})
        stop = threading.Event()
        put: list[int] = []

        def produce() -> None:
            while not stop.is_set() or len(put) < 12:
                number = len(put)
                size = 300_000 if number % 3 else 10
                part.put({"x": [np.full(size, number, np.int32)]}, timeout=60)
                put.append(number)

        producer = threading.Thread(target=produce)
        producer.start()
        got: list[int] = []
        killed = 0
        deadline = time.monotonic() + 60
        while (not stop.is_set() or len(got) < len(put)) and time.monotonic() < deadline:
            batch = part.fetch("t", 1, timeout=60)
            values = np.asarray(batch["x"][0])
            assert (values == values[0]).all()
            got.append(int(values[0]))
            batch.ack()
            if len(got) % 4 == 3 and killed < 2:
                kill(server, 1 + killed % 2)
                killed += 1
            if killed == 2 and len(got) >= 12:
                stop.set()
                producer.join(60)
        producer.join(60)
        assert killed == 2
        assert got == put


@pytest.mark.slow
def test_a_process_that_keeps_dying_is_given_up() -> None:
    told = threading.Event()
    with tq.serve(1) as server, tq.connect(server) as queue:
        server.on_failure(told.set)
        while not told.is_set():
            process = server.processes[1]
            process.send_signal(signal.SIGABRT)
            process.wait(20)
            while server.processes[1] is process and not told.wait(0.001):
                pass
        assert isinstance(server.failure, tq.StartFailed)
        assert "storage unit 0 ended 5 times" in str(server.failure)
        assert f"status {-signal.SIGABRT}" in str(server.failure)
        queue.partition("p", tasks={"t": ["x"]}).put({"x": np.arange(3)})  # its own host needs no unit
    assert all(process.poll() is not None for process in server.processes)


@pytest.mark.slow
def test_a_controller_comes_back_though_a_unit_is_gone_for_good(tmp_path: Path) -> None:
    with tq.serve(1, journal=tmp_path) as server, tq.connect(server, reconnect_seconds=60) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        while server.failure is None:
            process = server.processes[1]
            process.kill()
            process.wait(20)
            while server.processes[1] is process and server.failure is None:
                time.sleep(0.001)
        died = kill(server, 0)
        assert part.fetch("t", 3, timeout=60).ids.tolist() == ids.tolist()
        assert server.processes[0].pid != died


def test_closing_ends_all_even_while_one_is_being_started_again(eventually: Eventually) -> None:
    threads, children = threading.active_count(), set(psutil.Process().children())
    server = tq.serve(2)
    kill(server, 1)
    server.close()
    server.close()
    assert all(process.returncode is not None for process in server.processes)
    eventually(lambda: threading.active_count() <= threads)
    new = set(psutil.Process().children()) - children
    assert not [child for child in new if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_closing_in_a_fork_does_not_end_the_store() -> None:
    with tq.serve(1) as server, tq.connect(server) as queue:
        child = os.fork()
        if not child:
            server.close()  # in a fork it is not ours to end
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert queue.stats().partitions == {}


def test_a_controller_without_a_journal_stays_dead() -> None:
    with tq.serve(1) as server, tq.connect(server, reconnect_seconds=0.3) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        died = kill(server, 0)
        with pytest.raises(tq.ControllerLost):
            part.put({"x": np.arange(3)})
        assert server.processes[0].pid == died
        assert "serve(journal=" in str(server.failure)
