"""Life and death of the processes of a store. Every one here is real."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import transferqueue as tq
from transferqueue.server import launch
from transferqueue.sizes import parse_bytes

Eventually = Callable[[Callable[[], bool]], None]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def kill_for_good(server: tq.Server, which: int) -> None:
    """Kills one process of a store in each of its lives, until it is not started any more."""
    deadline = time.monotonic() + 60
    while server.failure is None and time.monotonic() < deadline:
        process = server.processes[which]
        process.kill()
        process.wait(20)
        while server.processes[which] is process and server.failure is None:
            time.sleep(0.001)
    assert f"storage unit {which - 1} ended 5 times" in str(server.failure)


def refuses(address: str) -> bool:
    host, port = address.removeprefix("tcp://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_close_leaves_no_process_and_no_port() -> None:
    server = tq.serve(2)
    assert len(server.processes) == 3
    with tq.connect(server) as queue:
        addresses = [unit.address for unit in queue.stats().units]
    server.close()
    server.close()
    assert all(process.returncode == 0 for process in server.processes)
    assert len(addresses) == 2
    assert all(map(refuses, addresses))
    assert refuses(server.address)


def test_a_store_starts_in_under_a_second() -> None:
    """By CPU time of the client and the slowest process: wall time would measure the neighbours."""
    begin = time.process_time()
    with tq.serve(2) as server, tq.connect(server) as queue:
        queue.partition("p", tasks={"t": ["x"]}).put({"x": np.arange(1)})
        own = time.process_time() - begin
        others = [sum(psutil.Process(process.pid).cpu_times()[:2]) for process in server.processes]
    assert own + max(others) < 1.0


def test_torch_and_ray_are_not_imported() -> None:
    program = """
import sys, numpy as np, transferqueue as tq
with tq.serve(1) as server, tq.connect(server) as queue:
    part = queue.partition("p", tasks={"t": ["x"]})
    part.put({"x": np.arange(3)})
    part.fetch("t", 3).ack()
assert not {"torch", "ray"} & set(sys.modules), "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


