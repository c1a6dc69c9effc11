"""Which part of a model a tensor belongs to, so that `actor.freeze` can leave it as it is.

A frozen parameter gets no gradient, no moments and no masters; it is published, saved and exported like any
other.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from relax.backends.train.errors import SettingsError
from relax.config.freeze import PARTS, Part

_TOWERS = {"visual": "vision", "audio_tower": "audio"}
# What brings a tower's output to the width of the language model.
_PROJECTORS = ("merger", "merger_list", "deepstack_merger_list", "proj1", "proj2")


def part_of(name: str) -> Part:
    """The part of the tensor with this Hugging Face name, of the Qwen-VL and Qwen-Omni families."""
    words = name.split(".")
    for index, word in enumerate(words):
        if word in _TOWERS:
            inside = words[index + 1] if index + 1 < len(words) else ""
            if inside in _PROJECTORS:
                return "projector"
            return "vision" if _TOWERS[word] == "vision" else "audio"
    return "language"


def freeze(named: Iterable[tuple[str, nn.Parameter]], parts: Sequence[Part]) -> None:
    """Take the gradients of these parts away. `named`: all parameters of a rank by Hugging Face name."""
    for name, parameter in named:
        if part_of(name) in parts:
            parameter.requires_grad_(False)


def require_parts(names: Iterable[str], parts: Sequence[Part]) -> None:
    """See that a model has what is to be frozen, and something besides.

    Args:
        names: of all its tensors.
        parts: to be frozen.

    Raises:
        SettingsError: it has not.
    """
    if not parts:
        return
    found = {part_of(name) for name in names}
    for part in parts:
        if part not in found:
            raise SettingsError(
                f"actor.freeze names {part!r}, but the model has {_listed(found)} only; leave it out"
            )
    if found <= set(parts):
        raise SettingsError(
            f"actor.freeze = {list(parts)} leaves nothing of the model to train, which has {_listed(found)}; "
            "leave one of them out"
        )


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(part for part in PARTS if part in set(parts))
