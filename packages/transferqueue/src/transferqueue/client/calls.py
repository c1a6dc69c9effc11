"""What can be done with a partition, step by step; `wire.steps` drives it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ..errors import InvalidArgument, QueueError, StorageLost, Timeout, TooLarge, UnknownSample
from ..ids import IdSet, shortened
from ..samplers import InOrder, Sampler
from ..scheduling.samples import Candidate
from ..scheduling.wanted import Wanted
from ..values import frame
from ..values.block import block_nbytes, write_block
from ..values.columns import Column
from ..values.encode import Fields, Shared, plan_fields
from ..values.spec import ColumnPlan
from ..wire.channel import Answer
from ..wire.ledger import cut_reason, dropped_of, ids_of
from ..wire.messages import (
    Ack,
    Admit,
    Admitted,
    Advance,
    Candidates,
    CheckFields,
    CloseGroup,
    ClosePartition,
    Commit,
    Committed,
    CommitUpdate,
    Drop,
    Extend,
    Fetch,
    FetchChosen,
    Flag,
    Granted,
    IsClosed,
    Leased,
    LedgerPage,
    ListCandidates,
    Locate,
    Located,
    Nack,
    Opened,
    Range,
    ReadLedger,
    RequestBody,
    Reserve,
    ReserveUpdate,
    Return,
    TakeSlab,
)
from ..wire.steps import Exchange, Steps, Together, expect
from .servers import Servers
from .slabs import SMALL

type Choose = Callable[[Sequence[Candidate], int], Sequence[int] | Sequence[Candidate]]
"""A user's own sampler: from the samples that are ready, in order, and the batch size, those to lease."""


class Ranks(TypedDict, total=False):
    """How a fetch is one of several that belong together.

    Attributes:
        rank, world_size: whose part of a round this is, of how many data-parallel ranks. Each round has one
            micro-batch for every rank, always.
        key: the sequence of rounds that is asked for. The k-th request of a rank under one key is round k.
        sharers: consumers (a tensor or pipeline group) that each get the same samples; they are done when
            all have acked.
        member: which of the sharers asks; None: every client is one.
        global_batch: samples of all ranks in one optimizer step; ``batch.is_last`` marks its last round.
    """

    rank: int
    world_size: int
    key: str | None
    sharers: int
    member: int | None
    global_batch: int | None


_CANDIDATES, _CANDIDATES_EACH = (
    256,
    4,
)  # ready samples that a user's sampler sees: at least, and per one wanted
_UNITS_TRIED = 3  # further storage units, or ranges of memory, for a put whose own is gone


@dataclass(frozen=True)
class Ledger:
    """The exact account of a task: every id ever put is in exactly one of the four.

    Attributes:
        acked: completed by the task, also those whose payload is long freed.
        dropped: id -> reason (its first KiB), of those that ended before the task acked them.
        leased: with a consumer now.
        pending: ready or not, waiting for the task.
    """

    task: str
    acked: IdSet
    dropped: dict[int, str]
    leased: list[int]
    pending: list[int]


@dataclass(frozen=True)
class Loan:
    """The samples of one fetch and the lease they are under."""

    leased: Leased
    ids: np.ndarray
    versions: np.ndarray
    priorities: np.ndarray
    columns: dict[str, Column]


