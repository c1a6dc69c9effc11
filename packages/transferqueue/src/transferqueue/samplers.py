"""Samplers: which of the ready samples a fetch takes, and how they are split over ranks and micro-batches.

A sampler is plain data that travels to the controller. Lower priority values go first and put order breaks
ties in every one of them but `Freshest`, so that serving by priority needs no sampler of its own: give
priorities to `put`.

With ``fetch(..., rank=r, world_size=w)`` samples are planned for all ranks at once, in rounds: each round has
one micro-batch for every rank, always. See `transferqueue.scheduling.rounds`.

The length of a sample is the number of elements that it has in the column named as the partition's
``length_field``: its tokens.

What none of these does, a function can: see ``Partition.fetch`` with ``sampler=function``.
"""

import msgspec

from .errors import InvalidArgument


class InOrder(msgspec.Struct, frozen=True, array_like=True, tag="in_order"):
    """Samples one by one, each as soon as the fields of the task are written. `batch_size` of the fetch is
    for each rank.
    """


class Groups(msgspec.Struct, frozen=True, array_like=True, tag="groups"):
    """Whole groups only: a group is served when all its members are ready, and all of it at once.

    Attributes:
        n: members of a group, unless the producer gave the group another size (``group_sizes`` of a put, or
            ``close_group``). `batch_size` of the fetch must be a multiple of it, and is for each rank.
    """

    n: int


class Freshest(msgspec.Struct, frozen=True, array_like=True, tag="freshest"):
    """The newest version first; priority and then put order decide within a version.

    Attributes:
        n: whole groups of so many members; a group is as old as its oldest member. None: single samples.
    """

    n: int | None = None


class TokenBudget(msgspec.Struct, frozen=True, array_like=True, tag="token_budget"):
    """As many samples, in order, as fit the budget, for each rank: at least one, which may exceed the budget
    when it comes alone. `batch_size` caps the samples of a micro-batch.

    A fetch is served as soon as the budget is used up (the next sample would not fit), or `batch_size` or
    `at_least` is reached.

    Attributes:
        tokens: the sum of lengths in one micro-batch.
        n: whole groups of so many members; a group is never split.
    """

    tokens: int
    n: int | None = None


class Balanced(msgspec.Struct, frozen=True, array_like=True, tag="balanced"):
    """One global batch of `batch_size` samples, split over the ranks with the same number of samples (groups)
    for each and total lengths as equal as can be; each rank's part is packed into micro-batches, the same
    number on every rank. A rank fetches them one by one; ``is_last`` marks the last.

    The split is the balanced largest differencing method (Michiels, Korst and Aarts, 2003: Karmarkar-Karp
    with equal cardinalities).

    Attributes:
        token_budget: the sum of lengths in one micro-batch; a sample above it comes alone. None: each rank's
            part is one micro-batch.
        n: whole groups of so many members. A group stays on one rank, but may span micro-batches there.
    """

    token_budget: int | None = None
    n: int | None = None


Sampler = InOrder | Groups | Freshest | TokenBudget | Balanced


def group_size(sampler: Sampler) -> int | None:
    """Members of the groups that the sampler serves whole; None if it serves single samples."""
    return None if isinstance(sampler, InOrder) else sampler.n


def needs_lengths(sampler: Sampler) -> bool:
    """Whether the sampler can only serve a partition that knows the lengths of its samples."""
    return isinstance(sampler, TokenBudget | Balanced)


def check_sampler(sampler: Sampler) -> None:
    """Raises InvalidArgument for a sampler that can never serve anything."""
    n = group_size(sampler)
    if n is not None and n < 1:
        raise InvalidArgument(f"{sampler} has groups of {n}; a group has at least 1 member")
    budget = sampler.tokens if isinstance(sampler, TokenBudget) else None
    if isinstance(sampler, Balanced):
        budget = sampler.token_budget
    if budget is not None and budget < 1:
        raise InvalidArgument(f"{sampler} has a budget of {budget}; give the tokens of a micro-batch")
