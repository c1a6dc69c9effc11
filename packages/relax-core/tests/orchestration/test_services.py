"""The services of a run and how they fare."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from relax.config import ConfigError
from relax.orchestration.services import services
from relax.orchestration.weights_trial import explain

Config = Callable[..., Any]


def coordinator(but: int = 0) -> psutil.Process:
    """The weight coordinator that this process has started, another one than `but`."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            try:
                if {"dcs.cli", "serve"} <= set(child.cmdline()) and child.pid != but:
                    return child
            except psutil.Error:
                continue  # it has just ended
        time.sleep(0.02)
    raise AssertionError("there is no coordinator")


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def test_a_coordinator_that_dies_is_started_again_and_that_is_told_once(config: Config) -> None:
    with services(config()) as started:
        assert started.failure is None
        assert started.coordinator.restarts() == 0
        os.kill(coordinator().pid, signal.SIGKILL)
        told = 0

        def restarted() -> bool:
            nonlocal told
            told += started.coordinator.restarts()
            return told > 0

        until(restarted)
        assert (told, started.coordinator.restarts(), started.failure) == (1, 0, None)
        assert explain(config(), started.weights).startswith("shm ")  # at the same address as before


@pytest.mark.slow
def test_a_coordinator_that_dies_again_and_again_ends_the_run_by_name(config: Config) -> None:
    with services(config()) as started:
        last = 0
        for _ in range(6):
            process = coordinator(but=last)
            last = process.pid
            process.kill()
        until(lambda: started.failure)
        assert "the weight coordinator failed: the coordinator at tcp://127.0.0.1:" in str(started.failure)
        assert "status -9" in str(started.failure)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "shm (weights.wires = shm, tcp); whole versions here, differences between machines"),
        (("weights.wires=[shm]",), "shm (weights.wires = shm); whole versions"),
        (("weights.wires=[tcp]", "weights.streams=3"), "tcp (weights.wires = tcp); whole versions here"),
        (("weights.wires=[tcp]", "weights.delta=false"), "tcp (weights.wires = tcp); whole versions; 4 TCP"),
        (("weights.wires=[tcp]", "weights.delta=true"), "tcp+delta (weights.wires = tcp); only what changed"),
        (
            ("weights.delta=true",),
            "shm (weights.wires = shm, tcp); weights.delta = true has no effect on this machine",
        ),
    ],
)
def test_doctor_finds_the_wire_by_using_it(
    config: Config, weights: Any, words: tuple[str, ...], expected: str
) -> None:
    assert explain(config(*words), weights).startswith(expected)


def test_doctor_names_what_keeps_versions_from_travelling(config: Config, weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights\.wires = .*a version could not be sent: .*token"):
        explain(config(), type(weights)(weights.address, "another token"))


@pytest.fixture(scope="module")
def weights() -> Any:
    import dcs
    from relax.distributed.bus import Endpoint

    with dcs.serve(token="t") as process:
        yield Endpoint(process.address, "t")
