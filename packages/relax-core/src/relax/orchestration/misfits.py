"""What only the built model can tell: which layers take an adapter, and whether the files hold its weights.

It is built without memory, on torch's meta device: a model of any size takes a second or two.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax.backends.model_files import ModelFolderError
from relax.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 3
"""Weights that do not fit, of which a message names as many."""


def check_misfits(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError for what `misfits` finds."""
    if faults := list(misfits(config, folder)):
        raise ConfigError("this configuration cannot run:\n  " + "\n  ".join(faults))


def misfits(config: RunConfig, folder: Path) -> Iterator[str]:
    """Of the model in a folder: adapters for layers that it has not, and, where a server reads the folder,
    weights that are not those that its config.json describes. Other engines, and trainers, load the weights
    before anything else and refuse such themselves; a server takes minutes to start, and the first version
    would be refused after that.
    """
    from relax.backends.models import has_weights

    adapts = config.actor.backend == "torch_native" and config.actor.lora.rank > 0
    served = config.rollout.engine == "sglang" and has_weights(folder)
    if not (adapts or served):
        return
    from relax.backends.models import named_weights
    from relax.backends.train.errors import SettingsError
    from relax.backends.train.torch_native.adapters import check_adapters

    try:
        model = _without_memory(folder, config.model.dtype)
    except ModelFolderError as error:
        yield f"model.path = {config.model.path!r}: {error}"
        return
    if adapts:
        try:
            check_adapters(model, config.actor.lora)
        except SettingsError as error:
            yield str(error)
    if served:
        yield from _foreign_weights(config, folder, dict(named_weights(model)))


def _without_memory(folder: Path, dtype: str) -> Any:
    from relax.backends.models import build_model
    from relax.backends.train.torch_native.hollow import parameters_on_meta

    with parameters_on_meta():
        return build_model(folder, dtype, weights=False)


def _foreign_weights(config: RunConfig, folder: Path, built: "Mapping[str, Tensor]") -> Iterator[str]:
    from relax.backends.inference.errors import EngineError
    from relax.backends.inference.sglang.model import stored_weights

    try:
        stored, _ = stored_weights(folder, config.model.dtype)
    except EngineError as error:
        yield f"model.path = {config.model.path!r}: {error}"
        return
    found = []
    for name in sorted(stored.keys() | built.keys()):
        if name not in built:
            found.append(f"{name} is none of its")
        elif name not in stored:
            found.append(f"{name} is missing")
        elif stored[name].shape != built[name].shape:
            found.append(f"{name} is {list(stored[name].shape)} and has to be {list(built[name].shape)}")
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        yield (
            f"model.path = {config.model.path!r}: the weights in {folder} are not those of the model that "
            f"its config.json describes: {'; '.join(found[:SHOWN])}{more}. Put config.json and weights there "
            f"that were saved together"
        )
