"""Algorithms by name, or by import path for one of your own. Imports torch only to build."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec

from relax.algorithms.errors import AlgorithmError
from relax.algorithms.settings import GRPOSettings

if TYPE_CHECKING:
    from relax.algorithms.spec import Algorithm


@dataclass(frozen=True)
class Entry:
    """One line of the registry.

    Attributes:
        make: "module:attribute" of a function (name, settings) -> Algorithm, imported when built.
        settings: the dataclass of its settings.
        preset: what this name sets differently from the dataclass's own defaults.
    """

    make: str
    settings: type[GRPOSettings]
    preset: Mapping[str, Any]


_GRPO = "relax.algorithms.grpo:make"
ENTRIES: dict[str, Entry] = {
    "grpo": Entry(_GRPO, GRPOSettings, {"aggregation": "sequence"}),
    "dapo": Entry(_GRPO, GRPOSettings, {"aggregation": "token", "clip_high": 0.28}),
    "dr_grpo": Entry(_GRPO, GRPOSettings, {"aggregation": "fixed", "normalize_std": False}),
}


def names() -> list[str]:
    """The registered names."""
    return list(ENTRIES)


def check(name: str, settings: Mapping[str, Any] | None = None) -> GRPOSettings:
    """The whole settings of a registered algorithm: its preset with `settings` over it. Imports no torch.

    Raises:
        AlgorithmError: unknown name or setting (naming the nearest), or a value that does not fit.
    """
    entry = _entry(name)
    given = dict(settings or {})
    known = [field.name for field in fields(entry.settings)]
    for key in given:
        if key not in known:
            raise AlgorithmError(
                f"algorithm {name!r} has no setting {key!r}{_nearest(key, known)}: expected any of "
                f"{', '.join(known)}"
            )
    try:
        return msgspec.convert({**entry.preset, **given}, entry.settings)
    except msgspec.ValidationError as error:
        raise AlgorithmError(f"algorithm {name!r}: {error}") from error


def build(name: str, settings: Mapping[str, Any] | GRPOSettings | None = None) -> "Algorithm":
    """Make an algorithm.

    Args:
        name: a registered name, or "module:attribute" of a callable that takes the settings as keywords and
            returns an `Algorithm`.
        settings: a mapping is laid over the name's preset; a settings object is taken whole, without the
            preset.

    Raises:
        AlgorithmError: as `check`; or the import path cannot be imported, or does not make an Algorithm.
    """
    from relax.algorithms.spec import Algorithm

    if ":" in name:
        keywords = asdict(settings) if isinstance(settings, GRPOSettings) else dict(settings or {})
        algorithm = _load(name)(**keywords)
    else:
        complete = settings if isinstance(settings, GRPOSettings) else check(name, settings)
        algorithm = _load(_entry(name).make)(name, complete)
    if not isinstance(algorithm, Algorithm):
        raise AlgorithmError(
            f"algorithm {name!r} made a {type(algorithm).__name__}: expected a "
            f"relax.algorithms.spec.Algorithm"
        )
    return algorithm


def _entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise AlgorithmError(
            f"algorithm {name!r} is not known{_nearest(name, ENTRIES)}: expected one of "
            f"{', '.join(ENTRIES)}, or an import "
            "path like 'my_package.my_module:make_algorithm'"
        )
    return ENTRIES[name]


def _load(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise AlgorithmError(
            f"algorithm {path!r}: module {module_name!r} cannot be imported ({error}); install it or set "
            f"PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise AlgorithmError(
            f"algorithm {path!r}: {module_name} has no attribute "
            f"{attribute!r}{_nearest(attribute, dir(module))}"
        )
    return getattr(module, attribute)


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""
