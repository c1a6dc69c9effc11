"""A frame as people see it on a terminal: a table that is drawn anew in place. Needs rich."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dcs.introspection.frames import Frame
from dcs.introspection.rows import COLUMNS, LEFT, LEFT_OUT, Cell, header, of_departed, of_run, of_subscribers

_STYLES = {"": "", "bold": "bold", "warning": "bold yellow", "bad": "bold red"}


@contextmanager
def on_screen(out: TextIO) -> Iterator[Callable[[Frame], None]]:
    """Gives what shows a frame in place of the last one, on a terminal."""
    console = Console(file=out)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(render(frame, console), refresh=True)


def render(frame: Frame, console: Console) -> RenderableType:
    """The whole view; leaves out columns that the console has no room for."""
    topology = frame.reading.topology
    parts: list[RenderableType] = [_one_line(header(frame))]
    if frame.notice is not None:
        parts.append(Text(frame.notice, style="bold yellow"))
    if not topology.runs:
        parts.append(Text("no runs yet", style="dim"))
    for place, run in enumerate(topology.runs):
        parts += ["", _one_line(of_run(run, topology))]
        rows = list(of_subscribers(run, topology))
        if rows:
            parts.append(_fitting(rows, console))
        parts += [_text(line) for line in of_departed(frame, place)]
    return Group(*parts)


def _fitting(rows: Sequence[dict[str, Cell]], console: Console) -> Table:
    columns = list(COLUMNS)
    for dispensable in LEFT_OUT:
        unbounded = console.options.update(width=10_000)
        if Measurement.get(console, unbounded, _table(rows, columns)).maximum <= console.width:
            break
        columns.remove(dispensable)
    return _table(rows, columns)


def _table(rows: Sequence[dict[str, Cell]], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        if name in LEFT:
            table.add_column(name, overflow="fold")  # where there is too little room, names give way
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(row[name]) for name in columns))
    return table


def _one_line(cells: Sequence[Cell]) -> Text:
    return Text(" ").join(map(_text, cells))


def _text(cell: Cell) -> Text:
    return Text(cell.text, style=_STYLES[cell.tone])
