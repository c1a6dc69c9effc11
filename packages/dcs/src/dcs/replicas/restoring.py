"""Find the newest complete step, and bring one rank's shard of it back."""

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from dcs.errors import CorruptChunk, DcsError, Timeout
from dcs.replicas.census import Census, HeldStep, take
from dcs.replicas.errors import KeeperLost, WorldSizeMismatch
from dcs.replicas.link import Link, await_first
from dcs.replicas.messages import Ask, Fetch, Forget, KeeperStatus, Shard, Watch
from dcs.replicas.tree import Tree, rebuild
from dcs.wire.tls import Tls, client_context

CONNECT_SECONDS = 5.0
TRIES = 2  # of one keeper, for what came damaged


def restore(
    keepers: Sequence[str],
    name: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    token: str | None = None,
    tls: Tls | None = None,
    device: str | torch.device | None = None,
    timeout: float = 60.0,
) -> tuple[int, Tree] | None:
    """The newest complete step under `name` and this rank's tree of it, without taking part in a run.

    A rank that will go on from it calls `Replicas.restore`, by which all ranks get the same step. Arguments,
    result and errors are those of `Replicas` and `Replicas.restore`.
    """
    deadline = time.monotonic() + timeout
    with _observing(keepers, name, token, tls, min(CONNECT_SECONDS, timeout)) as links:
        newest = census_now(links, Watch(name, "", 0, 1, 0, 0.0)).newest_complete()
        if newest is None:
            return None
        return newest.place.step, fetch_tree(links, name, newest, rank, world_size, device, deadline)


def forget(keepers: Sequence[str], name: str, *, token: str | None = None, tls: Tls | None = None) -> None:
    """Have every keeper let go of all it holds under `name`. Raises `KeeperLost` unless all are reachable."""
    with _observing(keepers, name, token, tls, CONNECT_SECONDS) as links:
        for link in links:
            link.tell(Forget(name))


def status(address: str, *, token: str | None = None, tls: Tls | None = None) -> KeeperStatus:
    """What one keeper holds. Raises `KeeperLost`, `Unauthorized`."""
    with _observing([address], "status", token, tls, CONNECT_SECONDS) as [link]:
        return link.ask(Ask(), KeeperStatus)


def census_now(links: Sequence[Link], watch: Watch) -> Census:
    """What the keepers that are reachable hold all together, each asked anew."""
    views = {}
    for link in links:
        if link.up:
            try:
                views[link.address] = link.look(watch)
            except KeeperLost:
                continue  # so are its shards
    return take(views)


def fetch_tree(
    links: Sequence[Link],
    name: str,
    step: HeldStep,
    rank: int,
    world_size: int,
    device: str | torch.device | None,
    deadline: float,
) -> Tree:
    """One rank's tree of a step, from whichever keepers hold it undamaged.

    Raises `WorldSizeMismatch`, `CorruptChunk` (no keeper has a chunk as it was saved), `KeeperLost`,
    `Timeout`, and `DcsError` when the device it came from is not here.
    """
    if step.world_size != world_size:
        raise WorldSizeMismatch(
            f"step {step.place.step} of {name!r} was saved by {step.world_size} ranks, and is to be restored "
            f"by {world_size}; start {step.world_size} ranks, or load a checkpoint that can be cut anew"
        )
    holders = [link for link in links if link.address in step.holders[rank]]
    # A keeper on this machine first, then the others, starting at another one for each rank.
    holders = holders[rank % len(holders) :] + holders[: rank % len(holders)]
    holders.sort(key=lambda link: not link.local)
    shard, memory = _fetch_shard(holders, Fetch(name, step.place.session, rank, step.place.step), deadline)
    try:
        return rebuild(shard.structure, memory, device)
    except (RuntimeError, AssertionError) as error:  # both come from torch for a device that is not here
        raise DcsError(
            f"{shard} cannot be put where it came from: {error}; give restore(device=...)"
        ) from error


def _fetch_shard(holders: list[Link], which: Fetch, deadline: float) -> tuple[Shard, np.ndarray]:
    what = f"step {which.step} of rank {which.rank} of {which.name!r}"
    reasons: list[str] = []
    corrupt = False
    shard: Shard | None = None
    memory = np.empty(0, np.uint8)
    missing: set[int] = set()
    for link in [link for link in holders for _ in range(TRIES)]:
        if time.monotonic() > deadline:
            raise Timeout(f"{what} was not restored in time; {'; '.join(reasons)}")
        try:
            found = link.find(Fetch(which.name, which.session, which.rank, which.step, []))
            if not found.intact or (shard is not None and found != shard):
                corrupt = True
                reasons.append(f"{link.address} has it with a damaged description")
                continue
            if shard is None:
                shard = found
                memory = _allocate(shard.nbytes)
                missing = set(range(shard.chunks))
            if missing:
                link.fetch(shard, missing, memoryview(memory))
        except DcsError as error:  # lost, or dropped meanwhile
            reasons.append(str(error))
            continue
        if not missing:
            return shard, memory
        corrupt = True
        reasons.append(f"{link.address} has {len(missing)} of its {shard.chunks} chunks damaged")
    text = f"{what} cannot be restored: {'; '.join(reasons)}"
    raise CorruptChunk(text) if corrupt else KeeperLost(text)


def _allocate(nbytes: int) -> np.ndarray:
    """Fresh memory, uint8 [nbytes], in huge pages, as the kernel has to clear each page of it."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8, nbytes)


class _Observer:
    """Looks, and changes nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def watch(self, generation: int, seconds: float) -> Watch:
        return Watch(self._name, "", 0, 1, generation, seconds)

    def changed(self) -> None:
        return

    def awaiting(self) -> None:
        return


@contextmanager
def _observing(
    keepers: Sequence[str], name: str, token: str | None, tls: Tls | None, seconds: float
) -> Iterator[list[Link]]:
    observer = _Observer(name)
    context = None if tls is None else client_context(tls)
    links = [Link(address, f"an observer of {name!r}", token, observer, context) for address in keepers]
    try:
        for link in links:
            link.start()
        await_first(links, seconds)
        yield links
    finally:
        for link in links:
            link.close()
