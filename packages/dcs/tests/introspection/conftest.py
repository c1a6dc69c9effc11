"""A coordinator's picture with everything in it, and an HTTP server that shows it."""

import http.client
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from dcs.control.messages import Endpoint
from dcs.control.views import (
    Counters,
    DeliveryView,
    DepartedView,
    RankView,
    RunView,
    SourceView,
    SubscriberView,
    Topology,
    VersionView,
)
from dcs.introspection import IntrospectionServer

NOW = 1_800_000_000.0


class Shown:
    """Stands for a coordinator: what it shows and says can be set."""

    def __init__(self, topology: Topology) -> None:
        self.topology: Topology | Exception = topology
        self.alive = True
        self.snapshots = 0

    def snapshot(self) -> Topology:
        self.snapshots += 1
        if isinstance(self.topology, Exception):
            raise self.topology
        return self.topology


def version(number: int, names: tuple[str, ...], nbytes: int = 3 << 30) -> VersionView:
    deliveries = tuple(
        DeliveryView(name, 10 + place, 2.5 + place, 2.75 + place, 1.5 + place, 0.002)
        for place, name in enumerate(names)
    )
    return VersionView(3, number, ("aa", "bb"), nbytes, 0.25, NOW - 60, NOW - 59.5, deliveries)


@pytest.fixture
def topology() -> Topology:
    """Two runs. In "policy" engine-0 is up to date, engine-1 is slow and lags, and one has been evicted."""
    endpoint = Endpoint("10.0.0.1", 7000, "host-a", "")
    versions = (
        *(version(number, ("engine-0", "engine-1")) for number in range(1, 8)),
        version(8, ("engine-0",)),
        VersionView(3, 9, ("cc", ""), 2 << 30, 0.5, NOW - 1, None, ()),
    )
    ranks = (
        RankView(0, "rank-0", 1, "alive", endpoint, "l", 2 << 30, 9, 0.5),
        RankView(1, "rank-1", 2, "alive", endpoint, "l", 1 << 30, 8, 0.75),
    )
    to_ranks = (SourceView(10, -1, "engine-0", True), SourceView(1, 0, "rank-0", True))
    subscribers = (
        SubscriberView("engine-0", 10, "east", "host-b", "g", "l", endpoint, to_ranks[1:], 8, 8, 0, 0.25,
                       "tcp+delta", 5 << 30, 0, False, 3 << 30),
        SubscriberView("engine-1", 11, "west", "host-c", "g", "l", None, to_ranks, 8, 7, 1, 4.5,
                       "shm", 0, 7 << 20, True, 1 << 30),
    )  # fmt: skip
    departed = (
        DepartedView(8, "subscriber", "ancient", "left", NOW - 4000),
        DepartedView(9, "subscriber", "engine-7", "engine-7 was evicted: no heartbeat for 5.0 s", NOW - 12),
    )
    policy = RunView("policy", 3, "s", 2, "alive", 8, ranks, subscribers, versions, departed)
    critic = RunView("critic", 1, "", 1, "lost", -1, (), (), (), ())
    return Topology(NOW, 3725.0, 5.0, Counters(20, 4, 6, 3, 19, 9), (critic, policy))


@pytest.fixture
def shown(topology: Topology) -> Shown:
    return Shown(topology)


@pytest.fixture
def serve(shown: Shown, stack: ExitStack) -> Callable[..., IntrospectionServer]:
    """`serve(**options)` is a server that shows `shown`."""

    def make(**options) -> IntrospectionServer:
        return stack.enter_context(IntrospectionServer(shown, **options))

    return make


@pytest.fixture
def server(serve: Callable[..., IntrospectionServer]) -> IntrospectionServer:
    return serve()


@pytest.fixture
def get() -> Callable[..., tuple[int, bytes, http.client.HTTPMessage]]:
    """`get(server, path, method, **headers)` is status, body and headers of the answer."""

    def ask(
        server: IntrospectionServer, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(), response.msg
        finally:
            connection.close()

    return ask


@pytest.fixture
def scraped() -> Callable[[str], dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """`scraped(url)` is every sample of `/metrics`, by name (without ``dcs_``) and labels."""
    parser = pytest.importorskip("prometheus_client.parser")

    def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as response:
            text = response.read().decode()
        return {
            (sample.name.removeprefix("dcs_"), frozenset(sample.labels.items())): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }

    return scrape


@pytest.fixture
def changed() -> Callable[..., Any]:
    """`changed(struct, **fields)` is a copy with other fields."""
    return msgspec.structs.replace
