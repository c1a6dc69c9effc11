"""Our side: a coordinator, ranks that publish, and subscribers, each a process."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import dcs
from measure.cpu_clock import cpu_seconds

from .peers import require_same
from .sides import Sides
from .workers import ANSWER_SECONDS, Worker, together

_RUNS = itertools.count(1)
SLOTS = 2
"""Of a subscriber; so many arenas has a rank, too."""


@dataclass(frozen=True)
class Way:
    """How subscribers take versions.

    Attributes:
        options: of `dcs.Subscriber`.
        wires: how a version may then have come, as dcs says.
    """

    options: Mapping[str, Any]
    wires: frozenset[str]


TCP = Way({"wires": ("tcp",), "delta": False}, frozenset({"tcp"}))
"""Over TCP and whole, as from another machine without differences."""
DELTA = Way({"wires": ("tcp",), "delta": True}, frozenset({"tcp", "tcp+delta"}))
"""Over TCP, as the difference from the version before if there is one."""
MAPPED = Way({"wires": ("shm",)}, frozenset({"shm"}))
"""In memory of this machine that is mapped."""


class Fleet:
    """A run of its own. A context manager that ends it.

    Args:
        sides: sizes, and where processes come from.
        receivers: how many subscribers are there from the beginning.
        way: how the subscribers take versions.
        nbytes: of the weights; None: as `sides` has it.
        layers: of the model; None: 36.
        ranks: how many publish.
        cut: of the weights over the ranks.
        engines: words for the subscribers beside, such as their `cut`.

    Attributes:
        publishers, subscribers: the processes.
        version: the newest that was published.
    """

    def __init__(
        self,
        sides: Sides,
        receivers: int,
        way: Way,
        *,
        nbytes: int | None = None,
        layers: int | None = None,
        ranks: int = 1,
        cut: str = "whole",
        engines: Mapping[str, Any] | None = None,
    ) -> None:
        self._sides = sides
        self._receivers = receivers
        self._way = way
        self._engines = {"options": dict(way.options), **(engines or {})}
        self._ranks = ranks
        self._cut = cut
        self._words: dict[str, Any] = {"nbytes": nbytes or sides.nbytes, "run": f"run-{next(_RUNS)}"}
        if layers is not None:
            self._words["layers"] = layers
        self._exits = ExitStack()
        self.version = 0

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self._coordinator = exits.enter_context(dcs.serve())
            self._words["address"] = self._coordinator.address
            ranks = [
                (
                    "our_publisher",
                    {
                        "rank": rank,
                        "ranks": self._ranks,
                        "cut": self._cut,
                        "options": {"wires": self._way.options["wires"]},
                        **self._words,
                    },
                )
                for rank in range(self._ranks)
            ]
            self.publishers = exits.enter_context(self._sides.workers(ranks))
            engines = [self._engine(at) for at in range(self._receivers)]
            self.subscribers = exits.enter_context(self._sides.workers(engines))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    @property
    def pids(self) -> list[int]:
        """All processes of the run, the coordinator's included."""
        return [self._coordinator.pid, *(one.pid for one in [*self.publishers, *self.subscribers])]

    def needed(self) -> int:
        """Bytes of the weights that the subscribers want, of all of them."""
        return sum(one["bytes"] for one in together(self.subscribers, "needs"))

    def join(self, index: int, **words: Any) -> Worker:
        """One subscriber more, by the number of its place; not one of `subscribers` yet."""
        (late,) = self._exits.enter_context(self._sides.workers([self._engine(index, **words)]))
        return late

    def publish(self) -> dict[str, float]:
        """The next version: when it was begun, when every rank had frozen it, and the CPU-seconds of that."""
        self.version += 1
        answers = together(self.publishers, "publish", version=self.version)
        return {
            "begun": min(one["begun"] for one in answers),
            "frozen": max(one["frozen"] for one in answers),
            "freeze cpu": sum(one["freeze_cpu"] for one in answers),
        }

    def expect(self, subscribers: Sequence[Worker]) -> None:
        """Let them wait for the version that comes next."""
        for one in subscribers:
            one.tell("take", after=self.version, seconds=ANSWER_SECONDS / 2)

    def done(self, subscribers: Sequence[Worker]) -> dict[str, float]:
        """When the last of them had it staged (`done`); bytes that came `from ranks`. Raises when it was
        another version, or came in another way.
        """
        answers = [one.answer() for one in subscribers]
        wrong = {one["version"] for one in answers} - {self.version}
        if wrong:
            raise RuntimeError(f"version {self.version} was published, {sorted(wrong)} came")
        wires = {one["wire"] for one in answers} - self._way.wires
        if wires:
            raise RuntimeError(
                f"version {self.version} came by {sorted(wires)}, not by {set(self._way.wires)}"
            )
        return {
            "done": max(one["done"] for one in answers),
            "from ranks": sum(one["from_ranks"] for one in answers),
        }

    def settle(self, subscribers: Sequence[Worker], *, whole: bool) -> None:
        """Look at what is staged, off the clock, and acknowledge it."""
        for one in subscribers:  # one by one, as a whole look takes as much memory again
            one.ask("check", whole=whole)
        together(subscribers, "ack")
        together(self.publishers, "settle", seconds=ANSWER_SECONDS / 2)

    def catch_up(self, late: Worker) -> dict[str, float]:
        """Let one that has just joined take, check and acknowledge the newest version; as `done`."""
        late.tell("take", after=-1, seconds=ANSWER_SECONDS / 2)
        found = self.done([late])
        late.ask("check", whole=True)
        late.ask("ack")
        return found

    def round(self, *, same_bits: bool = False, hashes: bool = False) -> dict[str, float]:
        """Publish a version and have it staged everywhere.

        Args:
            hashes: measure what verifying costs, which makes it cost more.
            same_bits: compare the hash of what each subscriber has with the publisher's, which may then have
                changed its weights in any way. Else they are those of `payload`, stamped.

        Returns:
            Seconds from the call to the last subscriber (`wall`) and from the end of the freeze (`transfer`);
            CPU-seconds of all processes without the thread that publishes (`cpu`), of that (`freeze cpu`),
            and, with `hashes`, of verifying among the former (`verify cpu`); bytes that the ranks (`sent`)
            and the subscribers (`sent by subscribers`) have sent, and what dcs says came `from ranks`.
        """
        together(self.subscribers, "measure", on=hashes)
        before = self.counts()
        cpu = cpu_seconds(self.pids)
        self.expect(self.subscribers)
        published = self.publish()
        taken = self.done(self.subscribers)
        spent = cpu_seconds(self.pids) - cpu
        after = self.counts()
        if hashes and not after["verify cpu"] > before["verify cpu"]:
            raise RuntimeError(f"version {self.version} came, and no hash was measured in the subscribers")
        if same_bits:
            everyone = [*self.publishers, *self.subscribers]
            require_same([one["digest"] for one in together(everyone, "digest")])
        self.settle(self.subscribers, whole=self.version == 1 and not same_bits)
        return {
            "wall": taken["done"] - published["begun"],
            "transfer": taken["done"] - published["frozen"],
            "from ranks": taken["from ranks"],
            "cpu": spent - published["freeze cpu"],
            "freeze cpu": published["freeze cpu"],
            **{name: after[name] - before[name] for name in before},
        }

    def warm_up(self) -> None:
        """Fill both slots of every subscriber, and both arenas of every rank, for the first time."""
        for _ in range(SLOTS):
            self.round()

    def counts(self) -> dict[str, float]:
        """Bytes sent, and CPU-seconds spent on verifying by the subscribers, since each began."""
        sent = together(self.publishers, "sent")
        counts = together(self.subscribers, "counts")
        return {
            "sent": sum(one["bytes"] for one in sent),
            "sent by subscribers": sum(one["sent"] for one in counts),
            "verify cpu": sum(one["verify_cpu"] for one in counts),
        }

    def _engine(self, index: int, **words: Any) -> tuple[str, dict[str, Any]]:
        own = {"name": f"engine-{index}", "index": index}
        return "our_subscriber", {**own, **self._words, **self._engines, **words}
