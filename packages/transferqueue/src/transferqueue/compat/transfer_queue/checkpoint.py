"""`save_checkpoint` and `load_checkpoint`: a folder with all samples, their tags, and what is consumed.

Nothing in it is pickled. Payload is written in pieces of a few hundred samples, so that no process holds all
of it.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ... import Column
from .client import TransferQueueClient
from .errors import InvalidRequest
from .packing import pack, unpack
from .rows import OBJECT, stored_name
from .session import get_client
from .tensors import torch_module

_FORMAT = 1
_METADATA, _CATALOG, _ROWS = "metadata.json", "catalog.msgpack", "rows-{:06d}.msgpack"
_PIECE = 256


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes the whole state of the store into a folder, which replaces one that is there.

    Call it while nobody writes or clears: a sample that is cleared meanwhile fails it.

    Args:
        checkpoint_dir: the folder; it and its parents are made.
        include_storage: has no effect, as for the in-memory backend of the PyPI package: payload is always
            saved.
        metadata: what a user wants to find in ``metadata.json`` under ``user_metadata``.

    Raises:
        StorageKeyNotFoundError: a sample was cleared meanwhile.
        OSError: the folder cannot be written.
    """
    folder = Path(checkpoint_dir)
    written, aside = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    for left in (written, aside) if folder.exists() else (written,):
        shutil.rmtree(left, ignore_errors=True)
    written.mkdir(parents=True)
    client = get_client()
    state = client.dump_catalog()
    (written / _CATALOG).write_bytes(state)
    pieces = 0
    for pieces, (indexes, columns) in enumerate(_pieces(client, unpack(state)), 1):
        (written / _ROWS.format(pieces - 1)).write_bytes(pack([indexes, columns]))
    said = {"format": _FORMAT, "pieces": pieces, "storage_saved": True, "user_metadata": dict(metadata or {})}
    (written / _METADATA).write_text(json.dumps(said, indent=2))
    if folder.exists():
        folder.rename(aside)
    written.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replaces the state of the store by a saved one. Global indexes stay what they were.

    Raises:
        FileNotFoundError: there is no checkpoint.
        InvalidRequest: it is of another format.
    """
    folder = Path(checkpoint_dir)
    aside = folder.with_name(folder.name + ".old")
    if not folder.exists() and aside.exists():  # a save ended between its two renames
        folder = aside
    if not (folder / _METADATA).exists():
        raise FileNotFoundError(
            f"{folder} has no {_METADATA}; it is no checkpoint, or one that was not finished"
        )
    said = json.loads((folder / _METADATA).read_text())
    if said.get("format") != _FORMAT:
        raise InvalidRequest(f"{folder} is of format {said.get('format')!r}; this version reads {_FORMAT}")
    client = get_client()
    places: dict[int, int] = {}
    try:
        for piece in range(said["pieces"]):
            indexes, columns = unpack((folder / _ROWS.format(piece)).read_bytes())
            rows = client.put_rows({name: _restored(name, *saved) for name, saved in columns.items()})
            places.update(zip(indexes, rows, strict=True))
        client.load_catalog((folder / _CATALOG).read_bytes(), places)
    except BaseException:
        client.free(list(places.values()))
        raise


def _pieces(client: TransferQueueClient, state: dict[str, Any]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Indexes of samples that have the same columns, and these."""
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for partition in state["partitions"]:
        for index, _, _, row, cells, _ in partition["samples"]:
            if row and cells:
                names = tuple(sorted(stored_name(name, kind) for name, kind, _ in cells))
                alike.setdefault(names, []).append((index, row))
    for names, samples in alike.items():
        for start in range(0, len(samples), _PIECE):
            piece = samples[start : start + _PIECE]
            columns = client.fetch_rows([row for _, row in piece], names)
            yield [index for index, _ in piece], {name: _saved(name, columns[name]) for name in names}


def _saved(name: str, column: Column) -> list[Any]:
    if name.endswith(f"|{OBJECT}"):
        return [list(column), None]
    bare = column.expand()
    return [np.asarray(bare.values), None if name.endswith("[]") else np.asarray(bare.offsets)]


def _restored(name: str, values: Any, offsets: np.ndarray | None) -> Any:
    if isinstance(values, list):
        return values
    if "|bfloat16[" in name:
        values = torch_module().from_numpy(values).view(sys.modules["torch"].bfloat16)
    if offsets is None:
        return values
    return [values[start:stop] for start, stop in pairwise(offsets.tolist())]