class PartitionCalls:
    """The operations on one partition. Arguments, results and errors are described on
    `client.blocking.Partition`.
    """

    def __init__(self, servers: Servers, name: str, opened: Opened) -> None:
        self.servers = servers
        self.name = name
        self.number = opened.partition
        self.tasks = {task: tuple(fields) for task, fields in opened.tasks.items()}
        self.length_field = opened.length_field

    def put(
        self,
        fields: Fields,
        groups: Sequence[str | None] | None,
        version: int | Sequence[int],
        priority: int | Sequence[int],
        shared: Shared | None,
        group_sizes: Mapping[str, int] | None,
        ticket: int | None,
        timeout: float,
    ) -> Steps[np.ndarray]:
        deadline = time.monotonic() + timeout
        rows, plans = plan_fields(fields, shared)
        if isinstance(groups, str):
            raise InvalidArgument(f"groups is {groups!r}; give a key for each sample, [{groups!r}] * {rows}")
        keys = None if groups is None else [None if key is None else str(key) for key in groups]
        if keys is not None and len(keys) != rows:
            raise InvalidArgument(f"{len(keys)} groups for {rows} samples; give each sample a key, or None")
        sizes = {str(key): int(size) for key, size in (group_sizes or {}).items()}
        versions, priorities = _each("version", version, rows), _each("priority", priority, rows)
        specs = {name: plan.spec for name, plan in plans.items()}
        controller = self.servers.controller
        if not rows:
            yield [Exchange(controller, CheckFields(self.number, specs), deadline)]
            return np.empty(0, np.int64)
        lengths = self._lengths(plans)
        if lengths is None and self.length_field is not None:
            lengths = 0

        def reserve(span: int, nbytes: int, remote: bool) -> RequestBody:
            return Reserve(self.number, rows, span, nbytes, specs, keys, sizes, ticket, remote)

        def commit(where: Range, nbytes: int, remote: bool) -> RequestBody:
            return Commit(
                self.number, where, remote, rows, nbytes, specs, keys, sizes, versions, priorities,
                lengths or 0, ticket,
            )  # fmt: skip

        first = expect((yield from self._write(rows, plans, reserve, commit, deadline)), Committed).first
        return np.arange(first, first + rows, dtype=np.int64)

    def update(self, ids: Sequence[int], fields: Fields, timeout: float) -> Steps[None]:
        deadline = time.monotonic() + timeout
        samples = _samples(ids)
        rows, plans = plan_fields(fields)
        if rows != len(samples):
            raise InvalidArgument(f"columns of {rows} rows for {len(samples)} ids")
        specs = {name: plan.spec for name, plan in plans.items()}
        if not samples:
            yield [Exchange(self.servers.controller, CheckFields(self.number, specs), deadline)]
            return

        def reserve(span: int, nbytes: int, remote: bool) -> RequestBody:
            return ReserveUpdate(span, remote)

        def commit(where: Range, nbytes: int, remote: bool) -> RequestBody:
            return CommitUpdate(self.number, where, remote, samples, nbytes, specs, self._lengths(plans))

        yield from self._write(rows, plans, reserve, commit, deadline)

    def _lengths(self, plans: Mapping[str, ColumnPlan]) -> list[int] | None:
        """What length samplers go by, if the column they look at is among these."""
        plan = None if self.length_field is None else plans.get(self.length_field)
        return None if plan is None else _lengths(str(self.length_field), plan)

    def _write(
        self,
        rows: int,
        plans: dict[str, ColumnPlan],
        reserve: Callable[[int, int, bool], RequestBody],
        commit: Callable[[Range, int, bool], RequestBody],
        deadline: float,
    ) -> Steps[Answer]:
        """Lays a block out where it belongs and commits it; the answer to the commit."""
        servers, transport = self.servers, self.servers.transport
        sizes = block_nbytes(frame.layout(rows, plans))
        if sizes.frame_nbytes > servers.max_frame_bytes:
            raise TooLarge(
                f"{sizes.frame_nbytes} bytes are more than one frame of {servers.max_frame_bytes}; use fewer "
                "samples at once, or start the store with a larger max_frame_bytes",
                nbytes=sizes.frame_nbytes,
                limit=servers.max_frame_bytes,
            )
        servers.channel.check_open()
        small = sizes.nbytes <= SMALL
        lost = taken_back = 0
        while True:
            if small:
                where, unit = yield from self._slab_room(sizes.nbytes, deadline)
            else:
                request = reserve(sizes.nbytes, sizes.frame_nbytes, transport.remote)
                [answer] = yield [Exchange(servers.controller, request, deadline)]
                granted = expect(answer, Granted)
                start = granted.range.start
                where, unit = (
                    Range(granted.range.grant, granted.range.arena, start, start + sizes.nbytes),
                    granted.unit,
                )
            try:
                block = transport.stage(where)
                write_block(block, where.grant, sizes, plans, checksum=transport.remote)
                sent = transport.send(unit, where, block, deadline)
                last = Exchange(
                    servers.controller, commit(where, sizes.frame_nbytes, transport.remote), deadline
                )
                if not sent:
                    [answer] = yield [last]
                else:
                    outcomes = yield Together([*sent, last])
                    # Once the controller has confirmed, the samples are there, whatever else was answered.
                    answer = outcomes[-1]
                    if isinstance(answer, QueueError):
                        # The first that failed says why; the rest was given up.
                        failures = [one for one in outcomes if isinstance(one, QueueError)]
                        raise next((one for one in failures if not isinstance(one, Timeout)), answer)
                return answer
            except InvalidArgument as error:
                taken_back += 1
                if error.details.get("grant") != where.grant or taken_back > _UNITS_TRIED:
                    raise
                servers.slabs.forget(where.grant)  # a slab that the controller took back: use another
            except StorageLost:
                lost += 1
                if not transport.remote or lost > _UNITS_TRIED:
                    raise
                servers.slabs.forget(where.grant)  # nothing of it is kept; another unit may take it
            except BaseException:
                if not small:
                    self._tell(Return(where.grant))
                raise
            finally:
                if small:
                    self._give_back(servers.slabs.done(where))

    def _slab_room(self, nbytes: int, deadline: float) -> Steps[tuple[Range, int]]:
        slabs = self.servers.slabs
        while (room := slabs.take(nbytes)) is None:
            request = TakeSlab(self.servers.transport.remote)
            [answer] = yield [Exchange(self.servers.controller, request, deadline)]
            self._give_back(slabs.add(expect(answer, Granted)))
        return room

    def _give_back(self, grants: Sequence[int]) -> None:
        for grant in grants:
            self._tell(Return(grant))

    def fetch(
        self,
        wanted: Wanted,
        fields: Sequence[str] | None,
        lease_seconds: float,
        timeout: float,
        partial: bool,
        choose: Choose | None,
    ) -> Steps[Loan]:
        names = None if fields is None else list(fields)
        if choose is not None:
            return (yield from self._fetch_chosen(wanted, names, lease_seconds, timeout, choose))
        request = Fetch(self.number, wanted, names, partial, float(lease_seconds))
        deadline = time.monotonic() + timeout
        [answer] = yield [Exchange(self.servers.controller, request, deadline)]
        return (yield from self._read(expect(answer, Leased), wanted.task, names, deadline))

    def _fetch_chosen(
        self,
        wanted: Wanted,
        names: list[str] | None,
        lease_seconds: float,
        timeout: float,
        choose: Choose,
    ) -> Steps[Loan]:
        """Looks at what is ready, lets the user's function choose, and leases that; again if others were
        faster.
        """
        deadline = time.monotonic() + timeout
        limit = max(_CANDIDATES, _CANDIDATES_EACH * wanted.count)
        while True:
            listing = ListCandidates(self.number, wanted, limit)
            [answer] = yield [Exchange(self.servers.controller, listing, deadline)]
            candidates = expect(answer, Candidates).samples
            chosen = _chosen(choose(candidates, wanted.count), candidates)
            request = FetchChosen(self.number, wanted.task, chosen, names, float(lease_seconds))
            [answer] = yield [Exchange(self.servers.controller, request, deadline)]
            if isinstance(answer.body, Leased):
                return (yield from self._read(answer.body, wanted.task, names, deadline))
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"other consumers of task {wanted.task!r} were faster than the sampler until the deadline"
                )

    def _read(self, leased: Leased, task: str, fields: list[str] | None, deadline: float) -> Steps[Loan]:
        """Moves what was leased; a failure returns it."""
        try:
            # The wait for samples may have used up the deadline; moving what was leased gets a time of its
            # own.
            columns = yield from self.servers.transport.read(
                leased.places,
                list(self.tasks[task] if fields is None else fields),
                max(deadline, time.monotonic() + 30),
            )
        except BaseException:
            if not leased.dummy:
                self._tell(Nack(self.number, leased.lease))
            raise
        return Loan(
            leased,
            np.asarray(leased.ids, np.int64),
            np.asarray(leased.versions, np.int64),
            np.asarray(leased.priorities, np.int64),
            columns,
        )

    def get(
        self, ids: Sequence[int], fields: Sequence[str] | None, timeout: float
    ) -> Steps[dict[str, Column]]:
        deadline = time.monotonic() + timeout
        names = None if fields is None else list(fields)
        request = Locate(self.number, _samples(ids), names)
        [answer] = yield [Exchange(self.servers.controller, request, deadline)]
        return (yield from self.servers.transport.read(expect(answer, Located).places, names, deadline))

    def _control(self, body: RequestBody, timeout: float) -> Steps[Answer]:
        [answer] = yield [Exchange(self.servers.controller, body, time.monotonic() + timeout)]
        return answer

    def _tell(self, body: RequestBody) -> None:
        """Sends what cleans up, without waiting for it."""
        self.servers.channel.submit(self.servers.controller, body, timeout=30)

    def ack(self, lease: int, timeout: float) -> Steps[Answer]:
        return self._control(Ack(self.number, lease), timeout)

    def nack(self, lease: int, timeout: float) -> Steps[Answer]:
        return self._control(Nack(self.number, lease), timeout)

    def extend(self, lease: int, seconds: float, timeout: float) -> Steps[Answer]:
        return self._control(Extend(self.number, lease, float(seconds)), timeout)

    def drop(self, ids: Sequence[int], reason: str, timeout: float) -> Steps[Answer]:
        return self._control(Drop(self.number, _samples(ids), cut_reason(reason)), timeout)

    def close_group(self, key: str, count: int, tombstones: int, timeout: float) -> Steps[Answer]:
        if not 0 <= tombstones <= count:
            raise InvalidArgument(f"group {key!r}: {tombstones} tombstones of {count} members")
        return self._control(CloseGroup(self.number, str(key), int(count), int(tombstones)), timeout)

    def advance(self, version: int, timeout: float) -> Steps[Answer]:
        return self._control(Advance(self.number, int(version)), timeout)

    def admit(self, version: int, samples: int, seconds: float, timeout: float) -> Steps[int]:
        request = Admit(self.number, int(version), int(samples), float(seconds))
        return expect((yield from self._control(request, timeout)), Admitted).ticket

    def close(self, timeout: float) -> Steps[Answer]:
        return self._control(ClosePartition(self.number), timeout)

    def closed(self, timeout: float) -> Steps[bool]:
        return expect((yield from self._control(IsClosed(self.number), timeout)), Flag).value

    def ledger(self, task: str, timeout: float) -> Steps[Ledger]:
        page = expect((yield from self._control(ReadLedger(self.number, task), timeout)), LedgerPage)
        return Ledger(task, IdSet(page.acked), dropped_of(page), ids_of(page.leased), ids_of(page.pending))


