"""What our side is held against, one round at a time: C over TCP, gloo, and files."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure.child import Child
from measure.cpu_clock import cpu_seconds
from measure.rounds import Round

from .sides import Sides
from .workers import ANSWER_SECONDS, spent, together


@contextlib.contextmanager
def c_sockets(sides: Sides, receivers: int) -> Iterator[dict[str, Round]]:
    """Rounds of `C`, and of `C, verifying` where the system has xxHash's library; none without a compiler."""
    sender = sides.c_child("send", nbytes=sides.nbytes, receivers=receivers)
    if sender is None:
        yield {}
        return
    with contextlib.ExitStack() as exits:
        exits.enter_context(sender)
        takers: list[Child] = []
        for _ in range(receivers):
            taker = sides.c_child("receive", nbytes=sides.nbytes, port=sender.ready["port"])
            assert taker is not None
            takers.append(exits.enter_context(taker))
        pids = [child.pid for child in (sender, *takers)]

        def move(verify: bool) -> dict[str, float]:
            before = cpu_seconds(pids)
            for taker in takers:
                taker.tell(do="take", verify=verify)
            begun = sender.ask(ANSWER_SECONDS, do="send")["begun"]
            done = max(taker.answer(ANSWER_SECONDS)["done"] for taker in takers)
            return {"cpu": cpu_seconds(pids) - before, "wall": done - begun}

        move(False)
        require_same([child.ask(ANSWER_SECONDS, do="sum")["sum"] for child in (sender, *takers)])
        rounds: dict[str, Round] = {"C": lambda: move(False)}
        if all(taker.ready["verifies"] for taker in takers):
            rounds["C, verifying"] = lambda: move(True)
        else:
            why = "libxxhash.so.0 is not installed; the system's package manager has it"
            sides.skip("C that verifies", why)
        yield rounds


@contextlib.contextmanager
def gloo(sides: Sides, receivers: int, nbytes: int, layers: int) -> Iterator[dict[str, Round]]:
    """Rounds of `buckets` and of `tensors`."""
    store = str(sides.folder / f"gloo-{receivers}-{layers}")
    words: dict[str, Any] = {"store": store, "size": receivers + 1, "nbytes": nbytes, "layers": layers}
    roles = [("gloo_rank", {"rank": rank, **words}) for rank in range(receivers + 1)]
    with sides.workers(roles) as ranks:

        def broadcast(what: str) -> dict[str, float]:
            before = spent(ranks)
            answers = together(ranks, what)
            begun = max(one["begun"] for one in answers)
            return {"cpu": spent(ranks) - before, "wall": max(one["done"] for one in answers) - begun}

        for what in ("buckets", "tensors"):
            broadcast(what)
            require_same([one["digest"] for one in together(ranks, "digest")])
        yield {"buckets": lambda: broadcast("buckets"), "tensors": lambda: broadcast("tensors")}


@contextlib.contextmanager
def files(sides: Sides, receivers: int, folders: dict[str, Path]) -> Iterator[dict[str, Round]]:
    """Rounds through a file, saved by one and loaded by all.

    Args:
        folders: where the file of a kind, `torch` or `safetensors`, lies.
    """
    with sides.workers([("file_user", {"nbytes": sides.nbytes})] * (receivers + 1)) as users:
        writer, *readers = users
        version = 0

        def through(kind: str) -> dict[str, float]:
            nonlocal version
            version += 1
            path = folders[kind] / "weights"
            words = {"path": str(path), "kind": kind, "version": version}
            before = spent(users)
            begun = writer.ask("save", **words)["begun"]
            done = max(one["done"] for one in together(readers, "load", **words))
            cpu = spent(users) - before
            path.unlink()
            return {"cpu": cpu, "wall": done - begun}

        yield {kind: lambda kind=kind: through(kind) for kind in folders}


def require_same(digests: Sequence[str]) -> None:
    """Raise unless those who received have what the first one sent."""
    wrong = sum(other != digests[0] for other in digests[1:])
    if wrong:
        raise RuntimeError(
            f"{wrong} of {len(digests) - 1} receivers have other bytes than were sent, so nothing counts"
        )
