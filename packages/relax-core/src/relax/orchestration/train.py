"""One run from configuration to summary: services, roles, what they report, a tidy end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import transferqueue as tq

from relax.components.context import RunContext
from relax.config import RunConfig, check
from relax.distributed.bus import Endpoint
from relax.engine.checkpoints import Checkpoints, read_source
from relax.ops.arrivals import Arrivals, wires
from relax.ops.engine_losses import EngineLosses
from relax.ops.progress import Display, display
from relax.ops.reports import Report
from relax.ops.sinks import JsonLines, Sink, TensorBoard
from relax.orchestration.accounting import Accounting, settle
from relax.orchestration.gpus import check_gpus
from relax.orchestration.launcher import Launcher, Poll, RoleFailed
from relax.orchestration.misfits import check_misfits
from relax.orchestration.model_folder import model_folder, takes_media
from relax.orchestration.plan import Plan, check_cpus, plan
from relax.orchestration.preflight import check_sizes, preflight
from relax.orchestration.routing_check import replayed_routing
from relax.orchestration.run_folder import RunFolder, begin_segment, hold
from relax.orchestration.services import QueueWatch, Services, services

POLL_SECONDS = 0.25
"""Between two looks at the roles while they start or end."""

FOLLOW_SECONDS = 1.0
"""Between two looks at the roles while they work; a look costs each of them some milliseconds."""

STOP_SECONDS = 60.0
"""Longest tidy end after a stop; then the rest is ended."""


@dataclass
class Outcome:
    """What a run came to."""

    folder: Path
    steps: int
    rewards: list[float]
    seconds: float
    start_seconds: float
    stopped: bool
    accounting: Accounting | None = None
    trained_tokens: float = 0.0
    generated_tokens: float = 0.0
    waited: float = 0.0
    weights: str = ""
    """How the versions came into the engines, in a line."""
    engines: str = ""
    """Which engines were lost and came back, in a line; empty when none was."""

    @property
    def goodput(self) -> float:
        """Trained over generated tokens."""
        return self.trained_tokens / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def summary(self) -> str:
        """`reward FIRST -> LAST in N steps, M s, run at runs/NAME`."""
        where = _shown(self.folder)
        if not self.rewards:
            return f"no step done, {self.seconds:.0f} s, run at {where}"
        return (
            f"reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f} in {self.steps} steps, "
            f"{self.seconds:.0f} s, "
            f"run at {where}"
        )


@dataclass
class _Run:
    """What one start of a run holds on to."""

    folder: RunFolder
    display: Display
    sinks: list[Sink]
    samples: JsonLines
    events: JsonLines
    arrivals: Arrivals
    started: float = field(default_factory=time.monotonic)
    first_step_at: float | None = None
    rewards: list[float] = field(default_factory=list)
    steps: int = 0
    trained_tokens: float = 0.0
    generated_tokens: float = 0.0
    waited: float = 0.0
    told_waited: float = 0.0
    told_full: bool = False
    told_wires: set[str] = field(default_factory=set)
    losses: EngineLosses = field(default_factory=EngineLosses)
    ready: bool = False
    """All roles were there once, or a step was done without those that are late."""

    def take(self, report: Report) -> None:
        match report.kind:
            case "step":
                self.first_step_at = self.first_step_at or time.monotonic()
                self.ready = True  # also where an engine is late: what was trained is worth a tidy end
                step, metrics = report.data["step"], report.data["metrics"]
                metrics["queue/waited"] = self.waited - self.told_waited
                self.told_waited = self.waited
                metrics |= self.arrivals.metrics(step)
                self._note_wires(step, metrics)
                self.rewards.append(metrics["reward/mean"])
                self.steps += 1
                self.trained_tokens += metrics["tokens/trained"]
                for sink in self.sinks:
                    sink.step(step, metrics)
                self.display.step(step, metrics)
            case "rollout":
                self.generated_tokens = report.data["generated_tokens"]
                self.waited = report.data["waited"]
                self.losses.asked_again = report.data["moved"]
                self.display.rollout(report.data)
            case "sample":
                self.samples.write(report.data)
            case "event":
                self.events.write({"time": time.time(), "role": report.role, **report.data})
                self._show(report)

    def _note_wires(self, version: int, metrics: dict[str, float]) -> None:
        for wire in wires(metrics):
            if wire not in self.told_wires:
                self.told_wires.add(wire)
                self.events.write(
                    {
                        "time": time.time(),
                        "role": "weights",
                        "event": "weights travel",
                        "wire": wire,
                        "version": version,
                    }
                )

    def _show(self, report: Report) -> None:
        if (text := self.losses.note(report.data)) is not None:
            self.display.note(text)
            return
        match report.data["event"]:
            case "warm-up":
                self.display.phase(
                    f"supervised warm-up {report.data['step']}/{report.data['of']}, loss "
                    f"{report.data['loss']:.3f}"
                )
            case "step skipped":
                self.display.note(
                    f"step {report.data['step'] + 1} skipped: its gradient is not finite, the weights stay "
                    f"as they were"
                )
            case "group dropped":
                self.display.note(f"group {report.data['ordinal']} dropped: {report.data['reason']}")
            case "waiting for room" if not self.told_full:
                self.told_full = True
                self.display.note(
                    f"the queue is full (queue.max_bytes = {report.data['max_bytes']}): rollout waits until "
                    f"samples are trained"
                )
            case "queue started" if not report.data["transport"].startswith("shm"):
                self.display.note(f"samples travel by {report.data['transport']}")
            case "storage unit restarted":
                self.display.note(
                    f"storage unit {report.data['unit']} of the queue died and was started again; nothing is "
                    f"lost"
                )
            case "weight coordinator restarted":
                self.display.note("the weight coordinator died and was started again; nothing is lost")

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.samples.close()
        self.events.close()


def prepare(config: RunConfig, folder: RunFolder, *, resume: bool, replay: Path | None = None) -> RunContext:
    """Check everything that can be checked beforehand, and fix what the roles are told.

    Raises:
        ConfigError: the run cannot work.
    """
    check(config)
    check_cpus(plan(config), config)
    check_gpus(plan(config), config)
    model = model_folder(config, folder.model)
    check_sizes(config, model)
    check_misfits(config, model)
    replayed_routing(config, model)
    nowhere = Endpoint("")
    context = RunContext(
        config,
        folder.path,
        model,
        nowhere,
        nowhere,
        replay=replay,
        media=takes_media(model) and not config.model.text_only,
    )
    preflight(config, context)
    newest = Checkpoints(folder.path, config.checkpoint.keep).newest() if resume else None
    if newest is not None:
        context = replace(
            context, first_step=newest.step, checkpoint=newest.folder, source=read_source(newest.folder)
        )
    return context


def train(config: RunConfig, folder: RunFolder, context: RunContext, title: str) -> Outcome:
    """Run to the last step, or to a tidy end on SIGINT, SIGTERM or SIGHUP.

    Raises:
        RoleFailed: a role ended with a fault; everything has been ended.
        ConfigError: a service's port is in use, or the run is still going elsewhere.
        KeyboardInterrupt: interrupted while nothing could be ended tidily yet, or for the second time.
    """
    if context.first_step >= config.steps:
        return Outcome(folder.path, 0, [], 0.0, 0.0, stopped=False)
    with hold(folder), _terminated_as_interrupted():
        return _train(config, folder, context, title)


def _train(config: RunConfig, folder: RunFolder, context: RunContext, title: str) -> Outcome:
    segment = begin_segment(folder, {"first_step": context.first_step})
    resolved = plan(config)
    shown = display(config.log.progress, title, config.steps, context.first_step)
    sinks: list[Sink] = [JsonLines(folder.metrics)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder.tensorboard))
    arrivals = Arrivals(folder.weights)
    run = _Run(folder, shown, sinks, JsonLines(folder.samples), JsonLines(folder.events), arrivals)
    try:
        with services(config) as started:
            run.take(Report("event", "queue", {"event": "queue started", "transport": started.transport}))
            context = replace(context, bus=started.bus, weights=started.weights, segment=segment)
            try:
                with _launcher(resolved, context, run) as launcher:
                    stopped = asyncio.run(_supervise(launcher, resolved, config, run, started))
                if stopped and not run.ready:
                    raise KeyboardInterrupt
            finally:
                accounting = _accounts(started.bus, started.queue, run, segment)
    finally:
        shown.close()
        run.close()
    ended = time.monotonic()
    return Outcome(
        folder.path,
        run.steps,
        run.rewards,
        ended - run.started,
        (run.first_step_at or ended) - run.started,
        stopped,
        accounting,
        run.trained_tokens,
        run.generated_tokens,
        run.waited,
        arrivals.summary,
        run.losses.summary,
    )


def _accounts(bus: Endpoint, queue: QueueWatch, run: _Run, segment: int) -> Accounting | None:
    """The accounts of this start, also written to the run folder; None, and a note, when the queue is
    gone.
    """
    gone = queue.failure
    try:
        accounting = settle(bus, run.folder.journal, segment) if gone is None else None
    except tq.QueueError as error:
        accounting, gone = None, str(error)
    if accounting is None:
        run.display.note(f"the samples of this start could not be accounted for: {gone}")
        return None
    written = JsonLines(run.folder.accounting)
    written.step(run.steps, accounting.as_dict())
    written.close()
    return accounting


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), raise KeyboardInterrupt, as SIGINT does, so that what
    was started is ended.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending() -> list[signal.Signals]:
    """Signals beside SIGINT that end a run: a terminal that is closed sends SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def _launcher(resolved: Plan, context: RunContext, run: _Run) -> Iterator[Launcher]:
    if context.config.launcher == "local":
        from relax.orchestration.local import LocalLauncher

        yield LocalLauncher(resolved, context)
        return
    from relax.orchestration.cluster import cluster

    run.display.phase("starting Ray")
    with cluster(context.config, context.run) as daemons:
        from relax.orchestration.ray_launcher import RayLauncher

        yield RayLauncher(resolved, context, daemons)


