"""Training backends by name, or by import path for one that lives elsewhere.

A backend is a callable `(folder, *, settings, dtype, device, seed, torch_threads) -> TrainBackend`, a trainer
in one process. A rank backend is a callable `(RankSpec) -> RankBackend`, one rank of a trainer in many; a
`Gang` makes a trainer of all of them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from relax.backends.train.errors import UnknownBackendError
from relax.registry import Registry

if TYPE_CHECKING:  # a name can be looked up without torch
    from relax.backends.train.base import TrainBackend
    from relax.backends.train.ranks import RankBackend, RankSpec

BACKENDS = Registry(
    "training backend", {"torch_native": "relax.backends.train.torch_native:TorchNative"}, UnknownBackendError
)
RANK_BACKENDS = Registry(
    "training backend of many ranks",
    {
        "torch_native": "relax.backends.train.torch_native.rank:NativeRank",
        "megatron": "relax.backends.train.megatron.bridge:megatron_rank",
    },
    UnknownBackendError,
)


def train_backend(name: str) -> "Callable[..., TrainBackend]":
    """The backend of a registered name, or of an import path `package.module:attribute`.

    Raises:
        UnknownBackendError: neither leads to a callable.
    """
    return cast("Callable[..., TrainBackend]", _callable(BACKENDS, name))


def rank_backend(name: str) -> "Callable[[RankSpec], RankBackend]":
    """The rank backend of a registered name, or of an import path `package.module:attribute`.

    Raises:
        UnknownBackendError: neither leads to a callable.
    """
    return cast("Callable[[RankSpec], RankBackend]", _callable(RANK_BACKENDS, name))


def _callable(registry: Registry, name: str) -> Callable[..., Any]:
    found = registry.load(name)
    if not callable(found):
        raise UnknownBackendError(
            f"{registry.kind} {name!r} is a {type(found).__name__}, which cannot be called"
        )
    return found
