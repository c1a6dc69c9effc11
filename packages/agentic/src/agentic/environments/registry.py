"""Environments by name: those that come with the package, and any other by its import path."""

import difflib
import importlib
from collections.abc import Callable, Iterable

from ..environment import Environment
from ..errors import UnknownEnvironment

ENVIRONMENTS: dict[str, str] = {
    "calculator": "agentic.environments.calculator:Calculator",
    "single_turn": "agentic.environments.single_turn:SingleTurn",
}
"""Name -> import path of the factory. Nothing is imported before it is asked for."""


def environment_factory(name: str) -> Callable[..., Environment]:
    """What makes environments of a kind: call it with the environment's own options, once an episode.

    Args:
        name: a name in `ENVIRONMENTS`, or "package.module:attribute" for a class or function of your own.

    Raises:
        UnknownEnvironment: no such name, module or attribute; the message lists what there is, the nearest
        first.
    """
    path = ENVIRONMENTS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not all(part.isidentifier() for part in module_name.split(".")):
        raise UnknownEnvironment(
            f"environment {name!r} is not known; there are {_nearest_first(name, ENVIRONMENTS)}. "
            'One of your own is named by its import path, "package.module:attribute"'
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not _is_part_of(error.name, module_name):
            raise  # The module is there, but something it imports is not: its author's error, shown as it is.
        raise UnknownEnvironment(
            f"environment {name!r}: there is no module {module_name!r} to import; expected "
            f'"package.module:attribute", or one of {_nearest_first(name, ENVIRONMENTS)}'
        ) from error
    factory: Callable[..., Environment] | None = getattr(module, attribute, None)
    if not callable(factory):
        found = [
            key for key, value in vars(module).items() if hasattr(value, "reset") and hasattr(value, "step")
        ]
        raise UnknownEnvironment(
            f"environment {name!r}: module {module_name!r} has no class or function {attribute!r}; its "
            f"environments are {_nearest_first(attribute, found)}"
        )
    return factory


def _nearest_first(name: str, known: Iterable[str]) -> str:
    def distance(candidate: str) -> tuple[float, str]:
        return -difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio(), candidate

    return ", ".join(sorted(known, key=distance)) or "none"


def _is_part_of(missing: str | None, module_name: str) -> bool:
    return missing is not None and (module_name + ".").startswith(missing + ".")
