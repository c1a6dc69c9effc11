"""The prompt source: rows of a data file as an endless, seeded, resumable sequence of prompts.

The row of ordinal i is a pure function of (seed, i), so the whole state of the source is the next ordinal and
the ordinals that were taken and not trained: nothing is skipped and nothing repeated after a resume.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.base import ConfigError
from relax.config.inputs import DataSettings

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Prompt:
    """One prompt, taken from the source as number `ordinal`.

    Attributes:
        key: stable name of the row over epochs.
        messages: chat messages, each {"role", "content"}; content is text or OpenAI-style parts.
        answer: the answer column's value, or None.
        row: the whole row.
    """

    ordinal: int
    key: str
    messages: list[dict[str, Any]]
    answer: Any
    row: Mapping[str, Any]


class PromptSource:
    """Prompts in the order of the run's seed, one epoch after the other, each shuffled anew."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], settings: DataSettings, seed: int) -> None:
        self._rows = rows
        self._settings = settings
        self._seed = seed
        self._next = 0
        self._returned: list[int] = []
        self._epoch = -1
        self._order = np.arange(len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> Prompt:
        """The next prompt; a returned one comes first."""
        if self._returned:
            return self.prompt(self._returned.pop(0))
        self._next += 1
        return self.prompt(self._next - 1)

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal, without taking it."""
        epoch, place = divmod(ordinal, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = (
                np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
                if self._settings.shuffle
                else np.arange(len(self._rows))
            )
        index = int(self._order[place])
        row = self._rows[index]
        answer = row[self._settings.answer_column] if self._settings.answer_column else None
        return Prompt(ordinal, f"row-{index}", messages_of(row, self._settings), answer, row)

    def state(self, untrained: Iterable[int]) -> dict[str, Any]:
        """What a resume needs: `untrained` are ordinals taken whose groups were not trained."""
        return {"next": self._next, "returned": sorted({*untrained, *self._returned})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])
        self._returned = [int(ordinal) for ordinal in state["returned"]]


def messages_of(row: Mapping[str, Any], settings: DataSettings) -> list[dict[str, Any]]:
    """The chat messages of a row, images in the places of their `<image>` placeholders."""
    if settings.messages_column:
        messages = [dict(message) for message in row[settings.messages_column]]
    else:
        messages = [{"role": "user", "content": str(row[settings.prompt_column])}]
    if settings.system_prompt:
        messages.insert(0, {"role": "system", "content": settings.system_prompt})
    if settings.image_column:
        cell = row[settings.image_column]
        images = list(cell) if isinstance(cell, list | tuple) else [cell]
        messages = [_with_images(message, images) for message in messages]
        if images:
            parts = [{"type": "image", "image": image} for image in images]
            last = messages[-1]
            content = last["content"]
            text = [{"type": "text", "text": content}] if isinstance(content, str) else content
            messages[-1] = {**last, "content": [*parts, *text]}
    return messages


def _with_images(message: dict[str, Any], images: list[Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str) or "<image>" not in content:
        return message
    parts: list[dict[str, Any]] = []
    pieces = content.split("<image>")
    for place, piece in enumerate(pieces):
        if place:
            if not images:
                raise ConfigError(f"a prompt has more <image> placeholders than images: {content[:80]!r}")
            parts.append({"type": "image", "image": images.pop(0)})
        if piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def read_rows(settings: DataSettings) -> Sequence[Mapping[str, Any]]:
    """Read the rows and check that the columns named are there.

    Raises:
        ConfigError: no such file, no rows, a column that is missing (with the columns there are).
    """
    rows = _rows(settings)
    if settings.limit is not None:
        rows = (
            rows[: settings.limit]
            if isinstance(rows, list)
            else rows.select(range(min(settings.limit, len(rows))))
        )
    if not len(rows):
        raise ConfigError(f"data.path = {settings.path!r} holds no rows")
    there = list(rows[0])
    prompt_key = "messages_column" if settings.messages_column else "prompt_column"
    for key in (prompt_key, "answer_column", "image_column"):
        column = getattr(settings, key)
        if column is not None and column not in there:
            near = difflib.get_close_matches(column, there, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"data.{key} = {column!r}: {settings.path} has no such column, only "
                f"{', '.join(map(repr, there))}{hint}"
            )
    return rows


def _rows(settings: DataSettings) -> Any:
    path = settings.path
    module, separator, attribute = path.partition(":")
    if separator and "/" not in path and not Path(path).exists():
        return list(_function(module, attribute, path)())
    file = Path(path)
    if file.suffix in FORMATS:
        if not file.is_file():
            raise ConfigError(f"data.path = {path!r}: there is no such file{_near_file(file)}")
        if not file.stat().st_size:
            raise ConfigError(f"data.path = {path!r} is empty")
        return _load(FORMATS[file.suffix], settings, data_files=str(file), split="train")
    if file.suffix and not file.is_dir() and file.is_file():
        raise ConfigError(f"data.path = {path!r}: unknown kind of file, known are {', '.join(FORMATS)}")
    return _load(path, settings, split=settings.split)


def _load(name: str, settings: DataSettings, **kwargs: Any) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, **kwargs)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        cause = error.__cause__ or error
        raise ConfigError(f"data.path = {settings.path!r} cannot be read as {name}: {cause}") from error


def _function(module: str, attribute: str, path: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.path = {path!r}: {error}") from error


def _near_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f" (and no folder {file.parent})"
    near = difflib.get_close_matches(file.name, [p.name for p in file.parent.iterdir()], 1)
    return f"; did you mean {file.parent / near[0]}?" if near else ""
