"""Conversations in the shapes people have them, brought to what a chat template reads, media taken out.

Accepted content: a string, or a list of OpenAI-style parts (``text``, ``image_url``) and Hugging Face style
ones (``image`` with ``image``, ``url``, ``path``, ``base64`` or nothing). With ``images=[...]``, a
``<image>`` in the text and an ``image`` part without a source take the next one of the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_processor.errors import MessageError, SpanMismatch, UnsupportedModality

IMAGE_MARK = "<image>"

_TEXT_TYPES = ("text", "input_text", "output_text")
_IMAGE_TYPES = ("image", "image_url", "input_image")
_SOURCE_KEYS = ("image", "image_url", "url", "path", "bytes")


class ImageColumn:
    """The ``images=`` argument, taken one by one as the text asks for them.

    With ``required=False`` image parts may lack a source: only the text is wanted.
    """

    def __init__(self, images: Sequence[Any] | None, *, required: bool = True) -> None:
        if images is not None and (isinstance(images, str | bytes) or not isinstance(images, Sequence)):
            raise MessageError(
                f"images must be a list of sources, not {type(images).__name__}: wrap a single one in [ ]"
            )
        self.given = images is not None
        self.required = required
        self._images = list(images or ())
        self._asked = 0

    def __len__(self) -> int:
        return len(self._images)

    def take(self) -> Any:
        self._asked += 1
        return self._images[self._asked - 1] if self._asked <= len(self._images) else None

    def check(self) -> None:
        """Raises: SpanMismatch, unless exactly all were asked for."""
        if self._asked != len(self._images):
            raise SpanMismatch(
                f"the text asks for {self._asked} images ({IMAGE_MARK} marks and parts without a source), "
                f"but images= holds {len(self._images)}: they must be as many",
                item=f"image {min(self._asked, len(self._images))}",
            )


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], column: ImageColumn, modalities: frozenset[str]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages for the chat template, and the image sources in their order. The input is not changed.

    For a model without media, lists of text parts become one string: its template knows nothing else.

    Raises:
        MessageError: a message or part of a shape that is not understood.
        UnsupportedModality: media the model does not take.
    """
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence) or not messages:
        raise MessageError(f"a conversation is a non-empty list of messages, not {messages!r:.80}")
    prepared, sources = [], []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise MessageError(f'message {index} must be a mapping with a "role", not {message!r:.80}')
        copied = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            if column.given and IMAGE_MARK in content:
                copied["content"] = _content(list(_split(content)), index, column, modalities, sources)
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            copied["content"] = _content(content, index, column, modalities, sources)
        elif content is not None:
            raise MessageError(
                f"the content of message {index} is {type(content).__name__}: use a string or a list of parts"
            )
        prepared.append(copied)
    return prepared, sources


def replace_marks(text: str, column: ImageColumn, placeholder: str) -> tuple[str, list[Any]]:
    """Text for no chat template: every ``<image>`` becomes `placeholder`; also the sources, in order."""
    sources = []
    pieces = []
    for part in _split(text):
        if part["type"] == "image":
            sources.append(column.take())
            pieces.append(placeholder)
        else:
            pieces.append(part["text"])
    return "".join(pieces), sources


def _split(text: str) -> Iterator[dict[str, Any]]:
    for position, piece in enumerate(text.split(IMAGE_MARK)):
        if position:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _content(
    parts: Sequence[Any], index: int, column: ImageColumn, modalities: frozenset[str], sources: list[Any]
) -> list[dict[str, Any]] | str:
    flat: list[dict[str, Any]] = []
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
            flat.extend(
                _split(text) if column.given and IMAGE_MARK in text else [{"type": "text", "text": text}]
            )
        elif kind in _IMAGE_TYPES:
            flat.append({"type": "image", "source": _image_source(part)})
        else:
            taken = ", ".join(("text", *sorted(modalities)))
            raise UnsupportedModality(
                f"message {index} has a part of type {kind!r}; this model takes {taken}", item=str(kind)
            )
    content: list[dict[str, Any]] = []
    for part in flat:
        if part["type"] == "text":
            content.append(part)
            continue
        label = f"image {len(sources)}"
        if "image" not in modalities:
            raise UnsupportedModality(
                f"message {index} holds an image, but this model reads text only: use a vision model or "
                "leave it out",
                item=label,
            )
        source = part.get("source")
        if source is None:
            source = column.take()
            if source is None and column.required and not column.given:
                raise MessageError(
                    f"an image part of message {index} has no source: give it one of "
                    f"{', '.join(_SOURCE_KEYS)}, or pass images=[...]"
                )
        sources.append(source)
        content.append({"type": "image"})
    if not modalities:
        return "".join(part["text"] for part in content)
    return content


def _guess_type(part: Mapping[str, Any]) -> str:
    for kind in ("text", "image", "image_url"):
        if part.get(kind) is not None:
            return kind
    return f"unknown, keys {sorted(map(str, part))}"


def _image_source(part: Mapping[str, Any]) -> Any:
    for key in _SOURCE_KEYS:
        # Tables store a part's absent keys as None, so None means absent.
        value = part.get(key)
        if value is not None:
            if isinstance(value, Mapping) and "url" in value:
                return value["url"]
            return value
    encoded = part.get("base64")
    return None if encoded is None else f"data:image/*;base64,{encoded}"
