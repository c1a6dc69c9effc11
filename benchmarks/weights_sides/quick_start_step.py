"""A step of the quick start in one process: generate, train, commit the new weights to the engine.

Model, batch and optimizer are those of configs/quickstart.yaml: 105k parameters, 8 prompts x 8 samples x 16
tokens, micro-batches of 32, AdamW. What a run spends beside on its services is not part of it.
"""

import asyncio

import numpy as np
from agentic import GenerationRequest, Sampling
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.tiny import character_tokenizer, write_tiny
from relax.backends.train.conformance import pack, policy_gradient
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative

PROMPTS, SAMPLES, NEW_TOKENS, MICRO_BATCH = 8, 8, 16, 32
PROMPT = "emit more 7s, as many as you can"


class QuickStartStep:
    """Engine and trainer.

    Args:
        folder: where the model is written.

    Attributes:
        trainer: whose state is what a run goes on from.
    """

    def __init__(self, folder: str) -> None:
        model = write_tiny(folder)
        self.trainer = TorchNative(model, settings=TrainerSettings(lr=3e-3))
        self._engine = TransformersEngine(model, version=0)
        self._runner = asyncio.Runner()
        tokenizer = character_tokenizer()
        self._prompts = [np.array(tokenizer.encode(f"{PROMPT} {at}").ids, np.int32) for at in range(PROMPTS)]
        self._sampling = Sampling(max_new_tokens=NEW_TOKENS)
        self._steps = 0

    def __call__(self) -> None:
        """Do one."""
        self._runner.run(self._step())

    def close(self) -> None:
        """End the engine."""
        self._runner.run(self._engine.close())
        self._runner.close()

    async def _step(self) -> None:
        self._steps += 1
        requests = [
            GenerationRequest(f"{at}-{sample}", prompt, self._sampling, seed=self._steps * SAMPLES + sample)
            for at, prompt in enumerate(self._prompts)
            for sample in range(SAMPLES)
        ]
        made = {done.id: done.generation async for done in self._engine.generate(requests)}
        rows = []
        for request in requests:
            generation = made[request.id]
            reward = np.float32(len(set(generation.tokens.tolist())) / NEW_TOKENS)
            rows.append(
                {
                    "tokens": np.concatenate([request.tokens, generation.tokens]),
                    "prompt_length": np.asarray(len(request.tokens)),
                    "loss_mask": np.ones(len(generation.tokens), np.uint8),
                    "rollout_logprobs": generation.logprobs,
                    "advantages": np.full(len(generation.tokens), reward - 0.5, np.float32),
                }
            )
        for start in range(0, len(rows), MICRO_BATCH):
            self.trainer.forward_backward(pack(rows[start : start + MICRO_BATCH]), policy_gradient)
        self.trainer.optim_step(1 / (len(rows) * NEW_TOKENS))
        await self._engine.begin_update(self._steps, dict(self.trainer.tensors()))
        await self._engine.commit_update(self._steps)
