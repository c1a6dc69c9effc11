"""Training backends by name, or by import path for one that lives elsewhere.

A backend is a callable `(folder, *, settings, dtype, device, seed, torch_threads) -> TrainBackend`.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import cast

from relax.backends.train.base import TrainBackend
from relax.backends.train.errors import UnknownBackendError

BACKENDS: dict[str, str] = {"torch_native": "relax.backends.train.torch_native:TorchNative"}
"""Name -> import path; imported when asked for, as a backend pulls its framework in."""


def train_backend(name: str) -> Callable[..., TrainBackend]:
    """The backend of a registered name, or of an import path `package.module:attribute`.

    Raises:
        UnknownBackendError: neither leads to a callable.
    """
    path = BACKENDS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, BACKENDS, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownBackendError(
            f"no training backend is called {name!r}; {meant}known: {sorted(BACKENDS)}, or an import path "
            f"'package.module:attribute'"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownBackendError(f"training backend {name!r} cannot be imported: {error}") from error
    if callable(found):
        return cast("Callable[..., TrainBackend]", found)
    raise UnknownBackendError(
        f"training backend {name!r} is a {type(found).__name__}, which cannot be called"
    )
