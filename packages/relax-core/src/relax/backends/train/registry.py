"""Training backends by name, or by import path for one that lives elsewhere.

A backend is a callable `(folder, *, settings, dtype, device, seed, torch_threads) -> TrainBackend`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from relax.backends.train.errors import UnknownBackendError
from relax.registry import Registry

if TYPE_CHECKING:  # a name can be looked up without torch
    from relax.backends.train.base import TrainBackend

BACKENDS = Registry(
    "training backend", {"torch_native": "relax.backends.train.torch_native:TorchNative"}, UnknownBackendError
)


def train_backend(name: str) -> "Callable[..., TrainBackend]":
    """The backend of a registered name, or of an import path `package.module:attribute`.

    Raises:
        UnknownBackendError: neither leads to a callable.
    """
    found = BACKENDS.load(name)
    if not callable(found):
        raise UnknownBackendError(
            f"training backend {name!r} is a {type(found).__name__}, which cannot be called"
        )
    return cast("Callable[..., TrainBackend]", found)
