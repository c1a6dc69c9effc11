"""What a fetch asks for: plain data that travels from the client to the scheduler as it is."""

import msgspec

from ..samplers import InOrder, Sampler


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A request for up to `count` samples of a task.

    Attributes:
        task: whose samples.
        count: samples at most.
        sampler: which of the ready samples, and in which order.
        max_priority: only samples (groups: all members) of at most this priority.
        min_version: only samples (groups: all members) of at least this version.
        at_least: samples that are enough while more may come; None: all `count`.
        partial: one sample (or group) is enough.
    """

    task: str
    count: int
    sampler: Sampler = InOrder()
    max_priority: int | None = None
    min_version: int | None = None
    at_least: int | None = None
    partial: bool = False

    @property
    def floor(self) -> int:
        """Samples that are enough while more may come."""
        return 1 if self.partial else self.count if self.at_least is None else self.at_least
