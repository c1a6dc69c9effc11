"""Conversations in the shapes people have them, brought to what a chat template reads, media taken out.

Accepted content: a string, or a list of OpenAI-style parts (``text``, ``image_url``, ``input_audio``,
``video_url``) and Hugging Face style ones (``image``, ``audio`` or ``video`` with a source under that name,
``url``, ``path``, ``base64`` or nothing). With ``images=[...]``, an ``<image>`` in the text and an ``image``
part without a source take the next one of the list; so do ``<audio>`` with ``audios=``, ``<video>`` with
``videos=``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_processor.errors import MessageError, SpanMismatch, UnsupportedModality

KINDS: tuple[str, ...] = ("image", "audio", "video")

_TEXT_TYPES = ("text", "input_text", "output_text")
_PART_TYPES = {name.format(kind): kind for kind in KINDS for name in ("{}", "{}_url", "input_{}")}


@dataclass(frozen=True, slots=True)
class Asked:
    """A media item that a conversation asks for: its kind and source, and for a video whether its own sound
    is wanted (None: as the call says).
    """

    kind: str
    source: Any
    own_sound: bool | None = None


class Columns:
    """The ``images=``, ``audios=`` and ``videos=`` arguments, taken one by one as the text asks for them.

    With ``required=False`` media parts may lack a source: only the text is wanted.
    """

    def __init__(self, *, required: bool = True, **columns: Sequence[Any] | None) -> None:
        for name, column in columns.items():
            if column is not None and (isinstance(column, str | bytes) or not isinstance(column, Sequence)):
                raise MessageError(
                    f"{name}= must be a list of sources, not {type(column).__name__}: wrap a single one in "
                    "[ ]"
                )
        self.required = required
        self._given = {kind: list(columns.get(f"{kind}s") or ()) for kind in KINDS}
        self._asked = dict.fromkeys(KINDS, 0)
        marked = [kind for kind in KINDS if columns.get(f"{kind}s") is not None]
        self.marked = frozenset(marked)
        self._mark = re.compile("|".join(f"<{kind}>" for kind in marked)) if marked else None

    def kinds(self) -> list[str]:
        """Modalities of which there are sources."""
        return [kind for kind in KINDS if self._given[kind]]

    def take(self, kind: str) -> Any:
        """The next source of a kind, None behind the last."""
        given, asked = self._given[kind], self._asked[kind]
        self._asked[kind] += 1
        return given[asked] if asked < len(given) else None

    def check(self) -> None:
        """Raises: SpanMismatch, unless exactly all were asked for."""
        for kind in KINDS:
            given, asked = len(self._given[kind]), self._asked[kind]
            if kind in self.marked and asked != given:
                raise SpanMismatch(
                    f"the text asks for {asked} {kind}s (<{kind}> marks and parts without a source), but "
                    f"{kind}s= holds {given}: they must be as many",
                    item=f"{kind} {min(asked, given)}",
                )

    def split(self, text: str) -> Iterator[dict[str, Any]]:
        """Text parts, and a part without a source for every mark of a column that was given."""
        at = 0
        for mark in self._mark.finditer(text) if self._mark else ():
            if mark.start() > at:
                yield {"type": "text", "text": text[at : mark.start()]}
            yield {"type": mark.group()[1:-1]}
            at = mark.end()
        if at < len(text):
            yield {"type": "text", "text": text[at:]}


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], columns: Columns, modalities: frozenset[str]
) -> tuple[list[dict[str, Any]], list[Asked]]:
    """Messages for the chat template, and the media they ask for in order. The input is not changed.

    For a model without media, lists of text parts become one string: its template knows nothing else.

    Raises:
        MessageError: a message or part of a shape that is not understood.
        UnsupportedModality: media the model does not take.
    """
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence) or not messages:
        raise MessageError(f"a conversation is a non-empty list of messages, not {messages!r:.80}")
    prepared: list[dict[str, Any]] = []
    asked: list[Asked] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise MessageError(f'message {index} must be a mapping with a "role", not {message!r:.80}')
        copied = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            parts = list(columns.split(content))
            if any(part["type"] != "text" for part in parts):
                copied["content"] = _content(parts, index, columns, modalities, asked)
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            copied["content"] = _content(content, index, columns, modalities, asked)
        elif content is not None:
            raise MessageError(
                f"the content of message {index} is {type(content).__name__}: use a string or a list of parts"
            )
        prepared.append(copied)
    return prepared, asked


def replace_marks(text: str, columns: Columns, placeholders: Mapping[str, str]) -> tuple[str, list[Asked]]:
    """Text for no chat template: every mark becomes its kind's placeholder; also what it asks for."""
    asked: list[Asked] = []
    pieces: list[str] = []
    for part in columns.split(text):
        if part["type"] == "text":
            pieces.append(part["text"])
        else:
            asked.append(Asked(part["type"], columns.take(part["type"])))
            pieces.append(placeholders[part["type"]])
    return "".join(pieces), asked


