"""The prompt source: rows of a data file as an endless, seeded, resumable sequence of prompts.

The row of ordinal i is a pure function of (seed, i), so the whole state of the source is the next ordinal and
the ordinals that were taken and not trained: nothing is skipped and nothing repeated after a resume.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.base import ConfigError
from relax.config.inputs import DataSettings

_MEDIA = ("image", "video", "audio")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
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


class BadRow(ValueError):
    """A row of the data that makes no prompt.

    Attributes:
        path: `data.path`.
        row: its place in the data, from 0.
        ordinal: the prompt it was to be.
        reason: what is wrong with it; printable whatever the row holds.
    """

    def __init__(self, path: str, row: int, ordinal: int, reason: str) -> None:
        reason = reason.encode(errors="backslashreplace").decode()
        super().__init__(path, row, ordinal, reason)
        self.path = path
        self.row = row
        self.ordinal = ordinal
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"data.path = {self.path!r}: row {self.row} (ordinal {self.ordinal}) is no prompt: {self.reason}"
        )


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
        """The next prompt; a returned one comes first.

        Raises:
            BadRow: its row makes none. It has been taken: the next call goes on behind it.
        """
        if self._returned:
            return self.prompt(self._returned.pop(0))
        self._next += 1
        return self.prompt(self._next - 1)

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal, without taking it. Raises BadRow."""
        epoch, place = divmod(ordinal, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = (
                np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
                if self._settings.shuffle
                else np.arange(len(self._rows))
            )
        return prompt_of(self._rows, int(self._order[place]), self._settings, ordinal)

    def state(self, untrained: Iterable[int]) -> dict[str, Any]:
        """What a resume needs: `untrained` are ordinals taken whose groups were not trained."""
        return {"next": self._next, "returned": sorted({*untrained, *self._returned})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])
        self._returned = [int(ordinal) for ordinal in state["returned"]]


def prompt_of(rows: Sequence[Mapping[str, Any]], index: int, settings: DataSettings, ordinal: int) -> Prompt:
    """Row `index` as the prompt number `ordinal`.

    Raises:
        BadRow: the row cannot be read, lacks a column, or holds no text or messages where they should be.
    """
    try:
        row = rows[index]  # may be anybody's sequence, and raise whatever it likes
        if not isinstance(row, Mapping):
            raise ValueError(f"expected a mapping from columns to values, not {row!r:.80}")
        messages = messages_of(row, settings)
        answer = _cell(row, settings.answer_column) if settings.answer_column else None
    except Exception as error:
        own = type(error) is ValueError
        reason = str(error) if own else f"{type(error).__name__}: {error}"
        raise BadRow(settings.path, index, ordinal, reason) from error
    return Prompt(ordinal, f"row-{index}", messages, answer, row)


def messages_of(row: Mapping[str, Any], settings: DataSettings) -> list[dict[str, Any]]:
    """The chat messages of a row, media in the places of their placeholders, such as `<image>`. A relative
    path of a medium is one from the folder of the data file.

    Raises:
        ValueError: a column is missing or empty, or holds no messages; more placeholders than media.
    """
    if settings.messages_column:
        messages = _conversation(_cell(row, settings.messages_column), settings.messages_column)
    else:
        prompt = _cell(row, settings.prompt_column)
        if prompt is None:
            raise ValueError(f"column {settings.prompt_column!r} holds nothing; expected the prompt's text")
        messages = [{"role": "user", "content": str(prompt)}]
    for message in messages:
        _check_text(message["content"])
    if settings.system_prompt:
        messages.insert(0, {"role": "system", "content": settings.system_prompt})
    folder = _folder(settings)
    messages = [{**message, "content": _at(message["content"], folder)} for message in messages]
    columns = {
        kind: [_beside(item, folder) for item in _items(_cell(row, column))]
        for kind, column in settings.media_columns.items()
    }
    if columns:
        placing = _Placing(columns, settings.audio_in_video)
        messages = [placing.placed(message) for message in messages]
        left = placing.left()
        if left:
            last = messages[-1]
            content = last["content"]
            text = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            messages[-1] = {**last, "content": [*left, *text]}
    return messages


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise ValueError(f"it has no column {column!r}, only {', '.join(map(repr, row))}")
    return row[column]


def _conversation(cell: Any, column: str) -> list[dict[str, Any]]:
    expected = 'expected a list of messages, each {"role", "content"}'
    if not isinstance(cell, list | tuple) or not cell:
        raise ValueError(f"column {column!r} holds {cell!r:.80}; {expected}")
    for place, message in enumerate(cell):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content", 0), str | list | tuple | None)
        ):
            raise ValueError(f"message {place} of column {column!r} is {message!r:.80}; {expected}")
    return [dict(message) for message in cell]


def _check_text(content: Any) -> None:
    """Raise ValueError for text that is no Unicode (half of a surrogate pair): no tokenizer takes it."""
    texts = [content] if isinstance(content, str) else content or []
    for text in texts:
        if isinstance(text, Mapping):
            text = text.get("text")
        if isinstance(text, str):
            text.encode()


def _items(cell: Any) -> list[Any]:
    """The media of a cell: a list of them, one, or none."""
    if cell is None:
        return []
    return list(cell) if isinstance(cell, list | tuple) else [cell]


