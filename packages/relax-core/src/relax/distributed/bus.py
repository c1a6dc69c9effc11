"""The data bus of a run: transferqueue with the schema's names, samples in and whole groups out.

What a role fetches are read-only views of memory that all roles map. A view keeps that memory from being used
again, so a role lets go of a batch as soon as it has acked it.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transferqueue as tq

from relax import schema
from relax.config.run import RunConfig
from relax.distributed.media import fields_of
from relax.distributed.version_clock import VersionViolation

READY_AT_ONCE = 64
"""Groups that a role takes from the bus in one round trip, if so many are ready."""

LEASE_SECONDS = 86_400.0
"""Of a batch, however long its step: what a role holds returns when its connection ends, not by the clock."""


class BusFull(RuntimeError):
    """The bus had no room for so long that the run is stuck, or a group can never fit."""


@dataclass(frozen=True)
class Endpoint:
    """Where a service of the run listens, the token it asks for, and how payload travels ("auto": by the
    fastest way there is).
    """

    address: str
    token: str | None = None
    transport: str = "auto"


@dataclass(frozen=True)
class Usage:
    """What the bus holds.

    Attributes:
        samples: put and not yet through every task.
        payload: their bytes.
        memory: bytes of memory in use, payload that only a view still needs included.
        pinned: of `memory`, what no sample needs any more and only a role's view keeps.
        waiting_puts: groups that wait for room.
    """

    samples: int
    payload: int
    memory: int
    pinned: int
    waiting_puts: int


@dataclass(frozen=True)
class Sample:
    """One finished member of a group, as rollout puts it on the bus. Shapes as in `relax.schema`."""

    prompt_key: str
    group: str
    ordinal: int
    member: int
    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    policy_versions: np.ndarray
    reward: float
    reward_parts: Mapping[str, float]
    truncated: bool
    turns: int
    media: Sequence[Mapping[str, Any]] = ()
    routes: np.ndarray | None = None

    @property
    def oldest_version(self) -> int:
        return int(self.policy_versions[:, 0].min())


class Bus:
    """One role's connection to the training partition."""

    def __init__(
        self, queue: "tq.AsyncClient", partition: "tq.AsyncPartition", config: RunConfig, media: bool
    ) -> None:
        self._queue = queue
        self._config = config
        self._media = media
        self.partition = partition

    @classmethod
    async def connect(cls, endpoint: Endpoint, config: RunConfig, *, media: bool) -> "Bus":
        """Open the training partition, creating it if this role is the first."""
        queue = await tq.connect_async(endpoint.address, token=endpoint.token, transport=endpoint.transport)
        partition = await queue.partition(
            schema.PARTITION,
            tasks=schema.tasks(reference=config.reference, media=media, routes=config.actor.routing_replay),
            max_samples=config.batch_samples * (config.max_staleness + 1),
            length_field="tokens",
            max_staleness=config.max_staleness,
        )
        return cls(queue, partition, config, media)

    # What rollout does

    async def admit_step(self, step: int, version: int) -> int:
        """Ask for the room of all samples of a step before the first is started, on an engine that serves
        `version`. Returns the ticket for `put_group`. Waits while as many samples as `max_staleness` allows
        are not trained.

        Raises:
            VersionViolation: the bus knows of an actor so far on that `version` is too old.
            BusFull: nothing was trained until the deadline.
        """
        wait = self._config.queue.wait_seconds
        try:
            return await self.partition.admit(
                version, self._config.batch_samples, seconds=LEASE_SECONDS, timeout=wait
            )
        except tq.InvalidArgument as error:
            raise VersionViolation(
                f"the bus refuses step {step} on engines of version {version}: {error}"
            ) from error
        except tq.Full as error:
            raise BusFull(
                f"the bus took no samples of step {step} for {wait:g} s (queue.wait_seconds): {error}"
            ) from error

    async def put_group(self, samples: Sequence[Sample], step: int, ticket: int | None = None) -> np.ndarray:
        """Put one whole group, to be trained by `step`; waits for room. Returns the ids the bus gave, in
        order.

        Raises:
            BusFull: there was no room until the deadline, or there never can be.
        """
        group = samples[0].group
        fields, shared = columns(samples, media=self._media)
        limits = self._config.queue
        try:
            return await self.partition.put(
                fields,
                groups=[group] * len(samples),
                version=[sample.oldest_version for sample in samples],
                priority=step,
                shared=shared,
                ticket=ticket,
                timeout=limits.wait_seconds,
            )
        except tq.Full as error:
            raise BusFull(
                f"group {group} of step {step} found no room on the bus for {limits.wait_seconds:g} s "
                f"(queue.wait_seconds): queue.max_bytes = {limits.max_bytes} has to hold at least the "
                f"samples of one step; raise it, or lower rollout.prompts_per_step or "
                f"rollout.samples_per_prompt ({error})"
            ) from error
        except tq.TooLarge as error:
            raise BusFull(
                f"group {group} of step {step} can never go on the bus: raise queue.max_bytes = "
                f"{limits.max_bytes}, or lower rollout.samples_per_prompt ({error})"
            ) from error

    # What the others do

    async def advance(self, version: int) -> None:
        """Say that the policy is at `version`: what is more than `max_staleness` behind it is neither
        admitted nor given to the actor.
        """
        await self.partition.advance(version)

    async def groups(
        self,
        task: str,
        size: int,
        *,
        most: int = READY_AT_ONCE,
        least: int = 1,
        tokens: int | None = None,
        up_to_step: int | None = None,
        max_staleness: int | None = None,
        timeout: float = 60.0,
    ) -> "tq.AsyncBatch":
        """The whole groups of `size` samples that are ready, lowest step first.

        Args:
            task: for which.
            size: members of a group.
            most: groups at most.
            least: groups that are enough.
            tokens: so many tokens at most, unless one group has more; once no further group fits they are
                enough, too.
            up_to_step: only groups of this step or an earlier one.
            max_staleness: only groups that lie at most so many versions behind what `advance` told.
            timeout: seconds to wait.

        Raises:
            tq.Timeout: there were not enough.
            tq.Closed: there will be none any more.
        """
        groups = tq.samplers.Groups(size)
        return await self.partition.fetch(
            task,
            size * most,
            at_least=size * least,
            sampler=groups if tokens is None else tq.samplers.TokenBudget(tokens, n=size),
            max_priority=up_to_step,
            max_staleness=max_staleness,
            lease_seconds=LEASE_SECONDS,
            timeout=timeout,
        )

    async def refuse_stale(self, task: str, step: int, oldest: int) -> None:
        """Look whether what `task` waits for is there but too old to be given out.

        Raises:
            VersionViolation: there are groups for `step` with tokens of a version before `oldest`. They are
                dropped with that reason.
        """
        ready: list[tq.Candidate] = []

        def look(candidates: Sequence["tq.Candidate"], count: int) -> Sequence[int]:
            ready.extend(candidates)
            raise _Looked

        with contextlib.suppress(_Looked, tq.Timeout):
            await self.partition.fetch(task, 1, sampler=look, max_priority=step, timeout=_LOOK_SECONDS)
        versions = {sample.group: sample.version for sample in ready if sample.version < oldest}
        if not versions:
            return
        found = ", ".join(f"group {group} (version {version})" for group, version in versions.items())
        reason = (
            f"older than max_staleness = {self._config.max_staleness} allows step {step}, which takes "
            f"version {oldest} and newer"
        )
        await self.partition.drop([sample.id for sample in ready if sample.group in versions], reason)
        raise VersionViolation(f"{found}: {reason}; the bus refuses to give them to the {task}")

    async def usage(self) -> Usage:
        stats = await self._queue.stats()
        of = stats.partitions[schema.PARTITION]
        return Usage(of.samples, of.nbytes, stats.memory.used, stats.memory.pinned_only, stats.waiting_puts)

    async def close(self) -> None:
        await self._queue.close()


