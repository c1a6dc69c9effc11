"""Encoded media: every way people name a file's bytes, read in one place without decoding them.

Accepted: a path (`str` or `Path`), a ``file://`` URL (percent-encoded), a data URL, bytes, a Hugging Face
datasets cell ``{"bytes": ..., "path": ...}``. Network addresses are refused.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from omni_processor.errors import Empty, SourceNotAllowed, TooLarge, Undecodable

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A media file's bytes."""

    data: bytes
    label: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Who reads, for messages and limits.

    Attributes:
        item: which item of the sample.
        noun: what is expected, with its article: ``"an image"``.
        max_bytes: of one file.
        limit: the field of `Limits` that says so.
    """

    item: str
    noun: str
    max_bytes: int
    limit: str

    def encoded(self, data: bytes, label: str) -> Encoded:
        """Bytes that are held already. Raises: Empty, TooLarge."""
        if not data:
            raise Empty("the source holds zero bytes", item=self.item, source=label)
        self.check_bytes(len(data), label)
        return Encoded(data, label)

    def check_bytes(self, count: int, label: str) -> None:
        """Raises: TooLarge."""
        if count > self.max_bytes:
            raise TooLarge(
                f"{count} bytes, the limit is {self.max_bytes}: shrink the file or raise "
                f"Limits({self.limit}=...)",
                item=self.item,
                source=label,
            )

    def read(self, source: Any) -> Encoded | None:
        """The bytes of a source that names a file or holds one; None for a source of another type.

        Raises:
            SourceNotAllowed: a network address, another host's file, or not a regular file.
            Undecodable: no such file, or a malformed URL.
            TooLarge: more bytes than allowed; found before they are read.
            Empty: no bytes.
        """
        match source:
            case bytes() | bytearray() | memoryview():
                return self.encoded(bytes(source), f"{len(source)} bytes")
            case os.PathLike():
                return self._from_path(os.fspath(source))
            case str():
                return self._from_text(source)
        return None

    def cell(self, cell: Mapping[str, Any]) -> Encoded:
        """A datasets cell. Raises: as `read`; Empty if it has neither bytes nor a path."""
        data, path = cell.get("bytes"), cell.get("path")
        if data is not None:
            if not isinstance(data, bytes | bytearray | memoryview):
                raise SourceNotAllowed(
                    f'"bytes" of a mapping is {type(data).__name__}; bytes were expected: decode what is '
                    'written as text, or name a file under "path"',
                    item=self.item,
                )
            return self.encoded(bytes(data), shorten(str(path)) if path else f"{len(data)} bytes")
        found = None if path is None else self.read(path)
        if found is None:
            raise Empty(
                f'a mapping needs "bytes" or "path" (a Hugging Face datasets cell); this one has '
                f"{sorted(map(str, cell))}",
                item=self.item,
            )
        return found

    def _from_text(self, text: str) -> Encoded:
        label = shorten(text)
        scheme = text[: text.index(":")].lower() if _SCHEME.match(text) else ""
        if scheme == "data":
            return self._from_data_url(text, label)
        if scheme == "file":
            try:
                parts = urlsplit(text)
                path = os.fsdecode(unquote_to_bytes(parts.path))
            except ValueError as error:  # brackets that are no address; text that is no Unicode
                raise Undecodable(
                    f"the URL is malformed ({error}): file:///path was expected",
                    item=self.item,
                    source=label,
                ) from error
            if parts.netloc not in ("", "localhost"):
                raise SourceNotAllowed(
                    f"the file is on another host ({parts.netloc}): copy it here and pass its path, or write "
                    "file:///path for a local one",
                    item=self.item,
                    source=label,
                )
            return self._from_path(path)
        if scheme in ("http", "https", "ftp", "s3", "gs", "hf") or "://" in text[:32]:
            raise SourceNotAllowed(
                f"{scheme}:// is not fetched here: download it yourself and pass the path, the bytes or a "
                "data URL",
                item=self.item,
                source=label,
            )
        if not text:
            raise Empty("the path is an empty string", item=self.item)
        return self._from_path(text)

    def _from_data_url(self, text: str, label: str) -> Encoded:
        header, comma, payload = text.partition(",")
        if not comma:
            raise Undecodable(
                "a data URL needs a comma before its payload: data:image/png;base64,...",
                item=self.item,
                source=label,
            )
        self.check_bytes(len(payload) * 3 // 4 if header.endswith(";base64") else len(payload) // 3, label)
        try:
            raw = unquote_to_bytes(payload) if "%" in payload else payload.encode()
        except UnicodeEncodeError as error:
            raise Undecodable(
                f"the data URL holds what is no Unicode text ({error.reason})", item=self.item, source=label
            ) from error
        if header.endswith(";base64"):
            # Line breaks are common in pasted base64 and padding is often lost; anything else wrong is an
            # error.
            compact = b"".join(raw.split()).rstrip(b"=")
            try:
                raw = base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
            except binascii.Error as error:
                raise Undecodable(
                    f"the data URL's base64 is malformed ({error})", item=self.item, source=label
                ) from error
        return self.encoded(raw, label)

    def _from_path(self, path: str | bytes) -> Encoded:
        label = shorten(os.fsdecode(path))
        try:
            # Non-blocking, so that a FIFO or a device is recognised instead of waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Undecodable(f"the file cannot be opened: {reason}", item=self.item, source=label) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
                raise SourceNotAllowed(f"this is {kind}, not {self.noun} file", item=self.item, source=label)
            self.check_bytes(status.st_size, label)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(self.max_bytes + 1)
        finally:
            os.close(descriptor)
        return self.encoded(data, label)


def shorten(text: str, width: int = 80) -> str:
    """At most about `width` characters that still name the source, never a whole payload; printable anywhere,
    whatever bytes a file name is of.
    """
    cut = text if len(text) <= width else f"{text[: width - 20]}...{text[-12:]}"
    return cut.encode(errors="backslashreplace").decode()
