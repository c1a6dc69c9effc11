"""One engine replica, and the task that keeps it at the newest published weights."""

from dataclasses import asdict

import dcs

from relax.backends.inference.base import EngineSpec
from relax.backends.inference.log import EngineLog
from relax.backends.inference.registry import engine_class
from relax.components.context import RunContext
from relax.distributed.adapters import MergingEngine, adapter_layout
from relax.distributed.schedule import Record, read
from relax.distributed.weights import Arrival, Updatable, follow
from relax.engine.pool import PooledEngine


class EngineHost:
    """Owns an engine; `run` follows the weights until cancelled, from version `first` on."""

    def __init__(
        self, context: RunContext, name: str, engine: PooledEngine, log: EngineLog, first: int = 0
    ) -> None:
        self.name = name
        self._first = first
        self.engine = engine
        self._context = context
        self._log = log
        self._record = Record(context.schedule / f"{name}.jsonl")
        self._arrivals = Record(context.folder / "weights.jsonl")

    @classmethod
    async def create(cls, context: RunContext, name: str) -> "EngineHost":
        """Make the engine of a run's replica. Raises what the engine's class raises."""
        config = context.config
        log = EngineLog()
        replay = ()
        if context.replay is not None:
            replay = [event["event"] for event in read(context.replay / f"{name}.jsonl")]
        spec = EngineSpec(
            name=name,
            folder=context.model,
            dtype=config.model.dtype,
            max_running=config.rollout.max_running,
            capacity_tokens=config.model.context_length,
            seed=config.seed,
            log=log,
            replay=replay,
            run_folder=context.folder,
            settings=config.rollout,
            routes=config.actor.routing_replay,
        )
        commits = [what for kind, what in replay if kind == "commit"]
        first = min(commits, default=0)  # it may have come late to the run that it replays
        return cls(context, name, await engine_class(config.rollout.engine).create(spec), log, first)

    async def run(self) -> None:
        """Commit every version that is published. Ends only by being cancelled, or by a fault."""
        layout = dcs.layout.of(self.engine.weights())
        context = self._context
        engine: Updatable = self.engine
        adapter = context.config.actor.travelling_adapter
        if adapter is not None:
            weights = context.config.weights
            engine = MergingEngine(engine, context.weights, context.run, self.name, layout, weights, adapter)
            layout = adapter_layout(layout, adapter)
        await follow(
            engine,
            context.weights,
            context.run,
            self.name,
            layout,
            context.config.weights,
            self._committed,
            self._first,
        )

    def _committed(self, arrival: Arrival) -> None:
        self._flush()
        self._arrivals.write(**asdict(arrival))

    def _flush(self) -> None:
        """Write away what the engine has decided since the last commit."""
        for event in self._log.take():
            self._record.write(event=event)

    async def close(self) -> None:
        await self.engine.close()
        self._flush()
        self._record.close()
        self._arrivals.close()
