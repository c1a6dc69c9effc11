"""The Reference role: logprobs of every response under the policy as it was before the first step."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import transferqueue as tq

from relax import schema
from relax.backends.train.base import TrainBackend
from relax.components.context import Closes, RunContext
from relax.distributed.bus import Bus
from relax.engine.micro_batches import groups_of, pack


class Reference:
    """Scores samples with frozen weights."""

    def __init__(self, context: RunContext, load: Callable[[], TrainBackend]) -> None:
        """`load` builds the backend with the frozen weights; it is called when the first group is there,
        since the actor leaves those weights before it publishes any.
        """
        self._context = context
        self._load = load

    async def run(self) -> None:
        """Until the partition is closed and drained."""
        config = self._context.config
        backend: TrainBackend | None = None
        bus = await Bus.connect(self._context.bus, config, media=self._context.media)
        try:
            while True:
                try:
                    batch = await bus.groups(
                        schema.TASK_REFERENCE,
                        config.rollout.samples_per_prompt,
                        tokens=config.actor.micro_batch_tokens,
                    )
                except tq.Timeout:
                    continue
                except tq.Closed:
                    return
                if backend is None:
                    backend = await asyncio.to_thread(self._load)
                await self._serve(bus, backend, batch)
                del batch  # which holds memory of the bus
        finally:
            if isinstance(backend, Closes):
                await asyncio.to_thread(backend.close)
            await bus.close()

    async def _serve(self, bus: Bus, backend: TrainBackend, batch: "tq.AsyncBatch") -> None:
        groups = groups_of(batch)
        packed = pack(groups)
        logprobs = (await asyncio.to_thread(backend.forward, packed)).numpy()
        bounds = packed.response_offsets.tolist()
        rows = [logprobs[a:b] for a, b in pairwise(bounds)]
        await bus.partition.update([i for group in groups for i in group.ids], {"reference_logprobs": rows})
        await batch.ack()
