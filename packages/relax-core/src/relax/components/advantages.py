"""The Advantages role: whole groups in, advantages of their tokens back to the bus."""

import numpy as np
import torch
import transferqueue as tq

from relax import algorithms, schema
from relax.algorithms.spec import AdvantageInputs, Algorithm
from relax.backends.train.base import ragged
from relax.components.assembly import algorithm_settings
from relax.components.context import RunContext
from relax.config.run import RunConfig
from relax.distributed.bus import Bus


class Advantages:
    """Computes the advantages of groups as they become whole."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._algorithm = algorithm_of(context.config)

    async def run(self) -> None:
        """Until the partition is closed and drained."""
        config = self._context.config
        bus = await Bus.connect(self._context.bus, config, media=self._context.media)
        try:
            while True:
                try:
                    batch = await bus.groups(schema.TASK_ADVANTAGES, config.rollout.samples_per_prompt)
                except tq.Timeout:
                    continue
                except tq.Closed:
                    return
                await self._serve(bus, batch)
                del batch  # which holds memory of the bus
        finally:
            await bus.close()

    async def _serve(self, bus: Bus, batch: "tq.AsyncBatch") -> None:
        advantages = group_advantages(
            self._algorithm,
            [float(reward) for reward in batch["reward"]],
            [int(ordinal) for ordinal in batch["ordinal"]],
            list(batch["loss_mask"]),
        )
        await bus.partition.update(batch.ids, {"advantages": advantages})
        await batch.ack()


def group_advantages(
    algorithm: Algorithm, rewards: list[float], groups: list[int], masks: list[np.ndarray]
) -> list[np.ndarray]:
    """Advantages of whole groups: a float32 [response] array a sample."""
    mask, offsets = ragged(masks, torch.float32)
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        groups=torch.tensor(groups, dtype=torch.int64),
        mask=mask,
        offsets=offsets,
    )
    values = algorithm.advantages(inputs).numpy()
    return [values[start:end] for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def algorithm_of(config: RunConfig) -> Algorithm:
    """The run's algorithm, with the settings that were given over its own."""
    return algorithms.build(config.algorithm.name, algorithm_settings(config))
