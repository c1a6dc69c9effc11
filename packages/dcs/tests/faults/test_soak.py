"""Receivers, publishers and the coordinator are killed and started again, over and over, during publishes."""

import os
import random
import signal
import socket
import time
from pathlib import Path

import dcs
import psutil
import pytest

LEASE_SECONDS = 1.0
ENGINES = {
    "tcp-0": {"wires": ["tcp"]},
    "tcp-1": {"wires": ["tcp"], "delta": True},
    "shm-0": {"wires": ["shm", "tcp"]},
    "shm-1": {"wires": ["shm", "tcp"]},
}


def names_of(pids: set[int]) -> list[str]:
    """The abstract Unix sockets named after these processes; all others are somebody else's business."""
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    return [name for name in names if name.startswith(tuple(f"@dcs-{pid}-" for pid in pids))]


@pytest.mark.parametrize("cycles", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_after_many_kills_everybody_has_the_newest_version_and_nothing_is_left(
    engine, trainer, digest, eventually, cycles
):
    dice = random.Random(cycles)
    began, restarts, killed = time.monotonic(), [], []
    with dcs.serve(lease_seconds=LEASE_SECONDS) as running, socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0dcs-keeper-{os.urandom(8).hex()}")  # whoever else uses dcs on this machine

        def start(name: str):
            if name == "trainer":
                return trainer(running.address, wires=["shm", "tcp"], supersede_after=0.5)
            return engine(running.address, name, **ENGINES[name])

        members = {name: start(name) for name in (*ENGINES, "trainer")}
        members["trainer"].ask("publish", 0)
        first = {}
        for name in ENGINES:
            assert members[name].takes(0)[0] == digest(0)
        for name, member in members.items():
            first[name] = [int(value) for value in member.ask("census")]
        version = 0
        for _ in range(cycles):
            version += 1
            victim = dice.choice([*members, "coordinator"])
            if (
                victim == "coordinator"
                and len([each for each in restarts if each > time.monotonic() - 60]) > 3
            ):
                victim = "tcp-0"  # it is started again five times a minute at most
            members["trainer"].say("publish", version)
            if victim == "coordinator":
                restarts.append(time.monotonic())
                os.kill(running.pid, signal.SIGKILL)
                eventually(lambda: running.restarts == len(restarts), 30)
            else:
                killed.append(members[victim].pid)
                members[victim].kill()
                members[victim] = start(victim)
            if victim != "trainer":
                assert int(members["trainer"].until("published")[0]) == version
        version += 1
        members["trainer"].ask("publish", version)
        for name in ENGINES:
            assert members[name].takes(version)[0] == digest(version), name
        for _ in range(2):  # and all is as after the first one
            version += 1
            members["trainer"].ask("publish", version)
            for name in ENGINES:
                assert members[name].takes(version)[0] == digest(version), name

        def tidy() -> bool:
            last = {name: [int(value) for value in member.ask("census")] for name, member in members.items()}
            return all(
                now[0] <= before[0] + 12
                and now[1] <= before[1] + 8
                and now[2] <= 4
                and now[3] <= before[3] + 3
                for now, before in zip(last.values(), first.values(), strict=True)
            )

        eventually(tidy, 20)
        living = {member.pid for member in members.values()}
        assert names_of(living)  # of those who lend memory: the names are found
        assert not names_of(set(killed) - living)  # a number may be given out again
        for member in members.values():
            open_ports = psutil.Process(member.pid).net_connections("tcp")
            assert sum(each.status == psutil.CONN_LISTEN for each in open_ports) == 1
        seconds = time.monotonic() - began
        print(f"{cycles} kills ({len(restarts)} of the coordinator) in {seconds:.0f} s; censuses {first}")
