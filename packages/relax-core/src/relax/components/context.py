"""What every role is given when it starts: configuration, run folder, where bus and weights are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from relax.config.run import RunConfig
from relax.distributed.bus import Endpoint


@dataclass(frozen=True)
class RunContext:
    """One run, as a role sees it. Travels to the role's process.

    Attributes:
        config: the resolved configuration.
        folder: the run folder, absolute.
        model: folder of the policy's config and tokenizer, absolute.
        bus: the queue's controller.
        weights: the weight coordinator.
        first_step: optimizer steps already done by an earlier part of this run.
        checkpoint: folder of the checkpoint to start from.
        source: state of the prompt source to start from.
        replay: folder of a recorded schedule to follow.
        leader: where the ranks of the role's trainer come to; given to those ranks.
        media: the model sees or hears, so every sample has media fields.
        segment: how often the run was started before; names the files of this start.
    """

    config: RunConfig
    folder: Path
    model: Path
    bus: Endpoint
    weights: Endpoint
    first_step: int = 0
    checkpoint: Path | None = None
    source: Mapping[str, Any] | None = None
    replay: Path | None = None
    segment: int = 0
    media: bool = False
    leader: Endpoint | None = None

    @property
    def run(self) -> str:
        """Name of the run among others on the same services."""
        return self.folder.name

    @property
    def schedule(self) -> Path:
        """Folder where the roles record their scheduling decisions."""
        return self.folder / "schedule" / f"segment-{self.segment}"


@runtime_checkable
class Closes(Protocol):
    """Something that holds more than memory."""

    def close(self) -> None: ...
