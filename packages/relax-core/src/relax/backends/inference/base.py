"""What an inference engine does for the rollout: generate, and take new weights between two decode steps."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentic import Generation, GenerationRequest

from relax.backends.inference.log import EngineLog, Event
from relax.config.roles import RolloutSettings

if TYPE_CHECKING:  # this module is read by processes that never load torch
    from torch import Tensor

Inflight = Literal["retract"]
"""What becomes of requests in flight at a commit. `retract`: their KV is recomputed with the new weights."""


@dataclass(frozen=True)
class FinishedGeneration:
    """A generation and the request it answers."""

    id: str
    generation: Generation


@dataclass(frozen=True)
class UpdateReport:
    """A committed version: seconds that decoding stood still, and requests whose KV was recomputed."""

    version: int
    pause_seconds: float
    retracted: int


@dataclass(frozen=True)
class Health:
    """What a replica says of itself. `decode_steps` only grows while it works: progress, not just life."""

    alive: bool
    version: int
    running: int
    waiting: int
    capacity: int
    decode_steps: int
    generated_tokens: int
    busy_seconds: float


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made from.

    Attributes:
        name: of the replica: `engine-0` and so on.
        folder: the model, in Hugging Face layout; it may hold no weights, as they come with the first
            version.
        dtype: of weights, activations and KV: a torch dtype's name.
        max_running: requests that decode together; more wait.
        capacity_tokens: the longest prompt and response together; None is the model's context.
        seed: the run's.
        log: where the engine's decisions are recorded, if it is one that can be replayed.
        replay: events of a log to follow to the letter; empty: none.
        run_folder: the run's; what an engine leaves there lies in `logs/`.
        settings: of the rollout.
        routes: tell with every generation which experts its tokens were sent to.
    """

    name: str
    folder: Path
    dtype: str = "float32"
    max_running: int = 64
    capacity_tokens: int | None = None
    seed: int = 0
    log: EngineLog = field(default_factory=EngineLog)
    replay: Sequence[Event] = ()
    run_folder: Path = Path()
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    routes: bool = False

    @property
    def number(self) -> int:
        """Which of the replicas, from 0: the number that the name ends with; 0 for a name without one."""
        digits = self.name.rpartition("-")[2]
        return int(digits) if digits.isdecimal() else 0


class InferenceEngine(Protocol):
    """One replica. All calls are safe from one event loop; computation runs in the engine's own thread, or
    in a server of its own. A registered engine is an `EngineClass`.
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        """Generate for all requests, yielding each as it finishes. The requests of one call are admitted
        together and in order (as slots allow), so that the same calls in the same order give the same
        bits."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early: it finishes with what it has, reason `abort`. An unknown id is ignored."""
        ...

    def weights(self) -> "Mapping[str, Tensor]":
        """The weights by Hugging Face name: what the tensors of a version have to look like."""
        ...

    async def begin_update(self, version: int, tensors: "Mapping[str, Tensor]") -> None:
        """Take a version's tensors (Hugging Face names) to be committed; serving goes on. Checks names,
        shapes and dtypes before anything changes."""
        ...

    async def commit_update(self, version: int) -> UpdateReport:
        """Copy the begun version in place between two decode steps, recompute in-flight KV."""
        ...

    async def health(self) -> Health: ...

    async def close(self) -> None: ...


class EngineClass(Protocol):
    """What is registered as an engine: a class of engines."""

    async def create(self, spec: EngineSpec) -> InferenceEngine:
        """An engine that is ready, but serves nothing before its first version (a class method). Leaves
        nothing behind when it fails.

        Raises:
            EngineError: it cannot be made of this.
        """
        ...
