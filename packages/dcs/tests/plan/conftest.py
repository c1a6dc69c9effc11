"""An oracle for plans: global tensors of unique integers, and what a rank has to hold, by plain slicing."""

import numpy as np
import pytest
from dcs.layout import Layout, TensorSpec
from dcs.plan import blocks, plan

SENTINEL = 0xA5


class Oracle:
    """Global tensors by name; every element is another integer, as far as the dtype goes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        first = 1
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            self.tensors[name] = np.arange(first, first + size).astype(dtypes[name]).reshape(shape)
            first += size

    def own(self, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
        """What a rank's tensor holds, and a mask of the elements that some piece covers."""
        if not spec.pieces:
            return self.tensors[spec.name], np.ones(spec.shape, bool)
        value = np.full(
            spec.shape, int.from_bytes(bytes([SENTINEL]) * np.dtype(spec.dtype).itemsize), spec.dtype
        )
        covered = np.zeros(spec.shape, bool)
        for piece in spec.pieces:
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent, strict=True))
            where = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.own_extent, strict=True))
            value[where] = self.tensors[piece.source][box].reshape(piece.own_extent)
            covered[where] = True
        return value, covered

    def memory(self, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """A rank's flat buffer, and a mask of the bytes in it that are weights."""
        starts, nbytes = layout.offsets()
        memory = np.full(nbytes, SENTINEL, np.uint8)
        weights = np.zeros(nbytes, bool)
        for start, spec in zip(starts, layout.tensors, strict=True):
            value, covered = self.own(spec)
            memory[start : start + spec.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            weights[start : start + spec.nbytes] = np.repeat(covered.reshape(-1), value.itemsize)
        return memory, weights

    def execute(self, destination: Layout, sources: list[Layout], chunk_bytes: int = 1 << 20, **options):
        """Make the plan and carry it out, chunk by chunk; check every byte. Returns bytes by source."""
        made = plan(destination, sources, **options)
        expected, weights = self.memory(destination)
        twin = any(source == destination for source in sources)
        if twin:
            weights[:] = True  # alignment and padding come along
        memory = np.full(len(expected), SENTINEL, np.uint8)
        times = np.zeros(len(expected), np.int64)
        sent: list[int] = []
        assert len(made.blocks) == len(sources)
        for layout, rows in zip(sources, made.blocks, strict=True):
            held, useful = self.memory(layout)
            taken, placed = blocks.source_side(rows), blocks.destination_side(rows)
            blocks.check(taken, len(held))
            blocks.check(placed, len(memory))
            sent.append(0)
            for left, right in zip(
                blocks.cut(taken, chunk_bytes), blocks.cut(placed, chunk_bytes), strict=True
            ):
                packed = np.zeros(blocks.nbytes(left), np.uint8)
                sent[-1] += blocks.gather(left, held, packed)
                blocks.scatter(right, memory, packed)
                assert twin or useful[_addresses(left)].all()
            np.add.at(times, _addresses(placed), 1)
        assert np.array_equal(memory, expected)
        assert np.array_equal(times, weights)
        assert sum(sent) == made.nbytes == np.count_nonzero(weights)
        return sent


def _addresses(selection: np.ndarray) -> np.ndarray:
    found = [np.empty(0, np.int64)]
    for start, stride, run, count in selection.tolist():
        found.append((start + np.arange(count)[:, None] * stride + np.arange(run)).reshape(-1))
    return np.concatenate(found)


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle
