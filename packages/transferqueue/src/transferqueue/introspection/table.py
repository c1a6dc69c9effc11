"""``transferqueue top`` as people see it: a frame as a rich table."""

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .frames import Frame
from .rates import PartitionRates, Rates, TaskRates
from .statistics import PartitionStats, StoreStats, TaskStats

_COLUMNS = (
    "partition", "samples", "payload", "put/s", "MB/s",
    "task", "unready", "ready", "leased", "taken/s", "acked/s", "lag", "leases", "lapsed",
)  # fmt: skip
_LEFT_OUT = ("leases", "payload", "taken/s", "MB/s", "unready")  # in this order, where there is no room
_BAR_WIDTH = 30
_FILE_WIDTH = 160  # columns, of output that goes to no terminal


@contextmanager
def on_screen(out: TextIO) -> Iterator[Callable[[Frame], None]]:
    """Gives what shows a frame in place of the last one, on a terminal."""
    console = Console(file=out)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(render(frame, console), refresh=True)


@contextmanager
def one_below_another(out: TextIO) -> Iterator[Callable[[Frame], None]]:
    """Gives what writes a frame after the last one."""
    width = shutil.get_terminal_size((_FILE_WIDTH, 25)).columns

    def show(frame: Frame) -> None:
        text = io.StringIO()
        console = Console(file=text, force_terminal=out.isatty(), width=width)
        console.print(render(frame, console))
        out.write(text.getvalue())
        out.flush()

    yield show


def render(frame: Frame, console: Console) -> RenderableType:
    """The whole view; leaves out columns that the console has no room for."""
    stats = frame.reading.stats
    parts: list[RenderableType] = [_header(frame.address, stats, frame.rates)]
    if frame.notice is not None:
        parts.append(Text(printable(frame.notice), style="bold yellow"))
    if not stats.partitions:
        return Group(*parts, Text("no partitions yet", style="dim"))
    columns: list[str] = list(_COLUMNS)
    for dispensable in _LEFT_OUT:
        if _width(_partitions(stats, frame.rates, columns), console) <= console.width:
            break
        columns.remove(dispensable)
    return Group(*parts, "", _partitions(stats, frame.rates, columns))


def _width(table: Table, console: Console) -> int:
    unbounded = console.options.update(width=10_000)
    return Measurement.get(console, unbounded, table).maximum


def _header(address: str, stats: StoreStats, rates: Rates | None) -> RenderableType:
    alive = sum(unit.alive for unit in stats.units)
    lines = Table.grid()
    lines.add_row(
        Text.assemble(
            ("transferqueue", "bold"),
            f" at {printable(address)}   up {duration(stats.uptime)}   ",
            (f"{alive} of {len(stats.units)} units alive", "" if alive == len(stats.units) else "bold red"),
            f"   {stats.clients} clients   ",
            (f"{stats.waiting_puts} puts wait", "bold yellow" if stats.waiting_puts else ""),
            f"   {stats.waiting_fetches} fetches wait",
        )
    )
    lines.add_row(_payload(stats.nbytes, stats.max_bytes))
    memory = stats.memory
    text = (
        f"memory   {size(memory.capacity)}: {size(memory.used)} used, {size(memory.granted)} granted, "
        f"{size(memory.pinned_only)} only pinned"
    )
    if rates is not None:
        sent, received = rates.network_read_bytes / 1e6, rates.network_written_bytes / 1e6
        text += f"   network {sent:,.1f} MB/s out, {received:,.1f} MB/s in"
    lines.add_row(Text(text))
    return lines


def _payload(nbytes: int, most: int | None) -> RenderableType:
    if most is None:
        return Text(f"payload  {size(nbytes)}")
    style = "red" if nbytes >= 0.9 * most else "green"
    bar = ProgressBar(total=most, completed=nbytes, width=_BAR_WIDTH, complete_style=style)
    line = Table.grid()
    line.add_row(Text(f"payload  {size(nbytes)} of {size(most)} "), bar, Text(f" {nbytes / most:.0%}"))
    return line


def _partitions(stats: StoreStats, rates: Rates | None, columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        if name in ("partition", "task"):
            table.add_column(name, overflow="fold")  # where there is too little room, names give way
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for name, partition in sorted(stats.partitions.items()):
        change = None if rates is None else rates.partitions[name]
        begin = _of_partition(name, partition, change)
        if not partition.tasks:
            table.add_row(*(begin.get(column, "") for column in columns))
        for task_name, task in partition.tasks.items():
            moved = None if change is None else change.tasks[task_name]
            cells = begin | _of_task(task_name, task, moved)
            table.add_row(*(cells.get(column, "") for column in columns))
            begin: dict[str, Text | str] = {}  # said once a partition
    return table


def _of_partition(
    name: str, partition: PartitionStats, change: PartitionRates | None
) -> dict[str, Text | str]:
    most = "" if partition.max_samples is None else f"/{partition.max_samples:,}"
    limit = "" if partition.max_bytes is None else f"/{size(partition.max_bytes)}"
    return {
        "partition": Text(printable(name) + (" (closed)" if partition.closed else "")),
        "samples": f"{partition.samples:,}{most}",
        "payload": f"{size(partition.nbytes)}{limit}",
        "put/s": "-" if change is None else f"{change.put_samples:,.1f}",
        "MB/s": "-" if change is None else f"{change.put_bytes / 1e6:,.1f}",
    }


def _of_task(name: str, task: TaskStats, moved: TaskRates | None) -> dict[str, Text | str]:
    return {
        "task": Text(printable(name)),
        "unready": f"{task.unready:,}",
        "ready": f"{task.ready:,}",
        "leased": f"{task.leased:,}",
        "taken/s": "-" if moved is None else f"{moved.delivered:,.1f}",
        "acked/s": "-" if moved is None else f"{moved.acked:,.1f}",
        "lag": duration(task.lag) if task.lag else "-",
        "leases": f"{task.leases:,}",
        "lapsed": Text(f"{task.lapsed_total:,}", style="bold red" if moved and moved.lapsed else ""),
    }


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
