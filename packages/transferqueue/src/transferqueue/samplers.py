"""Samplers: which of the ready samples a fetch takes.

A sampler is plain data that travels to the controller; lower priority values go first and put order breaks
ties in every one of them.
"""

import msgspec


class InOrder(msgspec.Struct, frozen=True, array_like=True, tag="in_order"):
    """Samples one by one, each as soon as the fields of the task are written."""


class Groups(msgspec.Struct, frozen=True, array_like=True, tag="groups"):
    """Whole groups only: a group is served when all its members are ready, and all of it at once.

    Attributes:
        n: members of a group, unless the producer gave the group another size (``group_sizes`` of a put, or
            ``close_group``). `batch_size` of the fetch must be a multiple of it.
    """

    n: int


Sampler = InOrder | Groups
