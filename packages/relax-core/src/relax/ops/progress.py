"""What a person sees while a run works: a live table on a terminal, one line a step elsewhere."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from relax.ops.arrivals import wires
from relax.ops.quantities import short_time, size

PHASES = ("wait", "train", "optim", "publish")
_BARS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    """Shows a run."""

    def phase(self, text: str) -> None:
        """What is being done before the first step, or after the last."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rollout(self, data: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def close(self) -> None: ...


def display(kind: str, title: str, steps: int, first_step: int, console: Console | None = None) -> Display:
    """The display of a kind: `auto` is `rich` on a terminal and `plain` elsewhere; `none` shows nothing."""
    console = console or Console()
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "rich":
        return RichDisplay(console, title, steps, first_step)
    return PlainDisplay(console, steps, quiet=kind == "none")


class PlainDisplay:
    """One line a step."""

    def __init__(self, console: Console, steps: int, quiet: bool = False) -> None:
        self._console = console
        self._steps = steps
        self._quiet = quiet

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def phase(self, text: str) -> None:
        self._line(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._line(
            f"step {step + 1:>{len(str(self._steps))}}/{self._steps}  reward {metrics['reward/mean']:.3f}  "
            f"loss {metrics['loss']:+.4f}  staleness {metrics['staleness/mean']:.2f}  "
            f"{metrics['perf/tokens_per_second']:,.0f} tok/s  queue {metrics['queue/depth']:.0f} "
            f"({size(metrics['queue/payload'])})  weights {travelled(metrics)}  "
            f"{metrics['time/step']:.2f} s"
        )

    def rollout(self, data: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        pass


class RichDisplay:
    """A live panel: progress, the newest step, the course of the reward, and where the time went."""

    def __init__(self, console: Console, title: str, steps: int, first_step: int) -> None:
        self._title = title
        self._phase = "starting"
        self._metrics: Mapping[str, float] = {}
        self._rollout: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("optimizer steps", total=steps, completed=first_step)
        self._live = Live(self._render(), console=console, refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def phase(self, text: str) -> None:
        self._phase = text

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._phase = "training"
        self._metrics = metrics
        self._rewards.append(metrics["reward/mean"])
        for phase in PHASES:
            self._spent[phase] += metrics[f"time/{phase}"]
        self._progress.update(self._task, completed=step + 1)

    def rollout(self, data: Mapping[str, float]) -> None:
        self._rollout = data

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.update(self._render(), refresh=True)
        self._live.stop()

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self._metrics:
            parts.append(self._numbers())
            parts.append(f"reward  [green]{sparkline(self._rewards, 60)}[/green]")
            parts.append(f"time    {shares(self._spent)}")
            parts.append(
                f"weights {travelled(self._metrics)}, commit pauses decoding for "
                f"{short_time(self._metrics['weights/pause'])}"
            )
        else:
            parts.append(f"[dim]{self._phase} ({time.monotonic() - self._started:.0f} s)[/dim]")
        return Panel(Group(*parts), title=f"relax · {self._title}", border_style="cyan")

    def _numbers(self) -> Table:
        shown = self._metrics
        table = Table.grid(expand=True, padding=(0, 2))
        cells = [
            ("reward", f"{shown['reward/mean']:.3f}"),
            ("loss", f"{shown['loss']:+.4f}"),
            ("staleness", f"{shown['staleness/mean']:.2f} (max {shown['staleness/max']:.0f})"),
            ("throughput", f"{shown['perf/tokens_per_second']:,.0f} tok/s"),
            ("queue depth", f"{shown['queue/depth']:.0f} samples{waited(shown['queue/waited'])}"),
            ("generated", f"{self._rollout.get('generated_tokens', 0):,.0f} tok"),
            ("response", f"{shown['response/tokens_mean']:.1f} tok"),
            ("step", f"{shown['time/step']:.2f} s"),
        ]
        for _ in range(4):
            table.add_column()
        for row in (cells[:4], cells[4:]):
            table.add_row(*(f"[dim]{name}[/dim] [bold]{value}[/bold]" for name, value in row))
        return table


def waited(seconds: float) -> str:
    """What is said of the time that groups waited for room: nothing where they did not."""
    return f" (full: waited {seconds:.1f} s)" if seconds else ""


def travelled(metrics: Mapping[str, float]) -> str:
    """`shm 1.2 ms`: how the version that a step began with came to the engines, and what that took."""
    return f"{' and '.join(wires(metrics)) or 'to none'} {short_time(metrics['weights/transfer'])}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a number in block characters, its newest `width` points at most."""
    shown = values if len(values) <= width else [values[int(i * len(values) / width)] for i in range(width)]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in shown)


def shares(spent: Mapping[str, float]) -> str:
    """`wait 12% · train 70% · ...` of the time accounted for."""
    total = sum(spent.values()) or 1.0
    return " · ".join(f"{phase} {100 * seconds / total:.0f}%" for phase, seconds in spent.items())
