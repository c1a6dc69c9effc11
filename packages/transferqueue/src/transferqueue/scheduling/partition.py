"""The scheduler of one partition: a state machine without sockets, clocks or payload.

Every sample is, for every task, unready, ready, leased or acked. Callers pass the time in; each call does
work in proportion to the samples it names, never to the samples there are.
"""

from collections.abc import Mapping, Sequence

from ..errors import FieldNotReady, InvalidArgument, StaleLease
from ..ids import shortened
from . import events, state
from .admission import Ticket, check_version
from .book import Book
from .loans import Loan
from .picking import members, pick
from .rounds import Rounds
from .samples import Candidate, Lease, Row, Sample
from .tasks import Task
from .wanted import Wanted

_MAX_ADMITTED = 1 << 31  # samples of one admission where a partition has no limit


class Partition(Book):
    """All samples of one partition and what every task may do with them.

    Args:
        name: of the partition.
        tasks: name of each consumer group -> the fields it needs.
        length_field: the column whose lengths are the lengths of the samples; the caller measures it.
        max_samples: samples it may hold, counting those admitted; see `fits`.
        max_staleness: how far behind the clock a version may be to be admitted.

    Attributes:
        clock: the highest version advanced to or put; None before the first.
        freed: samples whose payload nobody needs any more; the owner takes and clears them.
        woken: tasks for which something became ready or ended; the owner takes and clears them.
        room_made: puts and admissions that were refused may go on; the owner clears it.
        recorder: told of every change, if set.
        put_samples_total, put_bytes_total, updated_total, dropped_total: since the partition was made; bytes
            include those of updates.
    """

    def __init__(
        self,
        name: str,
        tasks: Mapping[str, Sequence[str]],
        *,
        length_field: str | None = None,
        max_samples: int | None = None,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(
            name, tasks, length_field=length_field, max_samples=max_samples, max_staleness=max_staleness
        )
        self.rounds = Rounds(self)

    def dump(self, now: float) -> state.PartitionState:
        """Everything that the partition's further life depends on. Take `freed` first."""
        return state.dump(self, now)

    @classmethod
    def load(cls, dumped: state.PartitionState, now: float) -> "Partition":
        """A partition that goes on as the dumped one would have; times move by what passed in between."""
        if dumped.format != state.FORMAT:
            raise InvalidArgument(f"a partition of format {dumped.format}, where {state.FORMAT} is known")
        partition = cls(
            dumped.name,
            {task.name: task.fields for task in dumped.tasks},
            length_field=dumped.length_field,
            max_samples=dumped.max_samples,
            max_staleness=dumped.max_staleness,
        )
        state.fill(partition, dumped, now)
        return partition

    def admit(self, version: int, samples: int, *, now: float, seconds: float, owner: int) -> Ticket | None:
        """Promises room for samples that are yet to be made, or returns None if there is none now.

        Granted while samples held, samples promised and `samples` together are at most `max_samples`. The
        put that names the ticket redeems it; what is not put in `seconds` is room again.

        Raises:
            Closed: the partition is closed.
            InvalidArgument: `samples` can never fit, or `version` is more than `max_staleness` behind the
                clock.
        """
        self.check_open()
        most = _MAX_ADMITTED if self.max_samples is None else self.max_samples
        if not 1 <= samples <= most:
            raise InvalidArgument(
                f"admission of {samples} samples to partition {self.name!r}, which holds at most {most}; ask "
                "for fewer"
            )
        check_version(self.name, version, self.clock, self.max_staleness)
        if not self.fits(samples):
            return None
        ticket = self.promise(self.admission.last_id + 1, samples, version, owner, now + seconds)
        if self.recorder is not None:
            self.recorder(events.Admitted(ticket.id, samples, version, owner, seconds))
        return ticket

    # -- what consumers do -----------------------------------------------------------------------------------

    def lease(
        self, wanted: Wanted, *, now: float, seconds: float, owner: int, require: Sequence[str] = ()
    ) -> Lease | None:
        """Loans samples, or returns None if the fetch has to wait. What is wanted has passed
        `Wanted.check`.

        Args:
            require: fields that must be written besides those of the task.

        Raises:
            Closed: the partition is closed and nothing can come any more.
            FieldNotReady: a required field is not written for one of the samples; nothing is leased.
            InvalidArgument: a length sampler, but the partition has no `length_field`; or the ranks of a
                sequence of rounds disagree on what it is.
            StaleLease: another sharer gave these samples back, or let their lease lapse.
        """
        task = self.task(wanted.task)
        if wanted.in_rounds:
            return self.rounds.serve(task, wanted, now, seconds, owner, require)
        picked = pick(self, task, wanted, task.held.get(owner, 0))
        if picked is None:
            return None
        samples = members(self, picked.units)
        if require:
            try:
                self.require(samples, require)
            except FieldNotReady:
                picked.put_back()
                raise
        return self._loan(task, samples, owner, now, seconds, picked.ends)

    def candidates(self, wanted: Wanted, limit: int, *, now: float, owner: int) -> list[Candidate] | None:
        """The first `limit` samples that are ready, in order, within the bounds of `wanted`, for a sampler
        outside to choose from; None if there are fewer than wanted (its floor) and more may come.

        Raises:
            Closed: as for `lease`.
        """
        task = self.task(wanted.task)
        if len(task.ready) < wanted.floor and not self.closed:
            return None
        picked = pick(self, task, Wanted(
            wanted.task, limit, max_priority=wanted.max_priority, min_version=wanted.min_version,
            at_least=min(wanted.floor, limit), max_staleness=wanted.max_staleness,
        ), task.held.get(owner, 0))  # fmt: skip
        if picked is None:
            return None
        picked.put_back()
        return [
            Candidate(
                sample.id,
                None if sample.group is None else sample.group.key,
                sample.version,
                sample.priority,
                sample.length,
                now - sample.born,
            )
            for sample in members(self, picked.units)
        ]

    def lease_ids(
        self,
        task: str,
        ids: Sequence[int],
        *,
        now: float,
        seconds: float,
        owner: int,
        require: Sequence[str] = (),
    ) -> Lease | None:
        """Loans exactly these samples, in this order; None, and nothing is leased, if one of them is not
        ready (any more): ask for `candidates` again.
        """
        of = self.task(task)
        if len(set(ids)) != len(ids) or not ids:
            raise InvalidArgument(
                f"the sampler chose {shortened(ids)}; choose each sample once, at least one"
            )
        samples = [self.samples.get(sample) for sample in ids]
        chosen = [sample for sample in samples if sample is not None and sample.ready & of.bit]
        if len(chosen) < len(ids):
            return None
        self.require(chosen, require)
        return self._loan(of, chosen, owner, now, seconds, False)

    def _loan(
        self, task: Task, samples: list[Sample], owner: int, now: float, seconds: float, ends: bool
    ) -> Lease:
        lease = self.grant(task, samples, owner, now + seconds, self.loans.next_id())
        if self.recorder is not None:
            self.recorder(
                events.Leased(lease.id, task.name, [sample.id for sample in samples], owner, seconds)
            )
        return Lease(lease.id, task.name, samples, ends)

    def ack(self, token: int, now: float) -> None:
        """Completes the samples of a lease for its task, once every sharer of it has acked; frees those that
        every task has completed.
        """
        self._current(token, now)
        self.complete(token)

    def nack(self, token: int, now: float) -> None:
        """Returns the samples of a lease: they are ready again, in their old place."""
        self.give_back(self._current(token, now), lapsed=False)

    def extend(self, token: int, seconds: float, now: float) -> None:
        """Moves a lease's deadline to `seconds` from now."""
        self._current(token, now)
        self.prolong(token, now + seconds)
        if self.recorder is not None:
            self.recorder(events.Extended(token, seconds))

    def take_back(self, lease: Lease, now: float) -> None:
        """Undoes a lease whose consumer never got it: a rank will get it when it asks again, else its samples
        return.
        """
        self.lapse(now)
        if lease.seat is not None:
            self.rounds.take_back(lease)
        elif lease.id in self.leases:
            self.give_back(self.leases[lease.id], lapsed=False)

    def _current(self, token: int, now: float) -> Loan:
        self.lapse(now)
        lease = self.loans.tokens.get(token)
        if lease is None:
            raise StaleLease(
                f"lease {token} of partition {self.name!r} has lapsed or is finished; its samples may be "
                "with another consumer (fetch with a longer lease_seconds, or extend_lease)",
                lease=token,
            )
        return lease

    def lapse(self, now: float) -> None:
        """Returns the samples of every lease, and the room of every ticket, whose deadline has passed."""
        while (lease := self.loans.next_due(now)) is not None:
            if not self.rounds.prolonged(lease, now):
                self.give_back(lease, lapsed=True)
        while (ticket := self.admission.next_due(now)) is not None:
            self.unpromise(ticket)

    def next_lapse(self) -> float | None:
        """When the next lease or ticket lapses, if any is out."""
        times = (self.loans.next_deadline(), self.admission.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def release(self, owner: int) -> None:
        """Returns every lease and ticket of a client that is gone, and ends the rounds it took part in."""
        recorder, self.recorder = self.recorder, None  # one event for all of it
        try:
            self.rounds.leave(owner)
            for token in self.loans.of_owner(owner):
                if token in self.leases:
                    self.give_back(self.leases[token], lapsed=False)
            for ticket in self.admission.of_owner(owner):
                self.unpromise(ticket)
        finally:
            self.recorder = recorder
        if recorder is not None:
            recorder(events.Released(owner))


__all__ = ["Lease", "Partition", "Row", "Sample", "Wanted"]
