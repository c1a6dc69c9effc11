"""Handwritten digits as prompts with a picture, from the images that scikit-learn bundles (extra `demos`)."""

from typing import Any

import numpy as np
from PIL import Image

from relax.config.base import ConfigError

SIDE = 32
"""Pixels of a side after enlarging: one merged token of a tiny Qwen3-VL."""


def rows() -> list[dict[str, Any]]:
    """All 1,797 digits: {"image": PIL image, "prompt", "answer"}."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ConfigError(
            "data.path = 'relax.demos.digits:rows' needs scikit-learn: install relax-core[demos]"
        ) from error
    digits: Any = load_digits()
    pictures = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return [
        {
            "image": Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB"),
            "prompt": "<image>digit?",
            "answer": str(int(target)),
        }
        for picture, target in zip(pictures, digits.target, strict=True)
    ]
