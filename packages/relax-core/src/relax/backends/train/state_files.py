"""A `StateTree` on disk: one folder of safetensors and JSON, there whole or not at all.

    FOLDER/tensors.safetensors    the tensors
    FOLDER/data.json              the plain data
    FOLDER/manifest.json          {"schema": 1, "sha256": {file: digest}}

The folder is written beside its place, flushed to the disk, and renamed into it. Nothing in it is ever
unpickled.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from relax.backends.train.base import StateTree
from relax.backends.train.errors import (
    StateCorruptError,
    StateFileError,
    StateMismatchError,
    StateMissingError,
)
from relax.backends.train.megatron.files import PROGRESS

SCHEMA = 1
_TENSORS, _DATA, _MANIFEST = "tensors.safetensors", "data.json", "manifest.json"


def write_state(folder: str | Path, state: StateTree) -> None:
    """Write a state to a new folder; when this returns it is on the disk.

    What an earlier, interrupted write to the same folder left behind is removed.

    Raises:
        StateFileError: the folder is already there, `state.data` is not plain JSON (finite numbers, string
            keys), or it cannot be written, as on a full disk.
    """
    folder = Path(folder)
    if folder.exists():
        raise StateFileError(
            f"state folder {folder} is already there; states are never overwritten, name a new one"
        )
    try:
        data = json.dumps(state.data, allow_nan=False, sort_keys=True, indent=1)
    except (TypeError, ValueError) as error:
        raise StateFileError(f"state data for {folder} is not plain JSON: {error}") from error
    if json.loads(data) != state.data:
        raise StateFileError(f"state data for {folder} does not survive JSON; use lists, and strings as keys")
    with written(folder):
        _write(folder, state, data)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """For a block that writes a state folder: what the disk refuses is a StateFileError that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StateFileError(
            f"state folder {folder} cannot be written: {error}; states that were there before are untouched"
        ) from error


@contextlib.contextmanager
def read_from(folder: Path) -> Iterator[None]:
    """For a block that loads a state folder: a state that does not fit is named with its folder."""
    try:
        yield
    except StateMismatchError as error:
        raise StateMismatchError(f"state folder {folder} does not fit: {error}") from error


def _write(folder: Path, state: StateTree, data: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.partial-"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        save_file(state.tensors, partial / _TENSORS)
        (partial / _DATA).write_text(data)
        manifest = {"schema": SCHEMA, "sha256": {name: _sha256(partial / name) for name in (_TENSORS, _DATA)}}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        for name in (_TENSORS, _DATA, _MANIFEST):
            _flush(partial / name)
        _flush(partial)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(folder.parent)


def read_state(folder: str | Path) -> StateTree:
    """Read a state back, checked against its digests.

    Raises:
        StateMissingError: there is no such folder.
        StateMismatchError: ranks of megatron wrote it.
        StateCorruptError: a file is missing, changed or cut short, or the schema is another one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StateMissingError(f"there is no state folder {folder}")
    if (folder / PROGRESS).is_file():
        raise StateMismatchError(
            f"state folder {folder} holds a checkpoint of actor.backend=megatron; go on with that, or export "
            "it and start from the export"
        )
    manifest = _json(folder / _MANIFEST)
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise StateCorruptError(f"state {folder} has schema {schema!r}, this version reads {SCHEMA}")
    digests = manifest.get("sha256")
    contents = {name: _read(folder / name) for name in (_TENSORS, _DATA)}
    for name, content in contents.items():
        found = hashlib.sha256(content).hexdigest()
        if not isinstance(digests, dict) or digests.get(name) != found:
            raise StateCorruptError(
                f"{folder / name} has sha256 {found}, which is not that in {_MANIFEST}; one of them is "
                "damaged, take another state"
            )
    try:
        return StateTree(load(contents[_TENSORS]), json.loads(contents[_DATA]))
    except SafetensorError as error:
        raise StateCorruptError(f"{folder / _TENSORS} is no safetensors file: {error}") from error


def read_trainer_state(folder: str | Path) -> StateTree:
    """`read_state` of a trainer's own state, or of a run's checkpoint, which holds it among other things."""
    state = read_state(folder)
    return StateTree(state.tensors, state.data.get("trainer", state.data))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise StateCorruptError(f"state {path.parent} lacks {path.name}; take another state") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise StateCorruptError(f"{path} is no JSON: {error}; take another state") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