def wanted_of(
    task: str,
    batch_size: int,
    sampler: Sampler | Choose | None,
    at_least: int | None,
    max_priority: int | None,
    min_version: int | None,
    max_staleness: int | None,
    ranks: Ranks,
) -> tuple[Wanted, Choose | None]:
    """What a fetch with these arguments asks for, and the user's own function where that chooses."""
    choose: Choose | None = None
    if not isinstance(sampler, Sampler | None):
        if ranks or not callable(sampler):
            raise InvalidArgument(
                f"sampler {sampler!r} is none of transferqueue.samplers, nor a function (which chooses for "
                f"one consumer: without {', '.join(ranks) or 'rank, key and sharers'})"
            )
        choose, sampler = sampler, None
    wanted = Wanted(
        task,
        int(batch_size),
        InOrder() if sampler is None else sampler,
        max_priority,
        min_version,
        None if at_least is None else int(at_least),
        max_staleness=max_staleness,
        **ranks,
    )
    wanted.check()
    return wanted, choose


def _lengths(name: str, plan: ColumnPlan) -> list[int]:
    """The length of each row: its elements, or the number itself where rows are integers."""
    if plan.spec.dtype in ("str", "bytes", "data") or (plan.spec.scalar and not _is_integer(plan)):
        raise InvalidArgument(
            f"field {name!r} is the length_field and holds {plan.spec}: give arrays (one element a token) or "
            "integers (the lengths themselves)"
        )
    if not plan.spec.scalar:
        return plan.lengths.tolist()
    values = (
        np.concatenate([np.asarray(part) for part in plan.parts]) if plan.parts else np.empty(0, np.int64)
    )
    if plan.index is not None:
        values = values[plan.index]
    return values.astype(np.int64).tolist()


