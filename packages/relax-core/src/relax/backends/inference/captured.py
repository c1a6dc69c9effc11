"""The routes of the running rows: captured when a token is first fed, kept as they are from then on.

A decode step writes its choices straight into a sheet of this file; sheets are turned into rows' own arrays
only when a row comes or goes, or the sheets run out: a few vector operations for many steps, and no Python
for a token. A recomputation at a commit follows what was captured, and captures nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax.backends.routes import Routes, Routing

_SHEETS = 32
"""Decode steps between two sortings at the most."""


class CapturedRoutes:
    """Row i is the running batch's row i.

    Args:
        routing: of the model.
        slots: the most rows.
        device: where the network computes.
    """

    def __init__(self, routing: Routing, slots: int, device: torch.device) -> None:
        self._routing = routing
        layers = len(routing.layers)
        self._sheets = torch.empty(_SHEETS, layers, slots, routing.top_k, dtype=torch.int64, device=device)
        self._narrow = getattr(torch, routing.dtype.name)
        self._steps = 0
        self._rows = 0
        self._prompts: list[Routes] = []
        self._sampled = np.zeros((slots, 64, layers, routing.top_k), routing.dtype)
        self._counts = np.zeros(slots, np.int64)

    def enter(self, prompts: Sequence[Routes]) -> None:
        """Add rows behind the others, each with the routes of its prompt, which rows may share."""
        self._sort()
        self._counts[len(self._prompts) : len(self._prompts) + len(prompts)] = 0
        self._prompts.extend(prompts)

    def sheet(self) -> Tensor:
        """int64 [layers, rows, top_k]: where the next decode step of all rows writes its choices."""
        if self._steps == _SHEETS:
            self._sort()
        self._rows = len(self._prompts)
        sheet = self._sheets[self._steps, :, : self._rows]
        self._steps += 1
        return sheet

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
        """Move what the sheets hold to the rows' own arrays."""
        if not self._steps:
            return
        steps, rows, counts = self._steps, self._rows, self._counts[: self._rows]
        self._steps = 0
        if (most := int(counts.max()) + steps) > self._sampled.shape[1]:
            shape = self._sampled.shape
            wider = np.zeros((shape[0], 2 * most, *shape[2:]), self._sampled.dtype)
            wider[:, : shape[1]] = self._sampled
            self._sampled = wider
        fresh = self._sheets[:steps, :, :rows].to(self._narrow).cpu().numpy().transpose(2, 0, 1, 3)
        places = counts[:, None] + np.arange(steps)
        self._sampled[np.arange(rows)[:, None], places] = fresh
        counts += steps
