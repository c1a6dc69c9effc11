"""Checkpoints of a run: trainer state and place in the prompts, one folder a step, whole or not there."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # finding the newest checkpoint needs no torch
    from relax.backends.train.base import StateTree

SOURCE = "prompt_source"
STEP = "step"
_NAME = re.compile(r"^step-(\d{6,})$")


class Trained:
    """Which group ordinals have been trained: everything below a mark, and single ones above it.

    Its state is what a prompt source starts from, so that a resume skips and repeats nothing.
    """

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self._below = below
        self._above = set(above)

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None) -> "Trained":
        """From the state of a prompt source: what it returned was not trained."""
        if state is None:
            return cls()
        returned = {int(ordinal) for ordinal in state["returned"]}
        trained = cls()
        trained.add(ordinal for ordinal in range(int(state["next"])) if ordinal not in returned)
        return trained

    def add(self, ordinals: Iterable[int]) -> None:
        self._above.update(ordinals)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def state(self) -> dict[str, Any]:
        """{"next": the ordinal after the last one trained, "returned": those before it not trained}."""
        following = max(self._above, default=self._below - 1) + 1
        return {
            "next": following,
            "returned": [ordinal for ordinal in range(self._below, following) if ordinal not in self._above],
        }


@dataclass(frozen=True)
class Checkpoint:
    """One on disk. `step` is the number of optimizer steps done, which is also the version of its weights."""

    step: int
    folder: Path


class Checkpoints:
    """The checkpoints of one run folder; the newest `keep` stay."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self._folder = run_folder / "checkpoints"
        self._keep = keep

    def save(self, step: int, state: "StateTree", source: Mapping[str, Any]) -> Checkpoint:
        """Write the checkpoint of `step`; one that is already there is kept as it is."""
        from relax.backends.train.base import StateTree
        from relax.backends.train.state_files import write_state

        folder = self._folder / f"step-{step:06d}"
        if not folder.exists():
            data = {"trainer": state.data, SOURCE: dict(source), STEP: step}
            write_state(folder, StateTree(state.tensors, data))
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old.folder)
        return Checkpoint(step, folder)

    def all(self) -> list[Checkpoint]:
        """Every whole checkpoint, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [
            (int(match[1]), path) for path in self._folder.iterdir() if (match := _NAME.match(path.name))
        ]
        return [Checkpoint(step, path) for step, path in sorted(found)]

    def newest(self) -> Checkpoint | None:
        there = self.all()
        return there[-1] if there else None


def read_checkpoint(folder: Path) -> tuple["StateTree", dict[str, Any]]:
    """The trainer's state, and the state of the prompt source."""
    from relax.backends.train.base import StateTree
    from relax.backends.train.state_files import read_state

    state = read_state(folder)
    return StateTree(state.tensors, state.data["trainer"]), state.data[SOURCE]


def read_source(folder: Path) -> dict[str, Any]:
    """The state of the prompt source alone, without the tensors and without torch."""
    return json.loads((folder / "data.json").read_text())[SOURCE]
