"""The batches that every side moves: rows as a rollout has them, each with a number to be known by again.

Needs numpy alone, as it runs in the peers' environments too.
"""

from dataclasses import dataclass

import numpy as np

TEXT = {
    "tokens": np.int64,
    "loss_mask": np.int64,
    "logprobs": np.float32,
    "ref_logprobs": np.float32,
    "advantages": np.float32,
}
"""Five ragged fields: 28 bytes a token, 600 tokens on average, 16.8 KB a sample."""
SHORTEST, LONGEST = 200, 1000
IMAGE = (3, 224, 224)
"""Shape of `pixel_values` of a sample, float32: 602 KB."""
PATCH = 1176
"""Width of a row of `patches`, float32."""
SEED = 20


@dataclass(frozen=True)
class Rows:
    """Samples as columns.

    Attributes:
        ragged: name -> one array ``[length, ...]`` a sample.
        images: float32 ``[samples, 3, 224, 224]``, or None.
    """

    ragged: dict[str, list[np.ndarray]]
    images: np.ndarray | None

    def __len__(self) -> int:
        return len(self.ragged["tokens"])

    @property
    def nbytes(self) -> int:
        """Of all values."""
        ragged = sum(row.nbytes for rows in self.ragged.values() for row in rows)
        return ragged + (0 if self.images is None else self.images.nbytes)

    def fields(self) -> dict[str, list[np.ndarray] | np.ndarray]:
        """As a store of columns takes them."""
        return {**self.ragged} if self.images is None else {**self.ragged, "pixel_values": self.images}

    def number(self, first: int) -> None:
        """Write consecutive numbers into the first token, and the first pixel, of each sample."""
        for row, tokens in enumerate(self.ragged["tokens"]):
            tokens[0] = first + row
        if self.images is not None:
            self.images[:, 0, 0, 0] = np.arange(first, first + len(self))


def rows(samples: int, *, images: bool = False, patches: int = 0) -> Rows:
    """The same samples at every call.

    Args:
        samples: how many.
        images: with the dense field `pixel_values`.
        patches: rows of `patches`, on average, a sample; 0: without that ragged field.
    """
    random = np.random.default_rng(SEED)
    lengths = random.integers(SHORTEST, LONGEST + 1, samples)
    ragged = {
        name: [random.integers(0, 1000, length).astype(dtype) for length in lengths]
        for name, dtype in TEXT.items()
    }
    if patches:
        counts = random.integers(1, 2 * patches, samples)
        ragged["patches"] = [random.random((count, PATCH), np.float32) for count in counts]
    return Rows(ragged, random.random((samples, *IMAGE), np.float32) if images else None)


def small() -> Rows:
    """One sample of 16 tokens and their logprobs: 192 bytes."""
    return Rows({"tokens": [np.arange(16)], "logprobs": [np.zeros(16, np.float32)]}, None)