def _is_integer(plan: ColumnPlan) -> bool:
    return plan.spec.stored.kind in "iu" and plan.spec.dtype == plan.spec.stored.name


def _chosen(chosen: Any, candidates: Sequence[Candidate]) -> list[int]:
    """What a user's sampler returned: ids, or the candidates themselves."""
    try:
        ids = [one.id if isinstance(one, Candidate) else int(one) for one in chosen]
    except TypeError as error:
        raise InvalidArgument(
            f"the sampler returned {chosen!r}; return the ids of some candidates (candidate.id)"
        ) from error
    strange = [one for one in ids if one not in {candidate.id for candidate in candidates}]
    if strange:
        raise InvalidArgument(
            f"the sampler chose ids that it was not offered: {shortened(strange)}; choose among candidates"
        )
    return _samples(ids)


def _samples(ids: Sequence[int]) -> list[int]:
    samples = ids.tolist() if isinstance(ids, np.ndarray) else [int(sample) for sample in ids]
    if len(set(samples)) != len(samples):
        raise InvalidArgument(
            f"{len(samples) - len(set(samples))} ids are given twice; name each sample once"
        )
    if any(not isinstance(sample, int) or sample < 0 for sample in samples):
        raise UnknownSample(
            "ids are the integers that put returned", ids=shortened([s for s in samples if s < 0])
        )
    return samples


def _each(name: str, values: int | Sequence[int], rows: int) -> int | list[int]:
    numbers = [int(values)] if isinstance(values, int | np.integer) else [int(value) for value in values]
    if any(not -(1 << 63) <= number < 1 << 63 for number in numbers):
        raise InvalidArgument(f"a {name} is beyond 64 bits")
    if isinstance(values, int | np.integer):
        return numbers[0]
    if len(numbers) != rows:
        raise InvalidArgument(f"{len(numbers)} values of {name} for {rows} samples")
    return numbers
