"""Opening media containers with PyAV: only known formats, only the bytes given, errors in our words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omni_processor.encoded import Encoded
from omni_processor.errors import Undecodable

if TYPE_CHECKING:
    from av.container import InputContainer

FORMATS = (
    *("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg", "ivf", "gif"),
    *("wav", "w64", "flac", "mp3", "aac", "aiff", "caf", "au", "amr", "ac3", "eac3"),
)
"""Containers that are opened. Of the others some are lists of further files or addresses (hls, concat, dash)
and some take any bytes for media.
"""

_WEB_PAGES = (b"<!doctype html", b"<html")


@contextmanager
def opened(encoded: Encoded, item: str, noun: str) -> Iterator[InputContainer]:
    """The container of a file's bytes.

    Args:
        encoded: the file.
        item: which item of the sample, for messages.
        noun: what is expected, with its article: ``"a video"``.

    Raises:
        Undecodable: no container of `FORMATS`, or whatever decoding inside the block trips over.
    """
    import av
    from av.error import FFmpegError

    if encoded.data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_WEB_PAGES):
        raise Undecodable(
            f"this is an HTML page, not {noun} (a failed download?)", item=item, source=encoded.label
        )
    # The whitelist of protocols is what keeps a container from having other files or addresses opened.
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
    try:
        container = av.open(io.BytesIO(encoded.data), "r", options=options)
    except (FFmpegError, ValueError) as error:
        raise Undecodable(
            f"not {noun} in a container read here ({', '.join(FORMATS)}), or its header is damaged or cut "
            f"off; it starts with {encoded.data[:12]!r} ({_reason(error)})",
            item=item,
            source=encoded.label,
        ) from error
    try:
        yield container
    except (FFmpegError, ValueError) as error:
        raise Undecodable(
            f"{noun} that is damaged or cut off: {_reason(error)}", item=item, source=encoded.label
        ) from error
    finally:
        container.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
