"""A frame as plain text, for pipes, files and `--once`; needs no extra."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from dcs.introspection.frames import Frame
from dcs.introspection.rows import COLUMNS, LEFT, Cell, header, of_departed, of_run, of_subscribers


@contextmanager
def one_below_another(out: TextIO) -> Iterator[Callable[[Frame], None]]:
    """Gives what writes a frame after the last one."""

    def show(frame: Frame) -> None:
        out.write(text(frame))
        out.flush()

    yield show


def text(frame: Frame) -> str:
    """The whole view, with an empty line at its end."""
    return "\n".join([*_lines(frame), "", ""])


def _lines(frame: Frame) -> Iterator[str]:
    topology = frame.reading.topology
    yield _one_line(header(frame))
    if frame.notice is not None:
        yield frame.notice
    if not topology.runs:
        yield "no runs yet"
    for place, run in enumerate(topology.runs):
        yield ""
        yield _one_line(of_run(run, topology))
        rows = list(of_subscribers(run, topology))
        if rows:
            yield from _aligned([COLUMNS, *([row[name].text for name in COLUMNS] for row in rows)])
        for line in of_departed(frame, place):
            yield f"  {line.text}"


def _one_line(cells: list[Cell]) -> str:
    return " ".join(cell.text for cell in cells)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        cells = (
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        )
        yield f"  {'  '.join(cells)}".rstrip()
