"""One step of reinforcement learning in one process, with routes captured, carried and replayed, or without.

Generate, make samples of it, put them on the bus and fetch them as a run does, train in micro-batches, step,
commit the new weights to the engine. Both sides do the same work on the same prompts and seeds.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transferqueue as tq
from agentic import Encoded, Generation, GenerationRequest, Sampling, Transcript, TranscriptBuilder
from relax import schema
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.routes import routing_of
from relax.backends.train.conformance import policy_gradient
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.config import resolve
from relax.distributed.bus import Bus, Endpoint, Sample
from relax.engine.episode_routes import routes_of
from relax.engine.micro_batches import groups_of, pack

from .language import Text

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, GROUPS_A_BATCH = 8, 8, 32, 64, 4


class Step:
    """A side: an engine, a bus and a trainer that start from one folder.

    Args:
        folder: a trained model.
        text: where prompts come from.
        replay: capture, carry and replay routes.

    Attributes:
        routing: how the model routes.
    """

    def __init__(self, folder: Path, text: Text, *, replay: bool) -> None:
        self._replay = replay
        self._text = text
        routing = routing_of(json.loads((folder / "config.json").read_text()))
        assert routing is not None
        self.routing = routing
        self._engine = TransformersEngine(folder, version=0, capture_routes=replay)
        # So small a rate that both sides go on generating the same; the work is that of any rate.
        self._trainer = TorchNative(folder, settings=TrainerSettings(lr=1e-7))
        self._server = tq.serve(token="t")
        self._runner = asyncio.Runner()
        config = resolve(
            {
                "data": "none.jsonl",
                "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
                "actor": {"routing_replay": replay},
            },
            {},
            "a benchmark",
        )
        endpoint = Endpoint(self._server.address, "t")
        self._bus = self._runner.run(Bus.connect(endpoint, config, media=False))
        self._steps = 0

    def __call__(self) -> Mapping[str, float]:
        """Do one; CPU-seconds of its parts and of all of it, of this process with all its threads."""
        return self._runner.run(self._step())

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.run(self._bus.close())
        self._runner.close()
        self._server.close()

    async def _step(self) -> dict[str, float]:
        clock = [time.process_time()]
        prompts = self._text.windows(PROMPTS, PROMPT_TOKENS, 1000 + self._steps)
        sampling = Sampling(max_new_tokens=NEW_TOKENS)
        requests = [
            GenerationRequest(f"{at}-{member}", prompt, sampling, seed=self._steps * SAMPLES + member)
            for at, prompt in enumerate(prompts)
            for member in range(SAMPLES)
        ]
        made = {done.id: done.generation async for done in self._engine.generate(requests)}
        clock.append(time.process_time())
        for at in range(PROMPTS):
            own = requests[at * SAMPLES : (at + 1) * SAMPLES]
            await self._bus.put_group(self._samples(at, own, made), self._steps)
        scored = await self._bus.groups(schema.TASK_ADVANTAGES, SAMPLES, most=PROMPTS, least=PROMPTS)
        advantages = [np.full(NEW_TOKENS, 1.0 if n % 2 else -1.0, np.float32) for n in range(len(scored.ids))]
        await self._bus.partition.update(scored.ids, {"advantages": advantages})
        await scored.ack()
        left = PROMPTS
        count = 0.0
        trained = 0.0
        while left:
            batch = await self._bus.groups(
                schema.TASK_ACTOR, SAMPLES, most=GROUPS_A_BATCH, least=GROUPS_A_BATCH
            )
            packed = pack(groups_of(batch))
            begun = time.process_time()
            count += self._trainer.forward_backward(packed, policy_gradient).count
            trained += time.process_time() - begun
            await batch.ack()
            left -= GROUPS_A_BATCH
        begun = time.process_time()
        self._trainer.optim_step(1.0 / count)
        self._steps += 1
        await self._engine.begin_update(self._steps, dict(self._trainer.tensors()))
        await self._engine.commit_update(self._steps)
        await self._bus.advance(self._steps)
        end = time.process_time()
        trained += end - begun
        generated = clock[1] - clock[0]
        whole = end - clock[0]
        return {"whole": whole, "generate": generated, "train": trained, "carry": whole - generated - trained}

    def _samples(
        self, at: int, requests: list[GenerationRequest], made: Mapping[str, Generation]
    ) -> list[Sample]:
        transcripts: list[Transcript] = []
        for request in requests:
            builder = TranscriptBuilder(Encoded(request.tokens))
            builder.append_generation(made[request.id])
            transcripts.append(builder.close())
        routes: list[Any] = [None] * SAMPLES
        if self._replay:
            routes = list(routes_of(transcripts, self.routing))
        ordinal = self._steps * PROMPTS + at
        return [
            Sample(
                prompt_key=str(ordinal),
                group=f"{ordinal:08d}",
                ordinal=ordinal,
                member=member,
                tokens=transcript.tokens,
                prompt_length=transcript.prompt_length,
                loss_mask=transcript.loss_mask,
                rollout_logprobs=transcript.logprobs,
                policy_versions=transcript.versions,
                reward=float(member % 2),
                reward_parts={},
                truncated=False,
                turns=1,
                routes=own,
            )
            for member, (transcript, own) in enumerate(zip(transcripts, routes, strict=True))
        ]
