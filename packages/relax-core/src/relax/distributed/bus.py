"""The data bus of a run: transferqueue with the schema's names, samples in and whole groups out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transferqueue as tq

from relax import schema

READY_AT_ONCE = 64
"""Groups that a role takes from the bus in one round trip, if so many are ready."""


@dataclass(frozen=True)
class Endpoint:
    """Where a service of the run listens, and the token it asks for."""

    address: str
    token: str | None = None


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

    @property
    def oldest_version(self) -> int:
        return int(self.policy_versions[:, 0].min())


class Bus:
    """One role's connection to the training partition."""

    def __init__(self, queue: "tq.AsyncClient", partition: "tq.AsyncPartition", media: bool) -> None:
        self._queue = queue
        self._media = media
        self.partition = partition

    @classmethod
    async def connect(cls, endpoint: Endpoint, *, reference: bool, media: bool) -> "Bus":
        """Open the training partition, creating it if this role is the first."""
        queue = await tq.connect_async(endpoint.address, token=endpoint.token)
        partition = await queue.partition(
            schema.PARTITION, tasks=schema.tasks(reference=reference, media=media)
        )
        return cls(queue, partition, media)

    async def put_group(self, samples: Sequence[Sample], step: int) -> np.ndarray:
        """Put one whole group, to be trained by `step`. Returns the ids the bus gave, in order."""
        group = samples[0].group
        fields, shared = columns(samples, media=self._media)
        return await self.partition.put(
            fields,
            groups=[group] * len(samples),
            version=[sample.oldest_version for sample in samples],
            priority=step,
            shared=shared,
        )

    async def groups(
        self,
        task: str,
        size: int,
        *,
        most: int = READY_AT_ONCE,
        up_to_step: int | None = None,
        timeout: float = 60.0,
    ) -> "tq.AsyncBatch":
        """The whole groups of `size` samples that are ready, at least one and at most `most`, lowest step
        first.
        """
        return await self.partition.fetch(
            task,
            size * most,
            at_least=size,
            sampler=tq.samplers.Groups(size),
            max_priority=up_to_step,
            timeout=timeout,
        )

    async def depth(self) -> int:
        """Samples put and not yet through every task."""
        stats = await self._queue.stats()
        return stats.partitions[schema.PARTITION].samples

    async def close(self) -> None:
        await self._queue.close()


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
    shared: dict[str, Any] = {}
    if not media:
        return fields, shared
    first = samples[0].media
    same = all(
        len(s.media) == len(first) and all(a is b for a, b in zip(s.media, first, strict=True))
        for s in samples
    )
    for name in schema.MEDIA_FIELDS:
        key = name.removeprefix(schema.MEDIA_PREFIX)
        if same and first:
            shared[name] = ([_joined(first, key)], np.zeros(len(samples), np.int64))
        else:
            fields[name] = [_joined(s.media, key) if s.media else None for s in samples]
    return fields, shared


def media_of(batch: Any, row: int) -> list[dict[str, Any]]:
    """The media of a row as one item, every tensor joined over the row's images in order; empty for none."""
    item = {
        name.removeprefix(schema.MEDIA_PREFIX): batch[name][row]
        for name in batch.fields
        if name.startswith(schema.MEDIA_PREFIX)
    }
    item = {key: value for key, value in item.items() if value is not None}
    return [{"kind": "image", **item}] if item else []


def _joined(items: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return np.concatenate([item[key] for item in items if key in item])
