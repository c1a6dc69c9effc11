import time
from collections.abc import Callable, Iterator

import pytest
import transferqueue as tq


@pytest.fixture(scope="module")
def store() -> Iterator[tq.Server]:
    """One store with two units for a module; every test uses partitions of its own."""
    with tq.serve(storage_units=2) as server:
        yield server


@pytest.fixture
def queue(store: tq.Server) -> Iterator[tq.Client]:
    with tq.connect(store) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A partition name of the test's own."""
    return request.node.name


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Asks again for up to 20 s until the claim holds: between processes there is no event to wait for."""

    def wait(claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not claim():
            assert time.monotonic() < deadline, "the claim never came true"
            time.sleep(0.01)

    return wait