def _folder(settings: DataSettings) -> Path | None:
    """Where the data file lies; None for data that is no file."""
    path = Path(settings.path or "")
    return path.absolute().parent if path.is_file() else None


def _beside(source: Any, folder: Path | None) -> Any:
    """A medium whose relative path is one from the data file's folder; any other as it is."""
    if isinstance(source, Mapping) and source.get("bytes") is None and isinstance(source.get("path"), str):
        return {**source, "path": _beside(source["path"], folder)}
    if folder is None or not isinstance(source, str) or _ADDRESS.match(source):
        return source
    return str(folder / source)


def _at(content: Any, folder: Path | None) -> Any:
    """The content of a message, its media as `_beside` gives them."""
    if not isinstance(content, list | tuple):
        return content
    return [
        {**part, part["type"]: _beside(part[part["type"]], folder)}
        if isinstance(part, Mapping) and part.get("type") in _MEDIA and part["type"] in part
        else part
        for part in content
    ]


class _Placing:
    """The media of a row, by kind, put in the places of the placeholders in its messages one by one."""

    def __init__(self, columns: Mapping[str, list[Any]], own_sound: bool) -> None:
        self._columns = columns
        self._own_sound = own_sound
        self._mark = re.compile("|".join(f"<{kind}>" for kind in columns))

    def placed(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its placeholders, in a text, replaced by parts."""
        content = message["content"]
        if not isinstance(content, str) or not self._mark.search(content):
            return message
        parts: list[dict[str, Any]] = []
        at = 0
        for mark in self._mark.finditer(content):
            kind = mark.group()[1:-1]
            if mark.start() > at:
                parts.append({"type": "text", "text": content[at : mark.start()]})
            if not self._columns[kind]:
                raise ValueError(f"the prompt has more <{kind}> placeholders than {kind}s: {content[:80]!r}")
            parts.append(self._part(kind, self._columns[kind].pop(0)))
            at = mark.end()
        if at < len(content):
            parts.append({"type": "text", "text": content[at:]})
        return {**message, "content": parts}

    def left(self) -> list[dict[str, Any]]:
        """Parts of what no placeholder asked for."""
        return [self._part(kind, source) for kind, sources in self._columns.items() for source in sources]

    def _part(self, kind: str, source: Any) -> dict[str, Any]:
        part = {"type": kind, kind: source}
        return part | {"use_audio_in_video": True} if kind == "video" and self._own_sound else part


def read_rows(settings: DataSettings) -> Sequence[Mapping[str, Any]]:
    """Read the rows and check that the columns named are there.

    Raises:
        ConfigError: no such file, no rows, rows that are no mappings, a column that is missing (with the
            columns there are).
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
    there = _columns(rows, settings.path)
    prompt_key = "messages_column" if settings.messages_column else "prompt_column"
    for key in (prompt_key, "answer_column", "image_column", "video_column", "audio_column"):
        column = getattr(settings, key)
        if column is not None and column not in there:
            near = difflib.get_close_matches(column, there, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"data.{key} = {column!r}: {settings.path} has no such column, only "
                f"{', '.join(map(repr, there))}{hint}"
            )
    return rows if isinstance(rows, list) else _encoded(rows, settings)


def _encoded(rows: Any, settings: DataSettings) -> Any:
    """The rows with their media left encoded: omni_processor decodes them, and not where rows are taken."""
    from datasets import Audio, Image, List, Video

    for column in settings.media_columns.values():
        feature = rows.features.get(column)
        inner = feature.feature if isinstance(feature, List) else feature
        if not isinstance(inner, Audio | Image | Video) or getattr(inner, "mode", None):
            continue  # a picture that is to be brought to a mode is left to datasets
        left = type(inner)(decode=False)
        rows = rows.cast_column(column, List(left) if isinstance(feature, List) else left)
    return rows


def _rows(settings: DataSettings) -> Any:
    path = settings.path
    module, separator, attribute = path.partition(":")
    if separator and "/" not in path and not Path(path).exists():
        return _made(_function(module, attribute, path), path)
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


def _made(function: Callable[[], Any], path: str) -> list[Any]:
    made = function()
    if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
        raise ConfigError(
            f"data.path = {path!r} returned {made!r:.80}; expected a list of rows, each a mapping from "
            "columns to values"
        )
    return list(made)


def _columns(rows: Any, path: str) -> list[str]:
    """The columns of the first row, without decoding what is in them."""
    if not isinstance(rows, list):
        return list(rows.column_names)
    if not isinstance(rows[0], Mapping):
        raise ConfigError(
            f"data.path = {path!r}: rows must be mappings from columns to values, such as "
            f'{{"prompt": "..."}}; row 0 is {rows[0]!r:.80}'
        )
    return list(rows[0])


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
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.path = {path!r}: {error}") from error
    if not callable(function):
        raise ConfigError(f"data.path = {path!r} is {function!r:.80}; expected a function that returns rows")
    return function


def _near_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f" (and no folder {file.parent})"
    near = difflib.get_close_matches(file.name, [p.name for p in file.parent.iterdir()], 1)
    return f"; did you mean {file.parent / near[0]}?" if near else ""
