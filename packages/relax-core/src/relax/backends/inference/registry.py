"""Engines by name. One line adds one; an import path `package.module:Class` works without any."""

import importlib
from typing import Any

from relax.backends.inference.errors import UnknownEngine

ENGINES: dict[str, str] = {
    "transformers": "relax.backends.inference.transformers_engine:TransformersEngine",
}


def engine_class(name: str) -> type[Any]:
    """The class registered as `name`, or found at the import path `name`. Imports it, and nothing else.

    Raises:
        UnknownEngine: neither a name nor a path that leads to a class.
    """
    path = ENGINES.get(name, name)
    module_name, separator, attribute = path.partition(":")
    if not separator:
        raise UnknownEngine(
            f"engine {name!r} is neither one of {sorted(ENGINES)} nor an import path like "
            f"'my_package.engines:MyEngine'"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnknownEngine(f"engine {name!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise UnknownEngine(f"engine {name!r} leads to {found!r}, which is no class")
    return found
