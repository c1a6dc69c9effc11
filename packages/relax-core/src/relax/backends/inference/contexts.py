"""What a prefill computes: sequences, and the pieces they are computed in."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "file"
"""Of a media item: what it was made from, encoded, for engines that take files; nothing here looks at it."""

_PREFILL_TOKENS = 4096
"""A prefill is cut into pieces of about this many tokens, padding included, to bound its masks' memory."""


@dataclass(frozen=True)
class Context:
    """A sequence to prefill: tokens int64 [k], and the media that its placeholders stand for."""

    tokens: NDArray[np.int64]
    media: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, tokens: NDArray[np.integer[Any]], media: Sequence[Mapping[str, Any]]) -> "Context":
        """From tokens of any width and the items of a request."""
        kept = [{name: value for name, value in item.items() if name != FILE} for item in media]
        return cls(tokens.astype(np.int64), kept)

    @property
    def key(self) -> bytes:
        """Equal for contexts of equal content."""
        found = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        for item in self.media:
            for name in sorted(item):
                value = item[name]
                found.update(f"{name}{getattr(value, 'shape', value)}".encode())
                if isinstance(value, np.ndarray):
                    found.update(np.ascontiguousarray(value).data)
        return found.digest()


def pieces(lengths: Sequence[int]) -> list[list[int]]:
    """Indices by length, so that little is padding, cut where rows times the longest would pass the limit."""
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if found and (len(found[-1]) + 1) * lengths[index] <= _PREFILL_TOKENS:
            found[-1].append(index)
        else:
            found.append([index])
    return found
