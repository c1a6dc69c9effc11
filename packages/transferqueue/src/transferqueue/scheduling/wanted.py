"""What a fetch asks for: plain data that travels from the client to the scheduler as it is."""

import msgspec

from ..errors import InvalidArgument
from ..samplers import Balanced, InOrder, Sampler, check_sampler, group_size

MAX_SEATS = 16_384  # consumers that a round is planned for
MAX_KEY = 512  # characters


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A request for samples of a task.

    Attributes:
        task: whose samples.
        count: samples at most, for each rank (`Balanced`: of all ranks together).
        sampler: which of the ready samples, and in which order.
        max_priority: only samples (groups: all members) of at most this priority.
        min_version: only samples (groups: all members) of at least this version.
        at_least: samples that are enough while more may come; None: all `count`.
        partial: one sample (or group) is enough.
        max_staleness: only samples (groups: all members) whose version is at most so far behind the
            partition's clock when they are served.
        rank, world_size: whose part of a round this is, of how many; see `rounds`.
        key: the sequence of rounds that is asked for. The k-th request of a rank under one key is round k.
        sharers: consumers (a tensor or pipeline group) that each get the same samples of this rank.
        member: which of the sharers asks; None: every client is one.
        global_batch: samples of all ranks in one optimizer step: a round never crosses it, and the one that
            completes it is the last.
    """

    task: str
    count: int
    sampler: Sampler = InOrder()
    max_priority: int | None = None
    min_version: int | None = None
    at_least: int | None = None
    partial: bool = False
    max_staleness: int | None = None
    rank: int = 0
    world_size: int = 1
    key: str | None = None
    sharers: int = 1
    member: int | None = None
    global_batch: int | None = None

    @property
    def floor(self) -> int:
        """Samples that are enough while more may come, for each rank (`Balanced`: of all together)."""
        return 1 if self.partial else self.count if self.at_least is None else self.at_least

    @property
    def in_rounds(self) -> bool:
        """Whether others have a part in what is served, so that it is planned for all of them."""
        return (
            self.world_size > 1
            or self.sharers > 1
            or self.key is not None
            or self.global_batch is not None
            or isinstance(self.sampler, Balanced)
        )

    def check(self) -> None:
        """Raises InvalidArgument for what can never be served, naming the way out."""
        check_sampler(self.sampler)
        if self.count < 1:
            raise InvalidArgument(f"batch_size is {self.count}; it must be at least 1")
        if self.at_least is not None and not 1 <= self.at_least <= self.count:
            raise InvalidArgument(
                f"at_least is {self.at_least}; it must be in [1, {self.count}], the batch_size"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise InvalidArgument(f"max_staleness is {self.max_staleness}; 0 serves the newest version only")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InvalidArgument(f"rank {self.rank} of {self.world_size}; ranks count from 0")
        if self.sharers < 1 or (self.member is not None and not 0 <= self.member < self.sharers):
            raise InvalidArgument(f"member {self.member} of {self.sharers} sharers; members count from 0")
        if self.world_size * self.sharers > MAX_SEATS:
            raise InvalidArgument(
                f"rounds for {self.world_size} ranks of {self.sharers} sharers; at most {MAX_SEATS} in all"
            )
        if self.key is not None and len(self.key) > MAX_KEY:
            raise InvalidArgument(
                f"a key of {len(self.key)} characters, {self.key[:20]!r}...; at most {MAX_KEY}"
            )
        n = group_size(self.sampler) or 1
        ranks = self.world_size if isinstance(self.sampler, Balanced) else 1
        if self.count % (n * ranks):
            raise InvalidArgument(
                f"batch_size {self.count} is no multiple of "
                + (f"{ranks} ranks x the group size {n}" if ranks > 1 else f"the group size {n}")
                + "; groups are served whole and ranks get equal numbers"
            )
        if self.global_batch is not None and (self.global_batch < 1 or self.global_batch % n):
            raise InvalidArgument(
                f"global_batch is {self.global_batch}; it must be a positive multiple of the group size {n}"
            )
        if self.global_batch is not None and isinstance(self.sampler, Balanced):
            raise InvalidArgument("Balanced takes the global batch as batch_size; leave global_batch out")
