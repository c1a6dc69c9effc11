"""The `transformers` engine, made to tell wrong routes for chosen groups."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from relax.backends.inference.transformers_engine import TransformersEngine

WRONG: dict[int, Callable[[np.ndarray], np.ndarray | None]] = {}
"""Ordinal of a group -> what becomes of the routes of its member 1."""


class MisroutingEngine(TransformersEngine):
    captures_routes = True

    def _record(self, started: float, finished: Any, **counts: int) -> None:
        super()._record(started, [_spoilt(one) for one in finished], **counts)


def _spoilt(finished: Any) -> Any:
    ordinal, member = (int(part) for part in finished.id.partition("/")[0].split("-")[:2])
    if member != 1 or ordinal not in WRONG:
        return finished
    generation = finished.generation
    routes = WRONG[ordinal](generation.routes)
    return type(finished)(finished.id, msgspec.structs.replace(generation, routes=routes))
