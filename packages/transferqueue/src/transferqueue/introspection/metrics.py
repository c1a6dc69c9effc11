"""The statistics of a store as Prometheus' metrics."""

from collections.abc import Callable, Iterable, Iterator
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from .statistics import StoreStats

type Source = Callable[[], StoreStats | None]
"""Reads the statistics; None when the store does not answer."""


class StoreCollector(Collector):
    """Reads the store once a scrape. Register it with a `prometheus_client.CollectorRegistry`.

    Every metric begins with ``transferqueue_``; ``partition``, ``task`` and ``unit`` are the only labels. A
    store that does not answer is ``transferqueue_up 0`` and nothing else.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Names nothing beforehand, so that registering does not read the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._source()
        yield _gauge("up", "Whether the store answered this scrape.", float(stats is not None))
        if stats is not None:
            yield from _store(stats)
            yield from _units(stats)
            yield from _partitions(stats)
            yield from _tasks(stats)


def application(source: Source) -> WSGIApplication:
    """Answers ``/metrics`` with the metrics of a store, in the format that the scraper asks for."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(source))
    metrics = make_wsgi_app(registry)

    def respond(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environment["PATH_INFO"] != "/metrics":
            status, headers = "404 Not Found", []
        elif environment["REQUEST_METHOD"] != "GET":
            status, headers = "405 Method Not Allowed", [("Allow", "GET")]
        else:
            return metrics(environment, start)
        start(status, [*headers, ("Content-Type", "text/plain; charset=utf-8")])
        return [b"only GET /metrics is answered\n"]

    return respond


def _gauge(
    name: str, text: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"transferqueue_{name}", text, value=value, labels=labels or None)


def _counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(f"transferqueue_{name}", text, labels=labels)


def _store(stats: StoreStats) -> Iterator[Metric]:
    yield _gauge("uptime_seconds", "Time since the controller started.", stats.uptime)
    yield _gauge("payload_bytes", "Payload of all samples in the store.", stats.nbytes)
    if stats.max_bytes is not None:
        yield _gauge("max_bytes", "Payload at which puts wait for room.", stats.max_bytes)
    yield _gauge("waiting_puts", "Puts that wait for room.", stats.waiting_puts)
    yield _gauge("waiting_fetches", "Fetches that wait for samples.", stats.waiting_fetches)
    yield _gauge("clients", "Clients connected.", stats.clients)
    memory = stats.memory
    yield _gauge("memory_capacity_bytes", "Size of all arenas.", memory.capacity)
    yield _gauge("memory_granted_bytes", "Memory clients may write into and have not yet.", memory.granted)
    yield _gauge("memory_used_bytes", "Memory that samples or readers hold.", memory.used)
    yield _gauge(
        "memory_pinned_only_bytes",
        "Memory that no sample needs any more and only a reader's view keeps.",
        memory.pinned_only,
    )


def _units(stats: StoreStats) -> Iterator[Metric]:
    labels = ("unit",)
    info = InfoMetricFamily("transferqueue_unit", "Where a storage unit listens.", labels=labels)
    up = _gauge("unit_up", "Whether the storage unit answers the controller.", labels=labels)
    arenas = _gauge(
        "unit_arenas", "Arenas the storage unit serves; units of one host share them.", labels=labels
    )
    capacity = _gauge("unit_capacity_bytes", "Size of the arenas the storage unit serves.", labels=labels)
    used = _gauge("unit_used_bytes", "Memory in use in the arenas the storage unit serves.", labels=labels)
    read = _counter("unit_network_read_bytes", "Payload sent to clients of other hosts.", labels)
    written = _counter("unit_network_written_bytes", "Payload received from clients of other hosts.", labels)
    for unit in stats.units:
        of = (str(unit.unit),)
        info.add_metric(of, {"address": unit.address})
        up.add_metric(of, float(unit.alive))
        arenas.add_metric(of, unit.arenas)
        capacity.add_metric(of, unit.capacity)
        used.add_metric(of, unit.used)
        read.add_metric(of, unit.network_read_bytes_total)
        written.add_metric(of, unit.network_written_bytes_total)
    yield from (info, up, arenas, capacity, used, read, written)


def _partitions(stats: StoreStats) -> Iterator[Metric]:
    labels = ("partition",)
    samples = _gauge("samples", "Samples put and neither acked by every task nor dropped.", labels=labels)
    nbytes = _gauge("partition_payload_bytes", "Payload of the partition's samples.", labels=labels)
    most = _gauge("partition_max_samples", "Samples at which puts wait for room.", labels=labels)
    most_bytes = _gauge("partition_max_bytes", "Payload at which puts wait for room.", labels=labels)
    closed = _gauge("partition_closed", "Whether nothing can be put any more.", labels=labels)
    groups = _gauge("groups", "Groups with members still to come or to be acked.", labels=labels)
    put = _counter("put_samples", "Samples put.", labels)
    put_bytes = _counter("put_bytes", "Payload of puts and updates.", labels)
    updated = _counter("updated_samples", "Samples updated, as often as each was.", labels)
    dropped = _counter("dropped_samples", "Samples dropped.", labels)
    for name, partition in stats.partitions.items():
        of = (name,)
        samples.add_metric(of, partition.samples)
        nbytes.add_metric(of, partition.nbytes)
        if partition.max_samples is not None:
            most.add_metric(of, partition.max_samples)
        if partition.max_bytes is not None:
            most_bytes.add_metric(of, partition.max_bytes)
        closed.add_metric(of, float(partition.closed))
        groups.add_metric(of, partition.groups)
        put.add_metric(of, partition.put_samples_total)
        put_bytes.add_metric(of, partition.put_bytes_total)
        updated.add_metric(of, partition.updated_total)
        dropped.add_metric(of, partition.dropped_total)
    yield from (samples, nbytes, most, most_bytes, closed, groups, put, put_bytes, updated, dropped)


def _tasks(stats: StoreStats) -> Iterator[Metric]:
    labels = ("partition", "task")
    unready = _gauge("unready_samples", "Samples that lack a field the task needs.", labels=labels)
    ready = _gauge("ready_samples", "Samples that a fetch could have now.", labels=labels)
    leased = _gauge("leased_samples", "Samples with a consumer.", labels=labels)
    leases = _gauge("leases", "Batches with consumers.", labels=labels)
    lag = _gauge("lag_seconds", "Age of the oldest sample the task has not acked.", labels=labels)
    delivered = _counter("delivered_samples", "Samples leased, each time.", labels)
    acked = _counter("acked_samples", "Samples completed.", labels)
    nacked = _counter("nacked_samples", "Samples given back, or left by a consumer that went away.", labels)
    lapsed = _counter("lapsed_samples", "Samples that came back as nobody acked them in time.", labels)
    for name, partition in stats.partitions.items():
        for task_name, task in partition.tasks.items():
            of = (name, task_name)
            unready.add_metric(of, task.unready)
            ready.add_metric(of, task.ready)
            leased.add_metric(of, task.leased)
            leases.add_metric(of, task.leases)
            lag.add_metric(of, task.lag)
            delivered.add_metric(of, task.delivered_total)
            acked.add_metric(of, task.acked_total)
            nacked.add_metric(of, task.nacked_total)
            lapsed.add_metric(of, task.lapsed_total)
    yield from (unready, ready, leased, leases, lag, delivered, acked, nacked, lapsed)
