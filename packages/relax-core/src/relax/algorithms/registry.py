"""Algorithms by name, or by import path for one of your own. Imports torch only to build."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec

from relax.algorithms.errors import AlgorithmError
from relax.algorithms.settings import GRPOSettings
from relax.registry import Registry, nearest

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
ALGORITHMS = Registry("algorithm", {name: entry.make for name, entry in ENTRIES.items()}, AlgorithmError)


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
                f"algorithm {name!r} has no setting {key!r}{nearest(key, known)}: expected any of "
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
        algorithm = ALGORITHMS.load(name)(**keywords)
    else:
        complete = settings if isinstance(settings, GRPOSettings) else check(name, settings)
        algorithm = ALGORITHMS.load(name)(name, complete)
    if not isinstance(algorithm, Algorithm):
        raise AlgorithmError(
            f"algorithm {name!r} made a {type(algorithm).__name__}: expected a "
            f"relax.algorithms.spec.Algorithm"
        )
    return algorithm


def _entry(name: str) -> Entry:
    ALGORITHMS.path(name)
    return ENTRIES[name]
