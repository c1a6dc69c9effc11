"""The routes of the running rows: captured when a token is first fed, kept as they are from then on.

A decode step adds the very tensors that its routers made to a list; they become rows' own arrays only when a
row comes or goes, or when many steps are listed: a few vector operations for many steps, and no Python for a
token. A recomputation at a commit follows what was captured, and captures nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax.backends.routes import Routes, Routing

_STEPS = 32
"""Decode steps between two sortings at the most."""


class CapturedRoutes:
    """Row i is the running batch's row i.

    Args:
        routing: of the model.
        slots: the most rows.
    """

    def __init__(self, routing: Routing, slots: int) -> None:
        self._narrow = getattr(torch, routing.dtype.name)
        self._steps: list[list[Tensor]] = []
        self._prompts: list[Routes] = []
        self._sampled = np.zeros((slots, 64, len(routing.layers), routing.top_k), routing.dtype)
        self._counts = np.zeros(slots, np.int64)

    def enter(self, prompts: Sequence[Routes]) -> None:
        """Add rows behind the others, each with the routes of its prompt, which rows may share."""
        self._sort()
        self._counts[len(self._prompts) : len(self._prompts) + len(prompts)] = 0
        self._prompts.extend(prompts)

    def step(self) -> list[Tensor]:
        """Where the next decode step of all rows adds its choices, int64 [rows, top_k] for each layer."""
        if len(self._steps) == _STEPS:
            self._sort()
        chosen: list[Tensor] = []
        self._steps.append(chosen)
        return chosen

    def of(self, row: int) -> Routes:
        """A new array [prompt + sampled - 1, layers, top_k]: all that has been fed of a row."""
        self._sort()
        return np.concatenate([self._prompts[row], self._sampled[row, : self._counts[row]]])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows take the places of others."""
        self._sort()
        self._sampled[list(targets)] = self._sampled[list(sources)]
        self._counts[list(targets)] = self._counts[list(sources)]
        for source, target in zip(sources, targets, strict=True):
            self._prompts[target] = self._prompts[source]

    def keep(self, rows: int) -> None:
        """Forget all rows but the first ones."""
        self._sort()
        del self._prompts[rows:]

    def _sort(self) -> None:
        """Move what the steps have listed to the rows' own arrays."""
        if not self._steps:
            return
        steps, rows = len(self._steps), len(self._prompts)
        chosen = torch.stack([each for step in self._steps for each in step])
        self._steps = []
        counts = self._counts[:rows]
        _, width, layers, top_k = self._sampled.shape
        if (most := int(counts.max()) + steps) > width:
            wider = np.zeros((len(self._sampled), 2 * most, layers, top_k), self._sampled.dtype)
            wider[:, :width] = self._sampled
            self._sampled = wider
        fresh = chosen.to(self._narrow).cpu().numpy().reshape(steps, layers, rows, top_k)
        places = counts[:, None] + np.arange(steps)
        self._sampled[np.arange(rows)[:, None], places] = fresh.transpose(2, 0, 1, 3)
        counts += steps