PARENT = """
import os, sys, threading, transferqueue as tq
server = tq.serve(2)
child = os.fork() if sys.argv[1] == "fork" else None  # it holds the other end of the pipes
if child != 0:
    print(*(process.pid for process in server.processes), *([child] if child else []), flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_a_killed_parent_leaves_nothing_behind(fork: str, eventually: Eventually) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, fork], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait(20)
    try:
        assert len(pids) == (4 if fork == "fork" else 3)
        eventually(lambda: all(gone(pid) for pid in pids[:3]))
    finally:
        for pid in pids[3:]:
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


def test_a_store_outlives_the_thread_that_started_it() -> None:
    servers: list[tq.Server] = []
    thread = threading.Thread(target=lambda: servers.append(tq.serve(1)))
    thread.start()
    thread.join(30)
    with servers[0] as server, tq.connect(server) as queue:
        assert queue.stats().partitions == {}


def test_a_port_in_use_is_named_and_nothing_half_started_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = {child.pid for child in psutil.Process().children()}
        with pytest.raises(tq.StartFailed, match=str(port)):
            tq.serve(2, port=port)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_bad_sizes_are_named() -> None:
    assert [parse_bytes(size) for size in (5, "1024", "1.5 kB", "8GiB", "2MB")] == [
        5,
        1024,
        1500,
        8 << 30,
        2 * 10**6,
    ]
    for size in ("", "8 apples", "-1", -1, 0, "0", "GiB", True):
        with pytest.raises(tq.InvalidArgument):
            parse_bytes(size)
    with pytest.raises(tq.InvalidArgument):
        tq.serve(0)


def test_a_killed_unit_loses_nothing_and_the_others_serve_its_place(eventually: Eventually) -> None:
    with (
        tq.serve(2) as server,
        tq.connect(server, transport="zmq", reconnect_seconds=0.3) as remote,
        tq.connect(server) as local,
    ):
        part = remote.partition("p", tasks={"t": ["x"]})
        first, second = (part.put({"x": np.arange(3)}) for _ in range(2))
        kill_for_good(server, 2)
        for _ in range(4):  # the units take turns
            assert part.get(first)["x"].values.tolist() == [0, 1, 2]
            assert part.get(second)["x"].values.tolist() == [0, 1, 2]
        eventually(lambda: [unit.unit for unit in local.stats().units] == [0])
        for _ in range(4):
            part.put({"x": np.arange(3)})
        assert len(part.fetch("t", 18, timeout=20)) == 18


def test_without_any_unit_the_host_of_the_store_goes_on_and_others_are_told() -> None:
    with (
        tq.serve(1) as server,
        tq.connect(server, transport="zmq", reconnect_seconds=0.3) as remote,
        tq.connect(server) as local,
    ):
        part = local.partition("p", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        kill_for_good(server, 1)
        with pytest.raises(tq.StorageLost, match="storage unit 0"):
            remote.partition("p").get(ids)
        with pytest.raises(tq.StorageLost):
            remote.partition("p").put({"x": np.arange(3)})
        part.put({"x": np.arange(3)})
        assert len(part.fetch("t", 6)) == 6


def test_a_killed_controller_ends_every_call(eventually: Eventually) -> None:
    with tq.serve(1) as server, tq.connect(server, reconnect_seconds=0.3) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                part.fetch("t", 1, timeout=600)
            except tq.QueueError as error:
                failed.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: queue.stats().waiting_fetches == 1)
        server.processes[0].kill()
        waiting.join(20)
        assert [type(error) for error in failed] == [tq.ControllerLost]
        with pytest.raises(tq.ControllerLost, match="cannot be reached"):
            part.put({"x": np.arange(1)})
    with pytest.raises(tq.ControllerLost):
        tq.connect(server, reconnect_seconds=0.1)


def test_a_stopped_server_ends_calls_at_their_deadline() -> None:
    with tq.serve(1) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        os.kill(server.processes[0].pid, signal.SIGSTOP)
        try:
            with pytest.raises(tq.Timeout, match="did not answer"):
                part.put({"x": np.arange(1)}, timeout=0.1)
        finally:
            os.kill(server.processes[0].pid, signal.SIGCONT)
        assert len(part.put({"x": np.arange(1)})) == 1


CONSUMER = """
import os, sys, transferqueue as tq
queue = tq.connect(sys.argv[1], transport=sys.argv[2])
batch = queue.partition("p").fetch("t", 3, lease_seconds=float(sys.argv[3]))
print(len(batch), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("transport", "lease_seconds"), [("zmq", "0.2"), ("shm", "600")])
def test_the_leases_of_a_killed_consumer_return(transport: str, lease_seconds: str) -> None:
    """On the store's host at once, elsewhere when they lapse."""
    with tq.serve(1) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        consumer = subprocess.run(
            [sys.executable, "-c", CONSUMER, server.address, transport, lease_seconds],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert (consumer.stdout.strip(), consumer.returncode) == ("3", -signal.SIGKILL)
        assert part.fetch("t", 3, timeout=20).ids.tolist() == ids.tolist()


WAITING_CONSUMER = """
import sys, transferqueue as tq
tq.connect(sys.argv[1], transport=sys.argv[2]).partition("p").fetch("t", 1, timeout=60)
"""


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_killed_consumer_gets_nothing_any_more(transport: str, eventually: Eventually) -> None:
    with tq.serve(1) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        consumer = subprocess.Popen([sys.executable, "-c", WAITING_CONSUMER, server.address, transport])
        eventually(lambda: queue.stats().waiting_fetches == 1)
        address = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        consumer.kill()
        consumer.wait(20)
        connections = psutil.Process(server.processes[0].pid).net_connections
        eventually(lambda: not any(c.laddr == address and c.status == "ESTABLISHED" for c in connections()))
        part.put({"x": np.arange(1)})
        assert part.fetch("t", 1, timeout=20, lease_seconds=600)["x"].values.tolist() == [0]
        assert queue.stats().waiting_fetches == 0


def test_a_store_nobody_refers_to_goes_on() -> None:
    address = tq.serve(1).address
    gc.collect()
    with tq.connect(address) as queue:
        assert queue.stats().partitions == {}
    [server] = [server for server in launch._running if server.address == address]
    server.close()


def start_cli(*arguments: str, token: str | None = None) -> tuple["subprocess.Popen[str]", str]:
    environment = os.environ | ({} if token is None else {"TRANSFERQUEUE_TOKEN": token})
    command = [
        sys.executable,
        "-c",
        "import sys; from transferqueue.cli import main; sys.exit(main())",
        "serve",
    ]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 30)[0]
    return process, process.stdout.readline()


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_serves_until_told_to_end(ending: signal.Signals, eventually: Eventually) -> None:
    process, line = start_cli("--storage", "2", "--max-bytes", "1GiB", token="t0ken")
    address = line.split()[3]
    children = [child.pid for child in psutil.Process(process.pid).children()]
    with tq.connect(address, "t0ken") as queue:
        assert len(queue.stats().units) == 2
        assert queue.stats().max_bytes == 1 << 30
    process.send_signal(ending)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert all(gone(pid) for pid in children)


def test_the_command_ends_when_a_part_dies_that_knows_what_is_lost() -> None:
    process, line = start_cli()
    psutil.Process(process.pid).children()[0].kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the controller ended with status -9" in errors
    assert "journal" in errors
    assert refuses(line.split()[3])


def test_the_command_names_what_is_wrong() -> None:
    process, line = start_cli("--max-bytes", "many")
    _, errors = process.communicate(timeout=30)
    assert (line, process.returncode) == ("", 1)
    assert errors.startswith("transferqueue: 'many' is no size")
