"""Routes of a tiny mixture of experts from a real server: the trainer's, and those of the first sampling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.models import build_model, named_weights
from relax.backends.routes import check, routing_of
from relax.backends.tiny import write_tiny
from relax.config.roles import RolloutSettings

pytestmark = pytest.mark.timeout(900)  # the server starts within the test

PROMPTS = 6
torch.set_num_threads(1)


def checkpoint(seed: int, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with logits worth sampling from, and its weights as a trainer publishes them."""
    write_tiny(folder, "qwen3_moe", max_position_embeddings=256)
    model = build_model(folder, weights=False, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    return model, dict(named_weights(model))


def routes_of(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the plain model routes and says: sorted experts [n, layers, top_k], logprobs [n, vocabulary]."""
    with torch.inference_mode():
        found = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True)
    top_k = model.config.num_experts_per_tok
    experts = torch.stack([layer.topk(top_k, dim=-1).indices for layer in found.router_logits], dim=1)
    return experts.sort(-1).values.numpy(), torch.log_softmax(found.logits[0], -1).numpy()


async def test_routes_and_logprobs_are_the_trainers_and_routes_outlive_an_update(
    sglang_settings: Callable[..., dict[str, Any]], moe_on_cpus: Path, tmp_path: Path
) -> None:
    models, weights = zip(*(checkpoint(seed, tmp_path / f"model-{seed}") for seed in range(3)), strict=True)
    folder = tmp_path / "model-0"
    routing = routing_of(models[0].config.to_dict())
    assert routing is not None
    extra = {"chunked_prefill_size": 2048}
    settings = RolloutSettings(
        engine="sglang",
        sglang=sglang_settings(env={"PYTHONPATH": str(moe_on_cpus)}, extra=extra),  # pyright: ignore[reportArgumentType]
    )
    spec = EngineSpec("engine-0", folder, run_folder=tmp_path, settings=settings, routes=True, max_running=16)
    requests = [
        GenerationRequest(
            f"r{n}",
            np.random.default_rng(n).integers(7, 100, 4 + 5 * n).astype(np.int32),
            Sampling(max_new_tokens=30 if n == 0 else 180),
            seed=n,
        )
        for n in range(PROMPTS)
    ]
    engine = await SglangEngine.create(spec)
    try:
        assert engine.weights().keys() == weights[0].keys()
        await engine.begin_update(0, weights[0])
        await engine.commit_update(0)
        answers = {}
        async for one in engine.generate(requests):
            answers[one.id] = one.generation
            if one.id == "r0":
                await engine.begin_update(1, weights[1])
                assert (await engine.commit_update(1)).retracted == PROMPTS - 1
    finally:
        await engine.close()
    for request in requests:
        answer = answers[request.id]
        tokens = np.concatenate([request.tokens, answer.tokens])
        check(answer.routes, routing, len(tokens))
        assert answer.routes.dtype == np.uint8
        versions = [span[0] for span in answer.spans]
        assert versions == ([0] if request.id == "r0" else [0, 1])
        for version, start, end in answer.spans:
            experts, logprobs = routes_of(models[version], tokens)
            first = 0 if version == 0 else len(request.tokens) + start - 1
            last = len(request.tokens) + end - 1
            # Recomputed by the trainer with that version: the same experts, token by token.
            assert (np.sort(answer.routes[first:last], -1) == experts[first:last]).all()
            said = logprobs[np.arange(len(request.tokens) - 1, len(tokens) - 1), answer.tokens]
            assert np.abs(said - answer.logprobs)[start:end].max() <= 1e-4
