"""What an inference engine does for the rollout: generate, and take new weights between two decode steps."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from agentic import Generation, GenerationRequest

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


class InferenceEngine(Protocol):
    """One replica. All calls are safe from one event loop; computation runs in the engine's own thread."""

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
