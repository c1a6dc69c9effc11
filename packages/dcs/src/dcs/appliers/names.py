"""Names of tensors where they are published and in the engine, when the two differ by more than chance.

These are plain renames. Tensors that are also cut or fused differently (Megatron's linear_qkv for Hugging
Face's q, k and v) are a matter of layouts: see `dcs.layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class NameMap(Protocol):
    """A one-to-one map; `published(engine(name)) == name` for every name that is published, and the other
    way.
    """

    def engine(self, published: str) -> str:
        """The engine's name of what is published as `published`."""
        ...

    def published(self, engine: str) -> str:
        """What the engine's tensor `engine` is published as."""
        ...


@dataclass(frozen=True)
class SameNames:
    """The engine calls everything as it is published."""

    def engine(self, published: str) -> str:
        return published

    def published(self, engine: str) -> str:
        return engine


@dataclass(frozen=True)
class Prefixed:
    """The names differ in how they begin: `Prefixed(published_prefix="policy.")` for an engine that has none.

    Attributes:
        published_prefix: with which a published name begins.
        engine_prefix: what stands there in the engine.
    """

    published_prefix: str = ""
    engine_prefix: str = ""

    def engine(self, published: str) -> str:
        return _swap(published, self.published_prefix, self.engine_prefix)

    def published(self, engine: str) -> str:
        return _swap(engine, self.engine_prefix, self.published_prefix)


@dataclass(frozen=True)
class Renamed:
    """Some names differ; what is not listed is the same on both sides.

    Args:
        engine_of: the engine's name by the published one.

    Raises ValueError when two published names would be one in the engine.
    """

    engine_of: Mapping[str, str]
    _published_of: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        back = {engine: published for published, engine in self.engine_of.items()}
        if len(back) < len(self.engine_of):
            twice = sorted(name for name in self.engine_of if back[self.engine_of[name]] != name)
            raise ValueError(
                f"{twice[0]!r} shares its name in the engine with {back[self.engine_of[twice[0]]]!r}"
            )
        object.__setattr__(self, "_published_of", back)

    def engine(self, published: str) -> str:
        return self.engine_of.get(published, published)

    def published(self, engine: str) -> str:
        return self._published_of.get(engine, engine)


def _swap(name: str, old: str, new: str) -> str:
    """`name` with another beginning; raises ValueError when it does not begin with `old`."""
    if not name.startswith(old):
        raise ValueError(f"tensor {name!r} does not begin with {old!r}, so its name cannot be mapped")
    return new + name.removeprefix(old)
