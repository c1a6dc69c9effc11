"""Weights as an optimizer step changes them, for the tests of the delta codec."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray


def _rounded(masters: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bfloat16 bit patterns of float32 values, rounded to nearest even."""
    bits = masters.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Training(Protocol):
    def __call__(self, count: int, seed: int) -> Iterator[NDArray[np.uint8]]: ...


@pytest.fixture
def training() -> Training:
    """The bfloat16 weights (as bytes) of a model in training, step after step: float32 masters under Adam."""

    def steps(count: int, seed: int) -> Iterator[NDArray[np.uint8]]:
        rng = np.random.default_rng(seed)
        masters = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        momentum = rng.standard_normal(count, dtype=np.float32) * np.float32(0.36)
        while True:
            yield _rounded(masters).view(np.uint8)
            # Adam divides the mean gradient by its deviation, so what is left of the gradient's size is its
            # sign and how steady it is: noise of a fixed deviation, averaged with beta = 0.9.
            noise = rng.standard_normal(count, dtype=np.float32)
            momentum = np.float32(0.9) * momentum + np.float32(0.36 * 0.19**0.5) * noise
            masters = masters - np.float32(1e-6) * momentum

    return steps