def _content(
    parts: Sequence[Any], index: int, columns: Columns, modalities: frozenset[str], asked: list[Asked]
) -> list[dict[str, Any]] | str:
    flat: list[Mapping[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise MessageError(
                f"a content part of message {index} is {type(part).__name__}: use mappings with a type"
            )
        kind = part.get("type") or _guess_type(part)
        if kind in _TEXT_TYPES:
            text = part.get("text")
            if not isinstance(text, str):
                raise MessageError(f"a text part of message {index} has no text: {part!r:.80}")
            flat.extend(columns.split(text) if text else [{"type": "text", "text": text}])
        elif kind in _PART_TYPES:
            flat.append({**part, "type": kind})
        else:
            raise UnsupportedModality(
                f"message {index} has a part of type {kind!r}; this model takes {_taken(modalities)}",
                item=str(kind),
            )
    content: list[dict[str, Any]] = []
    for part in flat:
        if part["type"] in _TEXT_TYPES:
            content.append({"type": "text", "text": part["text"]})
            continue
        kind = _PART_TYPES[part["type"]]
        label = f"{kind} {len(asked)}"
        if kind not in modalities:
            raise UnsupportedModality(
                f"message {index} holds a part of type {part['type']!r}, but {_refusal(kind, modalities)}",
                item=label,
            )
        source = _source(part, kind)
        if source is None:
            source = columns.take(kind)
            if source is None and columns.required and kind not in columns.marked:
                raise MessageError(
                    f"the {kind} part of message {index} has no source: give it one of "
                    f"{', '.join(_source_keys(kind))}, or pass {kind}s=[...]"
                )
        asked.append(Asked(kind, source, part.get("use_audio_in_video")))
        content.append({"type": kind})
    if not modalities:
        return "".join(part["text"] for part in content)
    return content


def _refusal(kind: str, modalities: frozenset[str]) -> str:
    if not modalities:
        return f"this model reads text only: use a model that takes {kind}s, or leave it out"
    return f"this model takes {_taken(modalities)}: leave it out, or use a model that takes {kind}s"


def _taken(modalities: frozenset[str]) -> str:
    return ", ".join(("text", *(kind for kind in KINDS if kind in modalities)))


def _guess_type(part: Mapping[str, Any]) -> str:
    for kind in ("text", *_PART_TYPES):
        if part.get(kind) is not None:
            return kind
    return f"unknown, keys {sorted(map(str, part))}"


def _source_keys(kind: str) -> tuple[str, ...]:
    return (kind, f"{kind}_url", f"input_{kind}", "url", "path", "bytes")


def _source(part: Mapping[str, Any], kind: str) -> Any:
    for key in _source_keys(kind):
        # Tables store a part's absent keys as None, so None means absent.
        value = part.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping) and value.get("url") is not None:
            return value["url"]
        if isinstance(value, Mapping) and isinstance(value.get("data"), str):
            return f"data:{kind}/{value.get('format') or '*'};base64,{value['data']}"  # OpenAI's input_audio
        return value
    encoded = part.get("base64")
    return None if encoded is None else f"data:{kind}/*;base64,{encoded}"
