"""How the bytes of a version get to SGLang between its `begin_weight_update` and `end_weight_update`."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class Transport(Protocol):
    """One of `in_band`, `distributed`, `disk`.

    Attributes:
        in_session: whether SGLang wants the update between its begin and end calls.
    """

    in_session: bool

    def prepare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Do what can be done while the server still computes.

        Nothing of the server's weights changes here. Returns the function that sends them: when that
        raises, the server may have any part of them. Both raise `ApplyFailed`.
        """
        ...

    def close(self) -> None:
        """Give back what it holds here and in the server. May be called twice."""
        ...
