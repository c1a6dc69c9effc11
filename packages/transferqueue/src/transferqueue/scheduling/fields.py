"""The fields of a partition: a bit for each, and what the first write of each has fixed."""

from collections.abc import Iterable, Mapping, Sequence

from ..errors import FieldNotReady, SchemaMismatch
from ..ids import shortened
from ..values.columns import FieldSpec
from .samples import Sample, missing


class Fields:
    """Attributes:
    bits: name -> position in the bit sets of samples and tasks.
    schema: name -> dtype and trailing shape, once a write has fixed them.
    """

    def __init__(self, partition: str) -> None:
        self._partition = partition
        self.bits: dict[str, int] = {}
        self.schema: dict[str, FieldSpec] = {}

    def mask(self, names: Iterable[str]) -> int:
        """The bit set of these fields; a new one gets a bit."""
        mask = 0
        for name in names:
            mask |= 1 << self.bits.setdefault(name, len(self.bits))
        return mask

    def known_mask(self, names: Iterable[str]) -> int | None:
        """The bit set of these fields; None if one of them was never heard of."""
        mask = 0
        for name in names:
            bit = self.bits.get(name)
            if bit is None:
                return None
            mask |= 1 << bit
        return mask

    def require(self, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Raises FieldNotReady for the first of the fields that is not written for all of the samples."""
        mask = self.known_mask(names)
        if mask is not None and not missing(samples, mask):
            return
        for name in names:
            bit = self.known_mask((name,))
            without = [sample.id for sample in samples] if bit is None else missing(samples, bit)
            if without:
                raise FieldNotReady(
                    f"field {name!r} is not written for {len(without)} of {len(samples)} samples of "
                    f"partition {self._partition!r}: {shortened(without)}; name it among the fields of the "
                    "task to wait for it",
                    field=name,
                    ids=shortened(without),
                )

    def check(self, specs: Mapping[str, FieldSpec]) -> None:
        """Raises SchemaMismatch for the first field that differs from what its first write fixed."""
        for name, spec in specs.items():
            fixed = self.schema.get(name)
            if fixed is not None and not fixed.accepts(spec) and spec.dtype != "none":
                raise SchemaMismatch(
                    f"field {name!r} of partition {self._partition!r} is {fixed} by its first write, got "
                    f"{spec}; convert it, put Varying(rows) from the first write on, or use another field",
                    field=name,
                    got=str(spec),
                    expected=str(fixed),
                )

    def fix(self, specs: Mapping[str, FieldSpec]) -> None:
        """Lets a write fix what no earlier one has."""
        for name, spec in specs.items():
            if name not in self.schema and spec.dtype != "none":
                self.schema[name] = spec
