"""The folder of one run: what lies where, and whether it can be begun or resumed."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.config import ConfigError, RunConfig, dump, load


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run: config.yaml, metrics.jsonl, samples.jsonl, events.jsonl, weights.jsonl, journal.jsonl,
    accounting.jsonl, tensorboard/, checkpoints/, schedule/, logs/, and model/ where the model was made on the
    spot.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def weights(self) -> Path:
        return self.path / "weights.jsonl"

    @property
    def accounting(self) -> Path:
        return self.path / "accounting.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def segments(self) -> Path:
        return self.path / "segments.jsonl"


def check_root(config: RunConfig) -> None:
    """Raise ConfigError where no run folder could be made; leaves nothing there."""
    root = Path(config.run.root).absolute()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.root = {config.run.root!r}: no folder can be made in {there} ({error.strerror}); name "
            f"another one"
        ) from error


def create(config: RunConfig, name: str) -> RunFolder:
    """Make the folder of a new run and save its configuration.

    Raises:
        ConfigError: a run of that name is there.
    """
    name = config.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = (Path(config.run.root) / name).absolute()
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"run.name = {name!r}: {path} is already there; resume it with --resume {path}, or choose "
            f"another name"
        ) from None
    except OSError as error:
        raise ConfigError(f"run.root = {config.run.root!r}: {path} cannot be made: {error}") from error
    folder = RunFolder(path)
    folder.config.write_text(dump(config))
    folder.logs.mkdir()
    return folder


def reopen(path: Path, overrides: list[str], asked: str = "--resume") -> tuple[RunFolder, RunConfig]:
    """The folder and configuration of a run that was begun before; `asked` is what a person has called.

    Raises:
        ConfigError: there is no run there. (One that never reached a checkpoint begins again.)
    """
    folder = RunFolder(path.absolute())
    if not folder.config.is_file():
        raise ConfigError(f"{asked} {path}: no run lies there (no {folder.config.name})")
    return folder, load(folder.config, overrides)


@contextlib.contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Keep the run to this process for as long as the block runs; however it ends, the hold ends with it.

    Raises:
        ConfigError: another process holds it.
    """
    with (folder.path / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{folder.path} is still being trained by process {lock.read() or '?'}; wait for it or "
                f"stop it"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def begin_segment(folder: RunFolder, entry: dict[str, Any]) -> int:
    """Note one more start of the run; returns its number, from 0."""
    number = sum(1 for _ in folder.segments.open()) if folder.segments.is_file() else 0
    with folder.segments.open("a") as stream:
        stream.write(
            json.dumps({"segment": number, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), **entry}) + "\n"
        )
    return number


def discard(folder: RunFolder) -> None:
    """Remove the folder of a run that could not begin."""
    shutil.rmtree(folder.path)
