"""A trainer that does the quick start's step, and keeps its state in the memory of peers.

    python our_trainer.py '{"folder": PATH, "keepers": [ADDRESS, ...], "name": N}'

The state is what the trainer resumes from: weights, moments, random state.
"""

# `asked` first: it puts the folder of the benchmarks on the path.
from asked import answer, work  # isort: split

import contextlib
import statistics
import time
from typing import Any

import torch
from dcs.replicas import Replicas
from queue_sides.buffers import touched
from quick_start_step import QuickStartStep

WAIT_SECONDS = 60.0


def main() -> None:
    words = work()
    with (
        contextlib.closing(QuickStartStep(words["folder"])) as step,
        Replicas(words["keepers"], words["name"]) as replicas,
    ):
        trainer = Trainer(step, replicas)
        answer({"steps": trainer.steps, "restore": trainer.restore, "bulk": trainer.bulk})


class Trainer:
    """What the process does."""

    def __init__(self, step: QuickStartStep, replicas: Replicas) -> None:
        self._step = step
        self._replicas = replicas
        self._saved = 0

    def steps(self, count: int, save: bool) -> dict[str, float]:
        """Seconds of the median step of so many, with its state saved or only looked up; of a mean in `save`.

        One step comes before them, of which only what is still done in the background is measured: so the
        copies of a step are made during each that counts, as in a run.
        """
        self._do(save)
        seconds, saving = [], 0.0
        for _ in range(count):
            begun = time.perf_counter()
            saving += self._do(save)
            seconds.append(time.perf_counter() - begun)
        if save:
            self._replicas.wait(self._saved, WAIT_SECONDS)
        return {"seconds": statistics.median(seconds), "saving": saving / count}

    def _do(self, save: bool) -> float:
        self._step()
        tree = self._tree()
        if not save:
            return 0.0
        self._saved += 1
        before = time.perf_counter()
        self._replicas.save(self._saved, tree)
        return time.perf_counter() - before

    def restore(self) -> dict[str, int]:
        """Do a step, and raise unless its state comes back bit for bit; bytes of its tensors."""
        self.steps(1, save=True)
        expected = self._tree()
        restored = self._replicas.restore(WAIT_SECONDS)
        if restored is None or restored[0] != self._saved:
            raise RuntimeError(f"step {self._saved} was saved, {restored and restored[0]} is the newest held")
        found, tensors = restored[1]["tensors"], expected["tensors"]
        wrong = [name for name in tensors if not torch.equal(tensors[name], found[name])]
        if wrong or restored[1]["data"] != expected["data"]:
            raise RuntimeError(
                f"{len(wrong)} of {len(tensors)} tensors came back with other bits: {wrong[:4]}"
            )
        return {"bytes": sum(tensor.nbytes for tensor in tensors.values())}

    def bulk(self, nbytes: int) -> dict[str, float]:
        """Save a large tensor; seconds to freeze it, and until all copies of it are held."""
        self._saved += 1
        tree = {"large": torch.from_numpy(touched(nbytes))}
        begun = time.perf_counter()
        saving = self._replicas.save(self._saved, tree)
        frozen = time.perf_counter()
        saving.wait(WAIT_SECONDS)
        return {"freeze": frozen - begun, "held": time.perf_counter() - begun}

    def _tree(self) -> dict[str, Any]:
        state = self._step.trainer.state()
        return {"tensors": dict(state.tensors), "data": dict(state.data)}


if __name__ == "__main__":
    main()
