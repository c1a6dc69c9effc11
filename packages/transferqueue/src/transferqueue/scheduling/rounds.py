"""Rounds: one micro-batch for every data-parallel rank, planned at once for all of them.

The requests of all ranks under one key form a *sequence*: the k-th request of a rank is answered with its
part of round k, whichever rank asks first. A round is planned when there are samples for it, all or nothing,
and its parts stay leased to the sequence until their ranks ask. So every rank gets equally many
micro-batches:

- a part for which there were no samples is a *dummy*, a copy of another rank's sample that nobody trains on;
- so is one whose samples were dropped, or returned (nobody of the sequence had asked for a lease's time),
  before its rank asked;
- what is nacked or lapses after it was handed out goes into a later round;
- the end of the stream falls on the same round for everybody. At the end no rank waits for leases that its
  peers, the clients that take part in rounds of the task, still hold, as they may wait for it.

A client that goes away ends the sequences that it took part in after the rounds it has got: ranks that are
behind get those too, what was planned beyond returns, and further requests begin a new sequence, in which
every rank starts from round 0. (Where a job is killed and started again, a key that names the run keeps its
ranks apart from those of the old one.)

A part can have several *sharers*, such as the ranks of a tensor or pipeline group: each gets the same samples
with a fencing token of its own. The samples are done when every sharer has acked, as each holds a part of the
model and none has trained on them alone. A nack, or the end of the lease, returns them for all and fences the
others: an ack, or a request that comes only then, raises StaleLease.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..errors import Closed, FieldNotReady, InvalidArgument, StaleLease
from ..samplers import Balanced, group_size
from . import events
from .book import Book
from .loans import Loan
from .picking import arrange, pick
from .samples import Lease, Sample
from .tasks import Task
from .wanted import Wanted

type Seat = tuple[int, int]  # rank, member
_MAX_SEQUENCES = 1024


@dataclass(slots=True, eq=False)
class Part:
    """What one rank gets in a round.

    Attributes:
        lease: None for a dummy.
        samples: held, so that their payload is there, until the last sharer has got them.
        handed: sharers that have.
    """

    lease: Loan | None
    samples: list[Sample]
    handed: int = 0


@dataclass(slots=True, eq=False)
class Round:
    """One part for each rank; `left` seats have not got theirs."""

    parts: list[Part]
    is_last: bool
    left: int


@dataclass(slots=True, eq=False)
class Series:
    """The sequence of rounds of one key.

    Attributes:
        terms: what every request of the sequence has to agree on.
        base: rounds that everybody has got; `last` is the last of them.
        cursors: rounds that each seat has got, of those that have asked.
        owners: the client on each seat that still takes part.
        end: rounds after which it is over, if a client has gone; gone: the seats of such clients.
        drained: it ends with the stream, after the rounds that are planned; told: seats that know.
        issued: samples of the global batch that are in rounds.
        asked, seconds: when somebody last got something, and the lease time he asked for.
    """

    number: int
    task: Task
    terms: Wanted
    base: int = 0
    rounds: deque[Round] = field(default_factory=deque)
    last: Round | None = None
    cursors: dict[Seat, int] = field(default_factory=dict)
    owners: dict[Seat, int] = field(default_factory=dict)
    end: int | None = None
    gone: set[Seat] = field(default_factory=set)
    drained: bool = False
    told: set[Seat] = field(default_factory=set)
    issued: int = 0
    asked: float = 0.0
    seconds: float = 0.0

    @property
    def seats(self) -> int:
        return self.terms.world_size * self.terms.sharers

    @property
    def idle(self) -> bool:
        """Whether everybody has got all that was planned."""
        return self.base > 0 and not self.rounds and not self.drained

    def goes_on(self, seat: Seat) -> bool:
        """Whether the seat's next request belongs here."""
        if seat in self.gone or seat in self.told:
            return False
        if self.end is None:
            return True
        if seat not in self.cursors and any(rank == seat[0] for rank, _ in self.gone):
            return False  # takes the place of one that has gone
        return self.cursors.get(seat, 0) < self.end

    def can_return_to(self, seat: Seat, number: int) -> bool:
        """Whether that round is the last that the seat has got, and its next request belongs here."""
        return self.cursors.get(seat) == number + 1 and seat not in self.gone and seat not in self.told

    def round(self, number: int) -> Round:
        """The round of that number, from the last that everybody has got."""
        if number == self.base - 1 and self.last is not None:
            return self.last
        return self.rounds[number - self.base]


