"""What `relax.backends.inference.sglang.tensors` writes, read again."""

import base64
import json
import struct
from typing import Any

import numpy as np

PREFIX = "data:application/x-relax-tensors;base64,"


def read(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The head and the arrays of one packed piece: length of the head in 4 bytes, head, arrays."""
    if not text.startswith(PREFIX):
        raise ValueError("a request's media are tensors, or files, not both")
    content = base64.b64decode(text[len(PREFIX) :], validate=True)
    (size,) = struct.unpack_from("<I", content)
    head = json.loads(content[4 : 4 + size])
    place, arrays = 4 + size, {}
    for name, dtype, shape in head["arrays"]:
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(content, kind, count, place).reshape(shape)
        place += count * kind.itemsize
    if "levels" in arrays:  # of pictures of 8 bits, and the 256 values that each channel has
        levels, values = arrays.pop("levels"), arrays.pop("values")
        parts = levels.reshape(len(levels), len(values), -1)
        pixels = np.empty(parts.shape, values.dtype)
        for channel, known in enumerate(values):
            pixels[:, channel] = known.take(parts[:, channel])
        arrays["pixels"] = pixels.reshape(levels.shape)
    return head, arrays
