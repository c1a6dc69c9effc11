"""Real parts for the tests: a coordinator with a short lease, and publishers and subscribers that get
closed.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import dcs
import psutil
import pytest
import torch

torch.set_num_threads(1)

LEASE_SECONDS = 1.0


@pytest.fixture
def coordinator() -> Iterator[dcs.Coordinator]:
    with dcs.Coordinator(lease_seconds=LEASE_SECONDS) as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def publish_to(coordinator: dcs.Coordinator, stack: ExitStack) -> Callable[..., dcs.Publisher]:
    """`publish_to(tensors, **options)` is a publisher with the layout of these tensors."""

    def make(tensors: dict[str, torch.Tensor], **options) -> dcs.Publisher:
        options.setdefault("run", "r")
        return stack.enter_context(
            dcs.Publisher(coordinator.address, layout=dcs.layout.of(tensors), **options)
        )

    return make


@pytest.fixture
def subscribe(coordinator: dcs.Coordinator, stack: ExitStack) -> Callable[..., dcs.Subscriber]:
    """`subscribe(tensors, name, **options)` is a subscriber with the layout of these tensors."""

    def make(tensors: dict[str, torch.Tensor], name: str = "engine-0", **options) -> dcs.Subscriber:
        options.setdefault("run", "r")
        return stack.enter_context(
            dcs.Subscriber(coordinator.address, name=name, layout=dcs.layout.of(tensors), **options)
        )

    return make


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Fails when the test leaves a thread or a file descriptor behind."""
    process = psutil.Process()
    gc.collect()
    threads, descriptors = threading.active_count(), process.num_fds()
    yield
    gc.collect()
    assert threading.active_count() == threads, threading.enumerate()
    assert process.num_fds() <= descriptors, sorted(os.listdir("/proc/self/fd"))
