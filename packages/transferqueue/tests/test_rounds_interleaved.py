"""Rounds in any interleaving: every rank gets the same number of micro-batches, and its sharers the same."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transferqueue.errors import Closed, StaleLease
from transferqueue.samplers import Balanced, Freshest, Groups, InOrder, Sampler, TokenBudget
from transferqueue.scheduling.partition import Partition, Row, Wanted
from transferqueue.scheduling.samples import Lease
from transferqueue.values.columns import FieldSpec

SPEC = FieldSpec("int32", (), True)
WORLD = 3
MEMBERS = 2
N = 2
SAMPLERS: list[Sampler] = [
    InOrder(), Groups(N), Freshest(), TokenBudget(6), TokenBudget(6, N),
    Balanced(), Balanced(6), Balanced(6, N),
]  # fmt: skip


class Ranks(RuleBasedStateMachine):
    """Ranks with two sharers each, that ask, ack, give up, are late and lose answers in any order."""

    sampler: Sampler
    terms: dict[str, Any]

    @initialize(
        sampler=st.sampled_from(SAMPLERS),
        streamed=st.booleans(),
        sharers=st.integers(1, MEMBERS),
    )
    def start(self, sampler: Sampler, streamed: bool, sharers: int) -> None:
        self.part = Partition("p", {"t": ["x"]}, length_field="x")
        self.now = 0.0
        self.sampler = sampler
        balanced = isinstance(sampler, Balanced)
        self.count = WORLD * N if balanced else N
        self.sharers = sharers
        self.terms = {"world_size": WORLD, "sharers": sharers}
        if streamed and not balanced:
            self.terms["global_batch"] = WORLD * N * 2
        self.got: dict[tuple[int, int], list[Lease | None]] = {
            (rank, member): [] for rank in range(WORLD) for member in range(sharers)
        }
        self.out: list[Lease] = []
        self.lost: tuple[Lease, tuple[int, int]] | None = None
        self.acks: dict[int, int] = {}
        self.done: set[int] = set()
        self.ended: dict[tuple[int, int], int] = {}

    @property
    def grouped(self) -> bool:
        return isinstance(self.sampler, Groups) or getattr(self.sampler, "n", None) is not None

    @precondition(lambda self: not self.part.closed)
    @rule(groups=st.integers(1, 5), length=st.integers(0, 7))
    def put(self, groups: int, length: int) -> None:
        first = self.part.orders
        rows = [
            Row(s, f"g{s // N}" if self.grouped else None, groups, 0, 1, length)
            for s in range(first, first + groups * N)
        ]
        self.part.put(rows, {"x": SPEC}, {})

    def ask(self, seat: tuple[int, int]) -> bool:
        """Returns whether the seat got an answer."""
        rank, member = seat
        try:
            wanted = Wanted("t", self.count, self.sampler, rank=rank, member=member, **self.terms)
            wanted.check()
            loan = self.part.lease(wanted, now=self.now, seconds=10, owner=rank * MEMBERS + member)
        except Closed:
            assert self.part.closed
            self.ended.setdefault(seat, len(self.got[seat]))
            return True
        except StaleLease:
            assert self.sharers > 1  # else nobody can have given it back
            self.got[seat].append(None)
            self.lost = None
            return True
        if loan is None:
            return False
        self.got[seat].append(loan)
        if loan.id:
            self.out.append(loan)
        self.lost = (loan, seat)
        assert loan.ids
        assert loan.dummy == (loan.id == 0)
        return True

    @rule(rank=st.integers(0, WORLD - 1), member=st.integers(0, MEMBERS - 1))
    def fetch(self, rank: int, member: int) -> None:
        seat = (rank, member % self.sharers)
        if seat not in self.ended:
            self.ask(seat)

    @rule(rank=st.integers(0, WORLD - 1))
    def run_ahead(self, rank: int) -> None:
        """One rank asks for all there is, acking as it goes, while the others are behind."""
        seat = (rank, 0)
        while seat not in self.ended and self.ask(seat):
            if self.out and self.out[-1] is self.got[seat][-1]:
                self.take_ack(self.out[-1])

    @precondition(lambda self: self.lost is not None)
    @rule()
    def answer_does_not_arrive(self) -> None:
        assert self.lost is not None
        loan, seat = self.lost
        self.lost = None
        if loan in self.out or loan.dummy:
            if not self.part.samples:
                return  # nothing could be copied
            self.part.take_back(loan, self.now)
            self.got[seat].pop()
            self.forget(loan)  # where the others could not get the same, their lease has ended, too

    def forget(self, loan: Lease) -> None:
        """A lease ends for all who share it."""
        self.out = [one for one in self.out if one.id in self.part.leases]
        if loan in self.out:
            self.out.remove(loan)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.take_ack(data.draw(st.sampled_from(self.out)))

    def take_ack(self, loan: Lease) -> None:
        if self.lost is not None and self.lost[0] is loan:
            self.lost = None
        self.out.remove(loan)
        before = set(self.part.tasks["t"].acked)
        self.part.ack(loan.id, self.now)
        new = set(self.part.tasks["t"].acked) - before
        assert not new & self.done
        assert new <= set(loan.ids)
        self.done |= new

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.out))
        if self.lost is not None and self.lost[0] is loan:
            self.lost = None
        self.part.nack(loan.id, self.now)
        self.forget(loan)

    @rule(seconds=st.integers(0, 6))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.part.lapse(self.now)
        self.out = [loan for loan in self.out if loan.id in self.part.leases]

    @precondition(lambda self: len(self.part.samples) > 6)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(list(self.part.samples)))
        self.part.drop([sample], "because")

    @precondition(lambda self: len(self.part.samples) + len(self.done) > 4)
    @rule()
    def close(self) -> None:
        self.part.close()

    @invariant()
    def no_sample_is_in_two_hands(self) -> None:
        held: dict[int, int] = {}
        for number, lease in self.part.loans.out.items():
            for sample in lease.samples:
                assert sample not in held
                assert sample not in self.done
                held[sample] = number

    @invariant()
    def parts_of_a_round_belong_together(self) -> None:
        most = max(map(len, self.got.values()))
        for number in range(most):
            parts = {seat: loans[number] for seat, loans in self.got.items() if len(loans) > number}
            lasts = {loan.is_last for loan in parts.values() if loan is not None}
            assert len(lasts) == 1 or not any(parts.values())
            for rank in range(WORLD):
                same = [loan.ids for (r, _), loan in parts.items() if r == rank and loan is not None]
                assert all(ids == same[0] for ids in same)
            for loan in parts.values():
                if loan is not None and not loan.dummy:
                    self.check_part(loan)

    def check_part(self, loan: Lease) -> None:
        sampler = self.sampler
        if self.grouped and not isinstance(sampler, Balanced):
            for sample in loan.samples:
                assert sample.group is not None
                mates = set(range(sample.id // N * N, sample.id // N * N + N))
                assert mates <= set(loan.ids) | set(self.part.dropped)
        budget = (
            sampler.tokens if isinstance(sampler, TokenBudget) else getattr(sampler, "token_budget", None)
        )
        if budget is not None:
            units = {s.group.key if self.grouped and s.group else s.id for s in loan.samples}
            alone = len(loan.samples) == 1 or (isinstance(sampler, TokenBudget) and len(units) == 1)
            assert alone or sum(s.length for s in loan.samples) <= budget

    def teardown(self) -> None:
        """Lets everybody fetch to the end of the stream: then all have got equally many."""
        if not hasattr(self, "part"):
            return
        self.part.close()
        turns = 0
        while len(self.ended) < len(self.got):
            turns += 1
            assert turns < 1000, "the stream does not end"
            progress = False
            for seat in self.got:
                if seat not in self.ended:
                    progress |= self.ask(seat)
            for loan in list(self.out):
                if loan.id in self.part.leases:
                    self.part.ack(loan.id, self.now)
            if not progress:
                self.now += 11
                self.part.lapse(self.now)
        self.parts_of_a_round_belong_together()
        assert len(set(self.ended.values())) == 1


Ranks.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_every_rank_gets_the_same_number_of_micro_batches = Ranks.TestCase


class DeepRanks(Ranks):
    pass


DeepRanks.TestCase.settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)
test_every_rank_gets_the_same_number_of_micro_batches_in_depth = pytest.mark.timeout(900)(
    pytest.mark.slow(DeepRanks.TestCase)
)
