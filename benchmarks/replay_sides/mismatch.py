"""How far a trainer's logprobs lie from the engine's in bfloat16, led by routes and free."""

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from agentic import GenerationRequest, Sampling
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.train.base import Packed
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from torch import Tensor

from .language import Text

REQUESTS, PROMPT_TOKENS, NEW_TOKENS, BATCH = 64, 32, 96, 16


@dataclass(frozen=True)
class Mismatch:
    """Over all sampled tokens.

    Attributes:
        free: mean |engine - trainer| logprob when the trainer routes freely.
        led: the same when it follows the engine's routes.
        differing: share of (token, layer) pairs that go to other experts when it routes freely.
        tokens: sampled.
    """

    free: float
    led: float
    differing: float
    tokens: int


def mismatch(folder: Path, text: Text) -> Mismatch:
    """Sample from a model and score the samples twice."""
    rows, told = asyncio.run(_sampled(folder, text))
    trainer = TorchNative(folder, settings=TrainerSettings(lr=0.0), dtype=torch.bfloat16)
    chosen: list[Tensor] = []
    for layer in trainer.model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1].clone()))
    led, free, other, places = [], [], 0, 0
    for at in range(0, REQUESTS, BATCH):
        batch = _batch(rows[at : at + BATCH])
        led.append(trainer.forward(batch).numpy())
        chosen.clear()
        free.append(trainer.forward(dataclasses.replace(batch, routes=None)).numpy())
        assert batch.routes is not None
        # Rows are equally long and their prompts differ: nothing is padded or folded.
        own = torch.stack(chosen, dim=1).sort(dim=-1).values
        routed = batch.routes[:, 0, 0] >= 0
        differs = (own[routed] != batch.routes[routed].long().sort(dim=-1).values).any(dim=-1)
        other += int(differs.sum())
        places += differs.numel()
    engine = np.concatenate(told)
    gaps = [float(np.abs(np.concatenate(found) - engine).mean()) for found in (free, led)]
    return Mismatch(gaps[0], gaps[1], other / places, len(engine))


async def _sampled(folder: Path, text: Text) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]:
    engine = TransformersEngine(folder, version=0, dtype="bfloat16", capture_routes=True)
    prompts = text.windows(REQUESTS, PROMPT_TOKENS, 77)
    requests = [
        GenerationRequest(str(n), prompt, Sampling(max_new_tokens=NEW_TOKENS), seed=n)
        for n, prompt in enumerate(prompts)
    ]
    try:
        made = {one.id: one.generation async for one in engine.generate(requests)}
    finally:
        await engine.close()
    rows = []
    for request in requests:
        generation = made[request.id]
        assert generation.routes is not None
        rows.append((np.concatenate([request.tokens, generation.tokens]), generation.routes))
    return rows, [made[request.id].logprobs for request in requests]


def _batch(rows: list[tuple[np.ndarray, np.ndarray]]) -> Packed:
    length = len(rows[0][0])
    routes = np.full((len(rows), length, *rows[0][1].shape[1:]), -1, np.int16)
    for row, (_, own) in enumerate(rows):
        routes[row, :-1] = own
    return Packed(
        tokens=torch.from_numpy(np.concatenate([tokens for tokens, _ in rows]).astype(np.int64)),
        offsets=torch.arange(len(rows) + 1) * length,
        prompt_lengths=torch.full((len(rows),), PROMPT_TOKENS),
        routes=torch.from_numpy(routes.reshape(-1, *routes.shape[2:])),
    )