async def _supervise(
    launcher: Launcher, resolved: Plan, config: RunConfig, run: _Run, started: Services
) -> bool:
    """Start the roles and follow them to the end; returns whether the run was stopped early."""
    endless = frozenset(w for role in resolved.roles for w in role.workers if w.startswith("engine-"))
    async with _signals(run) as stop:
        try:
            run.display.phase("starting roles")
            starting = asyncio.ensure_future(launcher.start())
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return True
            starting.result()
            return await _follow(launcher, endless, stop, config, run, started)
        finally:
            await launcher.close()


async def _follow(
    launcher: Launcher,
    endless: frozenset[str],
    stop: "asyncio.Future[None]",
    config: RunConfig,
    run: _Run,
    started: Services,
) -> bool:
    deadline = time.monotonic() + config.start_seconds
    ending: float | None = None
    while True:
        polling = asyncio.ensure_future(launcher.poll())
        if not run.ready:  # a look at roles that start may take long
            await asyncio.wait({polling, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not polling.done():
                polling.cancel()
                return True
        poll = await polling
        if stop.done() and not (run.ready or poll.ready):
            return True  # there is nothing yet that could end tidily
        if not run.ready and poll.ready:
            run.ready = True
            run.display.phase("first rollouts")
        for report in poll.reports:
            run.take(report)
        for unit in started.queue.restarted():
            run.take(Report("event", "queue", {"event": "storage unit restarted", "unit": unit}))
        for _ in range(started.coordinator.restarts()):
            run.take(Report("event", "weights", {"event": "weight coordinator restarted"}))
        _raise_failed(poll, run, started.failure)
        if poll.done(endless) or (ending is not None and _actor_done(poll)):
            return ending is not None
        if not run.ready and time.monotonic() > deadline and not run.rewards:
            late = [name for name, status in poll.workers.items() if status.state == "starting"]
            raise RoleFailed(
                f"not ready after {config.start_seconds:g} s ({config.start_key}): {', '.join(late)}"
            )
        if stop.done() and ending is None:
            ending = time.monotonic()
            run.display.note(
                "stopping: giving up the step at hand, writing a checkpoint (again to end at once)"
            )
            await launcher.stop()
        if ending is not None and time.monotonic() - ending > STOP_SECONDS:
            raise RoleFailed(f"the roles did not end within {STOP_SECONDS:g} s of the stop")
        pause = FOLLOW_SECONDS if run.rewards and ending is None else POLL_SECONDS
        if stop.done():
            await asyncio.sleep(pause)
        else:
            await asyncio.wait({stop}, timeout=pause)


def _actor_done(poll: Poll) -> bool:
    return poll.workers["actor"].state == "done"


def _raise_failed(poll: Poll, run: _Run, service_failure: str | None) -> None:
    for status in poll.failed:
        (run.folder.logs / f"{status.worker}.error.txt").write_text(status.error)
    if service_failure is not None:
        raise RoleFailed(service_failure)
    if not poll.failed:
        return
    first = min(poll.failed, key=lambda status: _consequence(status.error))
    others = [status.worker for status in poll.failed if status is not first]
    more = f"\n({', '.join(others)} failed too; see {_shown(run.folder.logs)})" if others else ""
    raise RoleFailed(f"{first.worker} failed:\n{first.error.rstrip()}{more}")


def _consequence(error: str) -> bool:
    """Whether a fault only says that another process went away."""
    return "ActorDiedError" in error or "RayActorError" in error


@contextlib.asynccontextmanager
async def _signals(run: _Run) -> AsyncIterator["asyncio.Future[None]"]:
    """A future that the first SIGINT, SIGTERM or SIGHUP completes; the second one interrupts at once."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ending())}
    stop: asyncio.Future[None] = loop.create_future()
    main = asyncio.current_task()

    def asked() -> None:
        if not stop.done():
            stop.set_result(None)
        elif main is not None:
            main.cancel()

    for number in before:
        loop.add_signal_handler(number, asked)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if not stop.done():
            stop.cancel()


def _shown(path: Path) -> Path:
    """Relative to where the person is, when it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
