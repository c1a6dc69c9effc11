"""Algorithms: pure functions on ragged tensors, one file an algorithm, one registry.

An algorithm (`spec.Algorithm`) turns rewards into advantages and a micro-batch into a loss sum and a count;
it knows nothing of roles, queues or models. Adding one is adding a file and a registry line. This module and
`registry` import no torch, so that a configuration can be checked at once; `build` does.
"""

from relax.algorithms.errors import AlgorithmError
from relax.algorithms.registry import build, check, names
from relax.algorithms.settings import GRPOSettings

__all__ = ["AlgorithmError", "GRPOSettings", "build", "check", "names"]