class Rounds:
    """The sequences of one partition."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.series: dict[int, Series] = {}
        self.last_number = 0
        self.peers: dict[str, set[int]] = {}  # clients that take part in rounds, by task
        self._named: dict[tuple[str, str | None], list[Series]] = {}
        self._sweep_at = 64

    def serve(
        self,
        task: Task,
        wanted: Wanted,
        now: float,
        seconds: float,
        owner: int,
        require: Sequence[str],
    ) -> Lease | None:
        """The next part of a rank; see `Partition.lease`."""
        member = wanted.member
        if member is None:
            member = owner if wanted.sharers > 1 else 0
        seat = (wanted.rank, member)
        named = self._named.get((task.name, wanted.key), ())
        series = next((one for one in named if one.goes_on(seat)), None)
        if series is not None and series.idle and series.terms != _terms(wanted):
            self._do(events.Forgotten(series.number), now)
            series = None
        if series is None:
            if len(self.series) >= self._sweep_at:
                self._sweep(now)
            series = Series(self.last_number + 1, task, _terms(wanted))
        else:
            self._check(series, wanted, seat)
        if series.cursors.get(seat, 0) == series.base + len(series.rounds):
            try:
                if series.drained:
                    raise self._book.drained(task)
                if not self._plan(series, wanted, now, seconds, owner, require):
                    return None
            except Closed:
                if series.number in self.series or not any(seat in one.told for one in named):
                    self._tell(series, seat, owner, now, seconds)
                raise
            series = self.series[series.number]
        return self._serve_part(series, seat, owner, now, seconds, require)

    def _check(self, series: Series, wanted: Wanted, seat: Seat) -> None:
        terms = _terms(wanted)
        if terms != series.terms:
            differing = [
                name
                for name in terms.__struct_fields__
                if getattr(terms, name) != getattr(series.terms, name)
            ]
            raise InvalidArgument(
                f"rank {wanted.rank} asks for rounds of key {wanted.key!r} with "
                + ", ".join(f"{name}={getattr(terms, name)!r}" for name in differing)
                + ", where the sequence began with "
                + ", ".join(f"{name}={getattr(series.terms, name)!r}" for name in differing)
                + "; all ranks ask alike, and other terms need another key while a rank is behind"
            )
        if wanted.sharers > 1 and seat not in series.cursors:
            others = [member for rank, member in series.cursors if rank == wanted.rank]
            if len(others) >= wanted.sharers:
                raise InvalidArgument(
                    f"rank {wanted.rank} of key {wanted.key!r} has its {wanted.sharers} sharers already; "
                    "raise sharers, or say with member= which of them asks"
                )

    # -- planning --------------------------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Forgets sequences that nobody asked for in a lease's time and that everybody has all of, so that a
        key for every step costs nothing; and, where there are very many, those that somebody is behind in.
        """
        old = [one for one in self.series.values() if one.asked + one.seconds <= now]
        for series in [one for one in old if one.idle]:
            self._do(events.Forgotten(series.number), now)
        if len(self.series) > _MAX_SEQUENCES:
            for series in [one for one in old if one.number in self.series]:
                self._do(events.Forgotten(series.number), now)
        if len(self.series) > _MAX_SEQUENCES:
            raise InvalidArgument(
                f"partition {self._book.name!r} has {len(self.series)} sequences of rounds that are not "
                "fetched to the end; let every rank ask for all rounds of a key"
            )
        self._sweep_at = 2 * len(self.series) + 64

    def _plan(
        self, series: Series, wanted: Wanted, now: float, seconds: float, owner: int, require: Sequence[str]
    ) -> bool:
        """Adds the rounds that can be made now; returns whether there are any."""
        book, task = self._book, series.task
        whole = wanted.global_batch
        room = None if whole is None else whole - series.issued
        picked = pick(book, task, wanted, self._ours(task, owner) if book.closed else 0, room)
        if picked is None:
            return False
        planned = arrange(book, picked, wanted)
        if require:
            try:
                book.require([s for parts in planned for part in parts for s in part], require)
            except FieldNotReady:
                picked.put_back()
                raise
        issued = series.issued + len(picked.units) * (group_size(wanted.sampler) or 1)
        complete = isinstance(wanted.sampler, Balanced) or (whole is not None and issued >= whole)
        rounds: list[events.PlannedRound] = []
        for at, parts in enumerate(planned):
            shortest = min((s for part in parts for s in part), key=lambda sample: sample.length)
            rounds.append(
                events.PlannedRound(
                    [
                        events.PlannedPart(book.loans.next_id(), [sample.id for sample in part])
                        if part
                        else events.PlannedPart(0, [shortest.id])
                        for part in parts
                    ],
                    at == len(planned) - 1 and (complete or picked.ends),
                )
            )
        self._do(events.Planned(series.number, series.terms, rounds, 0 if complete else issued, seconds), now)
        book.woken.add(task.name)  # the other ranks
        return True

    def _ours(self, task: Task, owner: int) -> int:
        """Samples leased to those who take part in rounds, or planned for them."""
        owners = {owner, *self.peers.get(task.name, ()), *(-number for number in self.series)}
        return sum(task.held.get(one, 0) for one in owners)

    def _tell(self, series: Series, seat: Seat, owner: int, now: float, seconds: float) -> None:
        if not series.drained:
            self._do(events.Drained(series.number, series.terms, seconds), now)
            self._book.woken.add(series.task.name)  # the other ranks
        self._do(events.Told(series.number, *seat, owner), now)

    # -- handing out -----------------------------------------------------------------------------------------

    def _serve_part(
        self, series: Series, seat: Seat, owner: int, now: float, seconds: float, require: Sequence[str]
    ) -> Lease:
        book, task = self._book, series.task
        number = series.cursors.get(seat, 0)
        this = series.round(number)
        part = this.parts[seat[0]]
        lease = part.lease
        if not part.samples or (lease is not None and lease.ended and part.handed):
            self._do(events.Handed(series.number, *seat, owner, 0, seconds), now)
            raise StaleLease(
                f"the samples of round {number} of key {series.terms.key!r} went back before this sharer of "
                f"rank {seat[0]} asked for them (a nack, or a lapsed lease); go on with the next round",
                lease=0 if lease is None else lease.id,
            )
        dummy = _is_dummy(series, part)
        token = 0
        if dummy or lease is None:
            samples = part.samples[:1]
        else:
            samples = list(lease.samples.values()) if series.terms.sharers == 1 else list(part.samples)
        if require:
            book.require(samples, require)
        if not dummy and lease is not None:
            token = book.loans.next_id() if part.handed else lease.id
        self._do(events.Handed(series.number, *seat, owner, token, seconds), now)
        return Lease(token, task.name, samples, this.is_last, dummy, (series.number, *seat, number))

    def take_back(self, lease: Lease) -> None:
        """Lets a part that did not reach its rank wait for it again; where that cannot be, returns it."""
        assert lease.seat is not None
        number, rank, member, at = lease.seat
        series = self.series.get(number)
        seat = (rank, member)
        if (
            series is not None
            and series.can_return_to(seat, at)
            and self._again(series, series.round(at).parts[rank])
        ):
            held = self._book.leases.get(lease.id)
            if (
                held is not None
                and series.terms.sharers > 1
                and not self._complete(series.round(at).parts[rank])
            ):
                self._book.give_back(held, lapsed=False)  # he could not get the same as the others any more
            self._do(events.TakenBack(number, rank, member, lease.id), 0.0)
            self._book.woken.add(series.task.name)
        elif lease.id in self._book.leases:
            self._book.give_back(self._book.leases[lease.id], lapsed=False)

    def _again(self, series: Series, part: Part) -> bool:
        """Whether there is something the part can be: a copy needs a sample. What cannot be the same for all
        sharers is refused when it is asked for.
        """
        shared = series.terms.sharers > 1
        return shared or bool(self._book.samples) or any(sample.holds for sample in part.samples)

    def _complete(self, part: Part) -> bool:
        """Whether the payload of all samples of the part is there."""
        return all(sample.holds or sample.id in self._book.samples for sample in part.samples)

    # -- the changes themselves, which events repeat ---------------------------------------------------------

    def _do(self, event: events.RoundEvent, now: float) -> None:
        self.apply(event, now)
        if self._book.recorder is not None:
            self._book.recorder(event)

    def apply(self, event: events.RoundEvent, now: float) -> None:
        """Makes a change that concerns rounds."""
        match event:
            case events.Planned():
                self._add(event, now)
            case events.Drained(number, terms, seconds):
                series = self._store(number, terms, now, seconds)
                series.drained = True
            case events.Told(number, rank, member, owner):
                self._told(self.series[number], (rank, member), owner)
            case events.Handed(number, rank, member, owner, token, seconds):
                self._hand(self.series[number], (rank, member), owner, token, now, seconds)
            case events.TakenBack(number, rank, member, token):
                self._unhand(self.series[number], (rank, member), token)
            case events.Forgotten(number):
                self._remove(self.series[number])

    def _store(self, number: int, terms: Wanted, now: float, seconds: float) -> Series:
        """The sequence of that number, new if there is none."""
        series = self.series.get(number)
        if series is None:
            series = Series(number, self._book.task(terms.task), terms)
            self.add_series(series)
        series.asked, series.seconds = now, seconds
        return series

    def add_series(self, series: Series) -> None:
        """Takes in a sequence."""
        self.last_number = max(self.last_number, series.number)
        self.series[series.number] = series
        self._named.setdefault((series.terms.task, series.terms.key), []).append(series)

    def _add(self, event: events.Planned, now: float) -> None:
        book = self._book
        series = self._store(event.sequence, event.terms, now, event.seconds)
        for planned in event.rounds:
            parts: list[Part] = []
            for part in planned.parts:
                samples = [book.samples[sample] for sample in part.ids]
                lease = None
                if part.lease:
                    lease = book.grant(
                        series.task,
                        samples,
                        -series.number,
                        now + event.seconds,
                        part.lease,
                        series.terms.sharers,
                    )
                for sample in samples:
                    book.hold(sample)
                parts.append(Part(lease, samples))
            series.rounds.append(Round(parts, planned.is_last, series.seats))
        series.issued = event.issued

    def _told(self, series: Series, seat: Seat, owner: int) -> None:
        series.told.add(seat)
        series.owners.pop(seat, None)
        self.peers.setdefault(series.task.name, set()).add(owner)
        if len(series.told | series.gone) == series.seats:
            self._remove(series)

    def _hand(self, series: Series, seat: Seat, owner: int, token: int, now: float, seconds: float) -> None:
        book, task = self._book, series.task
        number = series.cursors.get(seat, 0)
        this = series.rounds[number - series.base]
        part = this.parts[seat[0]]
        series.cursors[seat] = number + 1
        series.owners[seat] = owner
        series.asked, series.seconds = now, seconds
        self.peers.setdefault(task.name, set()).add(owner)
        lease = part.lease
        if token and lease is not None:
            if lease.owner < 0:
                task.delivered_total += len(lease.samples)
                book.pass_on(lease, owner)
                book.loans.set_deadline(lease, now + seconds)
            else:
                book.loans.set_deadline(lease, max(lease.deadline, now + seconds))
            book.loans.give(lease, token, owner)
        elif lease is not None and not part.handed:
            self._make_dummy(part)
        part.handed += 1
        if part.handed == series.terms.sharers:
            for sample in part.samples:
                book.unhold(sample)
        this.left -= 1
        while series.rounds and not series.rounds[0].left:
            series.last = series.rounds.popleft()
            series.base += 1

    def _make_dummy(self, part: Part) -> None:
        """Lets a part whose samples are gone be a copy of the first of them."""
        if part.lease is not None and not part.lease.ended:
            self._book.loans.end(part.lease)  # nothing is in it
        part.lease = None
        for sample in part.samples[1:]:
            self._book.unhold(sample)
        del part.samples[1:]

    def _unhand(self, series: Series, seat: Seat, token: int) -> None:
        book = self._book
        series.cursors[seat] -= 1
        number = series.cursors[seat]
        this = series.round(number)
        if number == series.base - 1:
            series.rounds.appendleft(this)
            series.base, series.last = number, None
        this.left += 1
        part = this.parts[seat[0]]
        if part.handed == series.terms.sharers:
            kept = [sample for sample in part.samples if sample.holds or sample.id in book.samples]
            if not kept and series.terms.sharers == 1:
                kept = [next(iter(book.samples.values()))]  # any will do as a copy that nobody shares
            part.samples = kept
            for sample in part.samples:
                book.hold(sample)
        part.handed -= 1
        lease = book.loans.tokens.get(token)
        if lease is not None:
            book.loans.withdraw(lease, token)
            if not part.handed:
                lease.of.delivered_total -= len(lease.samples)
                book.pass_on(lease, -series.number)

    # -- endings ---------------------------------------------------------------------------------------------

    def prolonged(self, lease: Loan, now: float) -> bool:
        """Moves the deadline of a lease that nobody has asked for yet, if its sequence is in use."""
        series = self.series.get(-lease.owner)
        if series is None or series.asked + series.seconds <= now:
            return False
        self._book.loans.set_deadline(lease, series.asked + series.seconds)
        return True

    def leave(self, owner: int) -> None:
        """Ends the sequences that a client took part in."""
        for peers in self.peers.values():
            peers.discard(owner)
        for series in list(self.series.values()):
            seats = [seat for seat, client in series.owners.items() if client == owner]
            if not seats:
                continue
            for seat in seats:
                series.gone.add(seat)
                del series.owners[seat]
                got = series.cursors[seat]
                series.end = got if series.end is None else min(series.end, got)
            while series.rounds and series.base + len(series.rounds) > (series.end or 0):
                self._cancel(series, series.rounds.pop())
            nobody = not series.owners and not series.told
            if nobody or not (series.rounds or series.drained):
                self._remove(series)

    def _cancel(self, series: Series, this: Round) -> None:
        for part in this.parts:
            if part.handed == series.terms.sharers:
                continue
            if part.lease is not None and not part.lease.ended:
                self._book.give_back(part.lease, lapsed=False)
            for sample in part.samples:
                self._book.unhold(sample)

    def _remove(self, series: Series) -> None:
        while series.rounds:
            self._cancel(series, series.rounds.pop())
        del self.series[series.number]
        name = (series.terms.task, series.terms.key)
        self._named[name].remove(series)
        if not self._named[name]:
            del self._named[name]


def _terms(wanted: Wanted) -> Wanted:
    """What all ranks have to ask for alike."""
    return msgspec.structs.replace(
        wanted,
        rank=0,
        member=None,
        partial=False,
        at_least=None,
        max_priority=None,
        min_version=None,
        max_staleness=None,
    )


def _is_dummy(series: Series, part: Part) -> bool:
    """Whether there is nothing to train on in the part, which nobody has got yet."""
    lease = part.lease
    if lease is None:
        return True
    if part.handed:
        return False
    return lease.ended or (series.terms.sharers == 1 and not lease.samples)
