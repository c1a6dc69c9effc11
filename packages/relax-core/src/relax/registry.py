"""Things found by name: a table of names and import paths, and any other by an import path of its own.

Nothing is imported before it is asked for, so looking a name up costs nothing.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Registry:
    """One kind of thing.

    Attributes:
        kind: what a message calls it, such as "training backend".
        entries: name -> "package.module:attribute".
        fault: the error raised for what cannot be found.
    """

    kind: str
    entries: Mapping[str, str]
    fault: type[Exception]

    def path(self, name: str) -> str:
        """The import path behind a name; raises `fault` for one that is neither registered nor a path."""
        found = self.entries.get(name, name)
        module, colon, attribute = found.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise self.fault(
                f"{self.kind} {name!r} is not known{nearest(name, self.entries)}: expected one of "
                f"{', '.join(self.entries)}, or an import path like 'my_package.my_module:attribute'"
            )
        return found

    def load(self, name: str) -> Any:
        """What a name stands for, imported; raises `fault` when that fails."""
        module_name, _, attribute = self.path(name).partition(":")
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise self.fault(
                f"{self.kind} {name!r}: module {module_name!r} cannot be imported ({error}); "
                "install it or set PYTHONPATH"
            ) from error
        if not hasattr(module, attribute):
            raise self.fault(
                f"{self.kind} {name!r}: {module_name} has no attribute {attribute!r}"
                f"{nearest(attribute, vars(module))}"
            )
        return getattr(module, attribute)


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` for the known word nearest to one that is not; empty when none is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""
