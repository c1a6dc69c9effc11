"""`spmd-multinode.sh` on two nodes, which are this machine twice: together, one missing, unlike, killed."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from relax.distributed.weights import own_address

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


class Node:
    """A launcher, with all that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self._family: dict[int, psutil.Process] = {}

    def said(self) -> str:
        return self.log.read_text()

    def family(self) -> list[psutil.Process]:
        """Every process below it that was seen."""
        try:
            seen = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            seen = []
        self._family |= {one.pid: one for one in seen}
        return list(self._family.values())

    def gone(self, seconds: float = 150.0) -> bool:
        """Two agents of Ray look for it for a minute."""
        _, alive = psutil.wait_procs(self.family(), timeout=seconds)
        return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """start(1, "steps=3", NNODES="2"): the launcher of a node; nothing of the run is on loopback."""
    here = own_address("tcp://198.51.100.1:9")  # no such host: only the way to it is looked at
    with socket.socket() as probe:
        probe.bind((here, 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "NNODES": "2",
        "MASTER_ADDR": here,
        "MASTER_PORT": str(port),
        "JOIN_SECONDS": "120",
        "RELAX": str(TOOLS / "relax"),
        "RAY": str(TOOLS / "ray"),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started: list[Node] = []

    def run(rank: int, *words: str, **more: str) -> Node:
        log = tmp_path / f"node-{len(started)}.log"
        command = [
            ROOT / "scripts/entrypoint/spmd-multinode.sh",
            ROOT / "configs/quickstart.yaml",
            f"data.path={ROOT / 'configs/data/sevens.jsonl'}",
            "log.progress=plain",
            f"run.root={tmp_path / 'runs'}",
            *words,
        ]
        process = subprocess.Popen(
            command,
            env=environment | {"NODE_RANK": str(rank)} | more,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(Node(process, log))
        return started[-1]

    yield run
    for node in started:
        left = node.family()
        node.process.terminate()
        psutil.wait_procs(left, timeout=20)
        for process in left:
            if process.is_running():
                process.kill()
        node.process.wait(30)


def steps_done(root: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in root.glob("runs/*/metrics.jsonl"))


def test_two_nodes_become_a_cluster_that_trains_and_ends_with_the_run(start):
    nodes = [start(rank, "steps=3") for rank in (0, 1)]
    statuses = [node.process.wait(timeout=400) for node in nodes]
    told = [node.said() for node in nodes]
    assert statuses == [0, 0], told
    assert "192 samples put = 192 trained + 0 dropped (exact)" in told[0]
    assert "rank 0 has ended, and node 1 with it" in told[1]


def test_a_node_that_never_comes_is_named(start):
    first = start(0, "ray.start_seconds=12", NNODES="3")
    second = start(2, "ray.start_seconds=12", NNODES="3")
    assert first.process.wait(timeout=200) == 2, first.said()
    assert (
        "within 12 s (ray.start_seconds) 2 of 3 nodes (ray.nodes) had joined: no node of rank 1"
        in first.said()
    )
    assert "Traceback" not in first.said()
    assert second.process.wait(timeout=60) == 0, second.said()


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        ((0, 1, 1), ((), (), ()), "NODE_RANK = 1: two nodes have it, "),
        (
            (0, 1),
            ((), ("actor.lr=1e-4",)),
            "has another configuration or other words after it than that of rank 0",
        ),
    ],
)
def test_nodes_that_cannot_be_meant_end_the_run_before_it_begins(start, ranks, words, message):
    count = {"NNODES": str(max(2, len(ranks)))}
    nodes = []
    for rank, own in zip(ranks, words, strict=True):
        nodes.append(start(rank, *own, **count))
        # Two that start at once on one machine may take each other's ports.
        until(lambda: "Ray runtime started" in nodes[-1].said())
    assert nodes[0].process.wait(timeout=200) == 2, nodes[0].said()
    assert message in nodes[0].said()
    for node in nodes[1:]:
        assert node.process.wait(timeout=60) == 0, node.said()


def test_a_second_node_of_rank_0_is_refused_and_the_first_goes_on(start, tmp_path):
    nodes = [start(rank, "steps=4") for rank in (0, 1)]
    until(lambda: steps_done(tmp_path), 240)
    twin = start(0, "steps=4")
    assert twin.process.wait(timeout=60) == 69
    assert "is another node's NODE_RANK 0 too?" in twin.said()
    assert [node.process.wait(timeout=200) for node in nodes] == [0, 0]


def test_a_stop_of_rank_0_ends_the_run_tidily_on_all_nodes(start, tmp_path):
    nodes = [start(rank, "steps=100000") for rank in (0, 1)]
    until(lambda: steps_done(tmp_path) >= 2, 240)
    families = [node.family() for node in nodes]
    assert all(families)
    nodes[0].process.terminate()
    assert nodes[0].process.wait(timeout=120) == 0, nodes[0].said()
    assert "stopped; go on with: relax train --resume" in nodes[0].said()
    assert nodes[1].process.wait(timeout=60) == 0, nodes[1].said()
    assert all(node.gone() for node in nodes)


@pytest.mark.parametrize("early", [True, False], ids=["while it starts", "while it trains"])
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_left_when_the_launcher_of_a_node_is_killed(start, tmp_path, rank, early):
    nodes = [start(number, "steps=100000", "rollout.engine_restarts=0") for number in (0, 1)]
    if early:
        until(lambda: len(nodes[rank].family()) > 2)
    else:
        until(lambda: steps_done(tmp_path) >= 2, 240)
    families = [node.family() for node in nodes]
    assert all(families)
    nodes[rank].process.send_signal(signal.SIGKILL)
    # A driver whose Ray is gone is ended by Ray, which looks for that for a minute.
    assert nodes[rank].gone(150), [one for one in families[rank] if one.is_running()]
    if rank == 0:
        assert nodes[1].process.wait(timeout=150) in (0, 69), nodes[1].said()
    else:
        # What was not on that node may go on without it: the run is ended, or ends by itself and says why.
        time.sleep(1)
        nodes[0].process.terminate()
        nodes[0].process.wait(timeout=150)
        assert "Traceback (most recent call last):" not in nodes[0].said().partition("failed:")[0]
    assert all(node.gone() for node in nodes)
