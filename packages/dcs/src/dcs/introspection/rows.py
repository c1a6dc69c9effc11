"""A frame in words: what is said of the coordinator, of each run, and of each subscriber, cell by cell."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from dcs.control.views import DeliveryView, RunView, SubscriberView, Topology
from dcs.introspection.frames import Frame

COLUMNS = (
    "subscriber", "staged", "acked", "lag", "wire", "source", "transfer", "pause", "MB/s", "received",
    "heard", "notes",
)  # fmt: skip
LEFT = ("subscriber", "wire", "source", "notes")
"""Columns of text; the others are of numbers."""
LEFT_OUT = ("received", "pause", "MB/s", "source", "staged")
"""In this order, where there is no room."""

_MOST_DEPARTED = 5
_SILENT = 0.5  # of a lease: who was not heard for so long is in doubt


type Tone = Literal["", "bold", "warning", "bad"]
"""What a colour is chosen by."""

_OF_PUBLISHER: dict[str, Tone] = {"alive": "", "absent": "warning", "lost": "bad"}


class Cell(NamedTuple):
    """A piece of text."""

    text: str
    tone: Tone = ""


def header(frame: Frame) -> list[Cell]:
    """Of the coordinator, to be written one after the other."""
    topology, counters = frame.reading.topology, frame.reading.topology.counters
    evictions = Cell(_count(counters.evictions, "eviction"), "warning" if counters.evictions else "")
    return [
        Cell("dcs", "bold"),
        Cell(f"at {printable(frame.url)}   up {duration(topology.uptime_seconds)}"),
        Cell(f"  {_count(len(topology.runs), 'run')}   {_count(counters.completions, 'version')}  "),
        evictions,
        Cell(f"  {_count(counters.refusals, 'refusal')}"),
    ]


def of_run(run: RunView, topology: Topology) -> list[Cell]:
    """Of a run, to be written one after the other."""
    alive = sum(rank.state == "alive" for rank in run.ranks)
    ranks = f"{alive} of {_count(run.world_size, 'rank')}" if run.ranks else "no ranks"
    cells = [
        Cell(printable(run.name), "bold"),
        Cell(f"  epoch {run.epoch}   version {_number(run.version)}  "),
        Cell(f"{ranks}, publisher {run.publisher}", _OF_PUBLISHER[run.publisher]),
        Cell(f"  {_count(len(run.subscribers), 'subscriber')}"),
    ]
    newest = max((one for one in run.versions), key=lambda one: (one.epoch, one.version), default=None)
    complete = next((one for one in reversed(run.versions) if one.complete_at is not None), None)
    if complete is not None and complete.complete_at is not None:
        cells.append(
            Cell(
                f"  {size(complete.nbytes)} frozen in {_seconds(complete.freeze_seconds)},"
                f" {duration(max(0.0, topology.at - complete.complete_at))} ago"
            )
        )
    if newest is not None and newest.complete_at is None:
        there = sum(bool(root) for root in newest.roots)
        cells.append(
            Cell(f"  version {newest.version}: {there} of {len(newest.roots)} ranks announced", "warning")
        )
    return cells


def of_subscribers(run: RunView, topology: Topology) -> Iterator[dict[str, Cell]]:
    """A row for each, by column; whoever lags most comes first."""
    last = {
        delivery.member: delivery  # the newest transfer of each, as the oldest version comes first
        for version in run.versions
        for delivery in version.deliveries
        if delivery.transfer_seconds is not None
    }
    for one in sorted(run.subscribers, key=lambda one: (-one.lag, one.name)):
        delivery = last.get(one.member)
        yield {
            "subscriber": Cell(printable(one.name)),
            "staged": Cell(_number(one.staged)),
            "acked": Cell(_number(one.acked)),
            "lag": Cell(f"{one.lag:,}", "warning" if one.lag > 1 else ""),
            "wire": Cell(printable(one.wire) or "-"),
            "source": Cell(_source(one)),
            "transfer": Cell(_seconds(delivery and delivery.transfer_seconds)),
            "pause": Cell(_seconds(delivery and delivery.pause_seconds)),
            "MB/s": Cell(_rate(one, delivery)),
            "received": Cell(size(one.from_ranks + one.from_peers)),
            "heard": Cell(
                duration(one.heard_seconds),
                "warning" if one.heard_seconds > _SILENT * topology.lease_seconds else "",
            ),
            "notes": Cell("slow", "bad") if one.slow else Cell(""),
        }


def of_departed(frame: Frame, run: int) -> Iterator[Cell]:
    """A line for each member that has gone a short while ago."""
    topology, gone = frame.reading.topology, frame.departed(run)
    for one in gone[:_MOST_DEPARTED]:
        since = duration(max(0.0, topology.at - one.at))
        yield Cell(f"gone {since} ago: {one.role} {printable(one.name)}: {printable(one.reason)}", "warning")
    if len(gone) > _MOST_DEPARTED:
        yield Cell(f"and {len(gone) - _MOST_DEPARTED} more", "warning")


def _source(one: SubscriberView) -> str:
    if not one.sources:
        return "-"
    best = one.sources[0]
    name = f"rank {best.rank}" if best.rank >= 0 else printable(best.name)
    return name if len(one.sources) == 1 else f"{name} +{len(one.sources) - 1}"


def _rate(one: SubscriberView, delivery: DeliveryView | None) -> str:
    """How fast its tensors came, whatever part of them was sent: mapped memory and differences are faster."""
    if delivery is None or not delivery.transfer_seconds:
        return "-"
    return f"{one.nbytes / delivery.transfer_seconds / 1e6:,.0f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _number(version: int) -> str:
    return "-" if version < 0 else str(version)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else duration(value)


def printable(text: str) -> str:
    """`text` with what could move a terminal's cursor or colour it shown as escapes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def size(nbytes: float) -> str:
    """Bytes as people read them: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """A time as people read it: "0.3 s", "4 min 5 s", "2 h 9 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
