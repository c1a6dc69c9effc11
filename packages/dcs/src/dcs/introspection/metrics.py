"""A coordinator's topology as Prometheus' metrics. Needs prometheus-client."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dcs.control.views import DeliveryView, RunView, SubscriberView, Topology, VersionView


def exposition(topology: Topology, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that the "Accept" header asks for, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Collector(topology))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class _Collector(Collector):
    """Every metric begins with ``dcs_``; ``run``, ``rank``, ``subscriber`` and ``source`` are the labels."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def describe(self) -> Iterable[Metric]:
        """Names nothing beforehand."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from _coordinator(self._topology)
        yield from _runs(self._topology.runs)
        yield from _versions(self._topology.runs)
        yield from _ranks(self._topology.runs)
        yield from _subscribers(self._topology.runs)
        yield from _deliveries(self._topology.runs)


def _gauge(
    name: str, text: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dcs_{name}", text, value=value, labels=labels or None)


def _total(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"dcs_{name}", text, value=value)


def _coordinator(topology: Topology) -> Iterator[Metric]:
    counters = topology.counters
    yield _gauge("uptime_seconds", "Time since the coordinator started.", topology.uptime_seconds)
    yield _gauge("lease_seconds", "Time without a heartbeat after which members go.", topology.lease_seconds)
    yield _gauge("runs", "Runs known.", len(topology.runs))
    yield _total("joins", "Members let in, those that joined again included.", counters.joins)
    yield _total("evictions", "Members fenced as they were silent or too slow.", counters.evictions)
    yield _total("fences", "Members fenced for any reason.", counters.fences)
    yield _total("refusals", "Requests answered with an error.", counters.refusals)
    yield _total("announcements", "Parts of versions (one a rank) accepted.", counters.announcements)
    yield _total("completions", "Versions that all their ranks have announced.", counters.completions)


def _runs(runs: tuple[RunView, ...]) -> Iterator[Metric]:
    labels = ("run",)
    epoch = _gauge("epoch", "Epoch of the run.", labels=labels)
    version = _gauge("version", "Newest complete version; -1 before the first.", labels=labels)
    up = _gauge("publisher_up", "Whether all ranks of the publisher are alive.", labels=labels)
    world = _gauge("world_size", "Ranks that the publisher has.", labels=labels)
    alive = _gauge("ranks_alive", "Ranks of the publisher that are alive.", labels=labels)
    subscribers = _gauge("subscribers", "Subscribers that are alive.", labels=labels)
    for run in runs:
        of = (run.name,)
        epoch.add_metric(of, run.epoch)
        version.add_metric(of, run.version)
        up.add_metric(of, float(run.publisher == "alive"))
        world.add_metric(of, run.world_size)
        alive.add_metric(of, sum(rank.state == "alive" for rank in run.ranks))
        subscribers.add_metric(of, len(run.subscribers))
    yield from (epoch, version, up, world, alive, subscribers)


def _versions(runs: tuple[RunView, ...]) -> Iterator[Metric]:
    """Of the newest complete version of each run."""
    labels = ("run",)
    nbytes = _gauge("version_bytes", "Size of the newest complete version, all ranks.", labels=labels)
    freeze = _gauge("version_freeze_seconds", "Time its slowest rank took to freeze it.", labels=labels)
    spread = _gauge(
        "version_announce_seconds", "Time between its first rank's announcement and its last.", labels=labels
    )
    at = _gauge("version_complete_timestamp_seconds", "When it was complete, Unix time.", labels=labels)
    staged = _gauge("version_staged_subscribers", "Subscribers that have it whole.", labels=labels)
    acked = _gauge("version_acked_subscribers", "Subscribers that have committed it.", labels=labels)
    for run in runs:
        newest = _newest(run)
        if newest is None or newest.complete_at is None:
            continue
        of = (run.name,)
        nbytes.add_metric(of, newest.nbytes)
        freeze.add_metric(of, newest.freeze_seconds)
        spread.add_metric(of, max(0.0, newest.complete_at - newest.announced_at))
        at.add_metric(of, newest.complete_at)
        staged.add_metric(of, sum(one.staged >= newest.version for one in run.subscribers))
        acked.add_metric(of, sum(one.acked >= newest.version for one in run.subscribers))
    yield from (nbytes, freeze, spread, at, staged, acked)


def _newest(run: RunView) -> VersionView | None:
    return next((one for one in reversed(run.versions) if one.complete_at is not None), None)


def _ranks(runs: tuple[RunView, ...]) -> Iterator[Metric]:
    labels = ("run", "rank")
    up = _gauge("rank_up", "Whether the rank is alive.", labels=labels)
    nbytes = _gauge("rank_bytes", "Size of the rank's tensors.", labels=labels)
    announced = _gauge("rank_announced_version", "Newest version it has frozen; -1: none.", labels=labels)
    heard = _gauge("rank_heard_seconds", "Time since its last message.", labels=labels)
    for run in runs:
        for rank in run.ranks:
            of = (run.name, str(rank.rank))
            up.add_metric(of, float(rank.state == "alive"))
            nbytes.add_metric(of, rank.nbytes)
            announced.add_metric(of, rank.announced)
            if rank.heard_seconds is not None:
                heard.add_metric(of, rank.heard_seconds)
    yield from (up, nbytes, announced, heard)


def _subscribers(runs: tuple[RunView, ...]) -> Iterator[Metric]:
    labels = ("run", "subscriber")
    info = InfoMetricFamily("dcs_subscriber", "Where the subscriber is, and its wire.", labels=labels)
    staged = _gauge("staged_version", "Newest version it has whole; -1: none.", labels=labels)
    acked = _gauge("acked_version", "Newest version it has committed; -1: none.", labels=labels)
    nbytes = _gauge("subscriber_bytes", "Size of its tensors.", labels=labels)
    lag = _gauge("lag_versions", "Complete versions newer than the one it has committed.", labels=labels)
    heard = _gauge("heard_seconds", "Time since its last message.", labels=labels)
    slow = _gauge("slow", "Whether somebody who pulls from it reported it as slow.", labels=labels)
    received = CounterMetricFamily(
        "dcs_received_bytes", "Bytes it has received since it joined.", labels=(*labels, "source")
    )
    for run, one in _each_subscriber(runs):
        of = (run.name, one.name)
        where = {"site": one.site, "machine": one.machine, "group": one.group, "wire": one.wire}
        info.add_metric(of, where)
        staged.add_metric(of, one.staged)
        acked.add_metric(of, one.acked)
        nbytes.add_metric(of, one.nbytes)
        lag.add_metric(of, one.lag)
        heard.add_metric(of, one.heard_seconds)
        slow.add_metric(of, float(one.slow))
        received.add_metric((*of, "ranks"), one.from_ranks)
        received.add_metric((*of, "peers"), one.from_peers)
    yield from (info, staged, acked, nbytes, lag, heard, slow, received)


def _deliveries(runs: tuple[RunView, ...]) -> Iterator[Metric]:
    """Of the newest version that each live subscriber has committed, or at least has whole."""
    labels = ("run", "subscriber")
    families = {
        name: _gauge(name, text, labels=labels)
        for name, text in (
            ("transfer_seconds", "Time its last version took to transfer."),
            ("pause_seconds", "Time its last version took to commit."),
            ("staged_seconds", "Time from the completion of its last version until it had it whole."),
            ("acked_seconds", "Time from the completion of its last version until it had committed it."),
        )
    }
    for run in runs:
        last: dict[int, DeliveryView] = {}
        for version in run.versions:  # oldest first
            last |= {one.member: one for one in version.deliveries if one.staged_seconds is not None}
        for one in run.subscribers:
            for name, family in families.items():
                value = getattr(last.get(one.member), name, None)
                if value is not None:
                    family.add_metric((run.name, one.name), value)
    yield from families.values()


def _each_subscriber(runs: tuple[RunView, ...]) -> Iterator[tuple[RunView, SubscriberView]]:
    return ((run, one) for run in runs for one in run.subscribers)