_LOOK_SECONDS = 1.0


class _Looked(Exception):
    """Ends a fetch that was only to see what is ready."""


def columns(samples: Sequence[Sample], *, media: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of samples as columns, and the media columns that all of them share."""
    fields: dict[str, Any] = {
        "prompt_key": [s.prompt_key for s in samples],
        "group": [s.group for s in samples],
        "ordinal": np.array([s.ordinal for s in samples], np.int64),
        "member": np.array([s.member for s in samples], np.int32),
        "prompt_length": np.array([s.prompt_length for s in samples], np.int32),
        "tokens": [np.asarray(s.tokens, np.int32) for s in samples],
        "loss_mask": [np.asarray(s.loss_mask, np.uint8) for s in samples],
        "rollout_logprobs": [np.asarray(s.rollout_logprobs, np.float32) for s in samples],
        "policy_versions": [np.asarray(s.policy_versions, np.int32) for s in samples],
        "reward": np.array([s.reward for s in samples], np.float32),
        "reward_parts": [dict(s.reward_parts) for s in samples],
        "truncated": np.array([s.truncated for s in samples], np.uint8),
        "turns": np.array([s.turns for s in samples], np.int32),
    }
    if samples[0].routes is not None:
        fields[schema.ROUTES] = [s.routes for s in samples]
    shared: dict[str, Any] = {}
    if not media:
        return fields, shared
    first = samples[0].media
    same = all(
        len(s.media) == len(first) and all(a is b for a, b in zip(s.media, first, strict=True))
        for s in samples
    )
    if same and first:
        index = np.zeros(len(samples), np.int64)
        for name, array in fields_of(first).items():
            if array is None:
                fields[name] = [None] * len(samples)
            else:
                shared[name] = ([array], index)
    else:
        rows = [fields_of(s.media) for s in samples]
        fields |= {name: [row[name] for row in rows] for name in schema.MEDIA_FIELDS}
    return fields, shared
