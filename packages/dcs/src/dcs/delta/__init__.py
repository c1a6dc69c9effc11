"""Bit-exact difference of two byte ranges: what a receiver that holds the version before needs of the next
one.

One optimizer step at a small learning rate changes a percent or two of half-precision weights, nearly all of
them to the next representable value. `encode` writes down which ones and by how much; `apply` makes the new
range from the old one, in place, or refuses the payload before it has touched anything. A receiver that
builds versions in turn in two slots brings the older slot up to the newer one with what `apply` returned
(`copy_changed`), so no version costs it a dense copy. Where the package was installed with its compiled
loops, they do the applying (`implementation`).
"""

from dcs.delta.codec import Changed, apply, copy_changed, encode
from dcs.delta.density import density
from dcs.delta.format import CorruptDelta
from dcs.delta.kernel import implementation

__all__ = ["Changed", "CorruptDelta", "apply", "copy_changed", "density", "encode", "implementation"]
