"""Engines by name. One line adds one; an import path `package.module:Class` works without any."""

from typing import Any

from relax.backends.inference.errors import UnknownEngine
from relax.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "transformers": "relax.backends.inference.transformers_engine:TransformersEngine",
        "sglang": "relax.backends.inference.sglang.engine:SglangEngine",
    },
    UnknownEngine,
)


def engine_class(name: str) -> type[Any]:
    """The class registered as `name`, or found at the import path `name`. Imports it, and nothing else.

    Raises:
        UnknownEngine: neither a name nor a path that leads to a class.
    """
    found = ENGINES.load(name)
    if not isinstance(found, type):
        raise UnknownEngine(f"engine {name!r} leads to {found!r}, which is no class")
    return found
