"""Checkpoints of a run: trainer state and place in the prompts, one folder a step, whole or not there.

step-000010/data.json              place in the prompts; of one rank also its plain data
step-000010/manifest.json          digests, or the sizes of what ranks wrote
step-000010/tensors.safetensors    the state of a trainer in one process (see `state_files`)
step-000010/trainer/               the state of many ranks instead, in files of their backend's own
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax.config.base import ConfigError

if TYPE_CHECKING:  # finding the newest checkpoint needs no torch
    from relax.backends.train.base import KeepsState, Saves, StateTree

SOURCE = "prompt_source"
STEP = "step"
TRAINER = "trainer"
RANKS_SCHEMA = 2
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

    def save(
        self, step: int, state: "StateTree | Callable[[Path], None]", source: Mapping[str, Any]
    ) -> Checkpoint:
        """Write the checkpoint of `step`; one that is already there is kept as it is.

        Args:
            step: optimizer steps done.
            state: the trainer's, or what has many ranks write it into a folder.
            source: state of the prompt source.
        """
        from relax.backends.train.base import StateTree
        from relax.backends.train.state_files import write_state

        folder = self._folder / f"step-{step:06d}"
        if not folder.exists():
            if isinstance(state, StateTree):
                data = {TRAINER: state.data, SOURCE: dict(source), STEP: step}
                write_state(folder, StateTree(state.tensors, data))
            else:
                _write_ranks(folder, state, {SOURCE: dict(source), STEP: step})
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
    """The trainer's state, and the state of the prompt source.

    Raises:
        ConfigError: the checkpoint is damaged; the message says how to go on without it.
    """
    from relax.backends.train.base import StateTree
    from relax.backends.train.errors import StateFileError
    from relax.backends.train.state_files import read_state

    try:
        state = read_state(folder)
    except StateFileError as error:
        raise ConfigError(f"checkpoint {folder} is damaged: {error}; {_way_out(folder)}") from error
    data = _data(folder, state.data)
    return StateTree(state.tensors, data[TRAINER]), data[SOURCE]


def snapshot(backend: object) -> "StateTree | Callable[[Path], None]":
    """What `Checkpoints.save` takes of a trainer: its state, or what has its ranks write it."""
    from relax.backends.train.base import KeepsState, Saves

    if isinstance(backend, KeepsState):
        return backend.state()
    if isinstance(backend, Saves):
        return backend.save
    raise TypeError(
        f"{type(backend).__name__} has neither state() nor save(folder), so it has no checkpoints"
    )


def restore(folder: Path, backend: "KeepsState | Saves") -> None:
    """Have a trainer go on from a checkpoint: of one rank or of many, whatever it is itself.

    Raises:
        ConfigError: the checkpoint is damaged; the message says how to go on without it.
    """
    from relax.backends.train.base import KeepsState, Saves
    from relax.backends.train.errors import StateFileError

    ranks = (folder / TRAINER).is_dir()
    if isinstance(backend, KeepsState) and not ranks:
        backend.load_state(read_checkpoint(folder)[0])
        return
    if not isinstance(backend, Saves):
        raise ConfigError(
            f"checkpoint {folder} was written by many ranks, and {type(backend).__name__} cannot read that; "
            f"set actor.backend and the numbers of its ranks as they were"
        )
    try:
        backend.load(folder / TRAINER if ranks else folder)
    except StateFileError as error:
        raise ConfigError(f"checkpoint {folder} is damaged: {error}; {_way_out(folder)}") from error


def _write_ranks(folder: Path, write: "Callable[[Path], None]", data: Mapping[str, Any]) -> None:
    """Have ranks write a checkpoint beside its place, and rename it into that once it is on the disk.

    What ranks write carries digests of its own; of that the manifest holds the sizes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.partial-"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        write(partial / TRAINER)
        content = json.dumps(data, allow_nan=False, sort_keys=True, indent=1).encode()
        (partial / "data.json").write_bytes(content)
        manifest = {
            "schema": RANKS_SCHEMA,
            "sha256": {"data.json": hashlib.sha256(content).hexdigest()},
            "sizes": {
                str(path.relative_to(partial)): path.stat().st_size
                for path in sorted((partial / TRAINER).rglob("*"))
                if path.is_file()
            },
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in (partial / "data.json", partial / "manifest.json", partial):
            _flush(path)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_source(folder: Path) -> dict[str, Any]:
    """The state of the prompt source alone, without the tensors and without torch.

    `data.json` is held against its digest, `tensors.safetensors` against its own header, what ranks wrote
    against its sizes: a file cut short is found here, before anything starts. Digests are `restore`'s to
    check.

    Raises:
        ConfigError: the checkpoint is damaged; the message says how to go on without it.
    """
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
        ranks = (folder / TRAINER).is_dir()
        digests, sizes = manifest["sha256"], manifest["sizes"] if ranks else {}
        expected = {
            name: digests[name] for name in ("data.json", *(() if ranks else ("tensors.safetensors",)))
        }
        file = folder / "data.json"
        content = file.read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != expected["data.json"]:
            raise ValueError(f"its sha256 is {found}, not that of manifest.json")
        data = json.loads(content)
        if not ranks:
            file = folder / "tensors.safetensors"
            _check_length(file)
        for name, size in sizes.items():
            file = folder / name
            if (found := file.stat().st_size) != size:
                raise ValueError(f"it has {found} bytes, the manifest says {size}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(folder, file, error) from error
    return _data(folder, data)[SOURCE]


def _data(folder: Path, data: Any) -> dict[str, Any]:
    """What `Checkpoints.save` wrote as plain data; ConfigError when it did not write this."""
    try:
        if data[STEP] != int(folder.name.removeprefix("step-")):
            raise ValueError(f"it is of step {data[STEP]}")
        source = data[SOURCE]
        if not all(type(value) is int for value in (source["next"], *source["returned"])):
            raise ValueError(f"{SOURCE} = {source!r:.80}; expected ordinals")
        if not (folder / TRAINER).is_dir() and not isinstance(data[TRAINER], dict):
            raise ValueError("it has no state of the trainer")
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(folder, folder / "data.json", error) from error
    return data


def _check_length(file: Path) -> None:
    """Raise ValueError unless a safetensors file is as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size:
            raise ValueError(f"it is cut short: {size} bytes, and a header of {length}")
        header = json.loads(stream.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if size != (whole := 8 + length + max(ends, default=0)):
        raise ValueError(f"it has {size} bytes, its header says {whole}")


def _damaged(folder: Path, file: Path, error: Exception) -> ConfigError:
    cause = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"checkpoint {folder.name} is damaged, {file}: {cause}; {_way_out(folder)}")


def _way_out(folder: Path) -> str:
    match = _NAME.match(folder.name)
    older = [
        checkpoint
        for checkpoint in Checkpoints(folder.parents[1], keep=1).all()
        if match is not None and checkpoint.step < int(match[1])
    ]
    if older:
        return f"remove {folder} to go on from step {older[-1].step}"
    return f"remove {folder}, and the run begins again"
