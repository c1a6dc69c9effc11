"""Engines under test, each behind the same factory: one added later runs the same conformance checks."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from agentic import Generation, GenerationRequest, Sampling
from relax.backends.inference.base import InferenceEngine
from relax.backends.inference.registry import engine_class
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import write_tiny
from torch import Tensor

CONTEXT = 256
SHOWN = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "video_second_per_grid",
    "input_features",
    "feature_attention_mask",
)
"""What transformers' processors make of images, video and sound."""


class Oracle:
    """Logprobs by one full forward of the plain Hugging Face model: no cache, no batch, one version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = build_model(folder)
        names = ("image_token_id", "video_token_id", "audio_token_id")
        config = self.model.config
        self.placeholders = [getattr(config, name) for name in names if hasattr(config, name)]
        self._own = dict(named_weights(self.model))
        self._base = {name: tensor.clone() for name, tensor in self._own.items()}

    def weights(self, version: int) -> dict[str, Tensor]:
        """Complete weights, unlike those of any other version, with a distribution worth sampling."""
        generator = torch.Generator().manual_seed(version)
        found: dict[str, Tensor] = {}
        for name, tensor in self._base.items():
            scale = 6.0 if tensor.ndim > 1 else 1.0
            found[name] = tensor * scale + torch.randn(tensor.shape, generator=generator) * 0.03
        return found

    def logprobs(
        self,
        weights: Mapping[str, Tensor],
        prompt: np.ndarray,
        response: np.ndarray,
        temperature: float,
        media: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        """float32 [response]: the logprob of each response token at a temperature (0 counts as 1)."""
        found = self.distributions(weights, prompt, response, temperature, media)
        return found[np.arange(len(response)), response]

    def distributions(
        self,
        weights: Mapping[str, Tensor],
        prompt: np.ndarray,
        response: np.ndarray,
        temperature: float,
        media: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        """float32 [response, vocabulary]: logprobs of every token in place of each response token.

        Placeholders of media, which no policy may say, have -inf.
        """
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        extra = self._shown(tokens, media, len(prompt)) if media else {}
        with torch.inference_mode():
            for name, tensor in weights.items():
                self._own[name].copy_(tensor)
            logits = self.model(input_ids=tokens, use_cache=False, **extra).logits[0]
            logits[:, self.placeholders] = -torch.inf
            return torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), dim=-1).numpy()

    def _shown(self, tokens: Tensor, media: Sequence[Mapping[str, Any]], prompt: int) -> dict[str, Any]:
        """What the model's own forward takes for the items of one row."""
        found: dict[str, Any] = {}
        for name in SHOWN:
            parts = [np.asarray(item[name]) for item in media if name in item]
            if parts and parts[0].ndim == 3:  # sounds are padded to the longest
                widest = max(part.shape[2] for part in parts)
                parts = [np.pad(part, ((0, 0), (0, 0), (0, widest - part.shape[2]))) for part in parts]
            elif parts and name == "feature_attention_mask":
                widest = max(part.shape[1] for part in parts)
                parts = [np.pad(part, ((0, 0), (0, widest - part.shape[1]))) for part in parts]
            if parts:
                found[name] = torch.from_numpy(np.concatenate(parts))
        config = self.model.config
        if hasattr(config, "audio_token_id"):
            talks = any({"input_features", "pixel_values_videos"} <= item.keys() for item in media)
            text = tokens.clone()
            text[:, prompt:] = 10  # transformers takes a sampled `<|audio_start|>` for one more sound
            model: Any = self.model
            positions, _ = model.get_rope_index(
                text,
                found.get("image_grid_thw"),
                found.get("video_grid_thw"),
                torch.ones_like(tokens),
                talks,
                found["feature_attention_mask"].sum(-1) if "feature_attention_mask" in found else None,
                found.get("video_second_per_grid"),
            )
            return found | {"position_ids": positions, "use_audio_in_video": talks}
        kinds = (tokens == config.image_token_id).long() + 2 * (tokens == config.video_token_id).long()
        return found | {"mm_token_type_ids": kinds}

    def worst(self, request: GenerationRequest, generation: Generation) -> float:
        """The largest |logprob difference| over the tokens, each against the version that sampled it."""
        gap = 0.0
        for version, start, end in generation.spans:
            expected = self.logprobs(
                self.weights(version),
                request.tokens,
                generation.tokens,
                request.sampling.temperature,
                request.media,
            )
            gap = max(gap, float(np.abs(expected - generation.logprobs)[start:end].max()))
        return gap


class EngineFactory(Protocol):
    """What the conformance checks need of an engine: a way to start it serving `oracle.weights(version)`."""

    oracle: Oracle

    def __call__(self, *, version: int | None = 0, **options: Any) -> AbstractAsyncContextManager[Any]: ...


class TransformersFactory:
    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    @asynccontextmanager
    async def __call__(self, *, version: int | None = 0, **options: Any) -> AsyncIterator[InferenceEngine]:
        engine: Any = engine_class("transformers")(self.oracle.folder, **options)
        try:
            if version is not None:
                await engine.begin_update(version, self.oracle.weights(version))
                await engine.commit_update(version)
            yield engine
        finally:
            await engine.close()


FACTORIES: dict[str, Callable[[Oracle], EngineFactory]] = {"transformers": TransformersFactory}


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(write_tiny(tmp_path_factory.mktemp("text"), max_position_embeddings=CONTEXT))


@pytest.fixture(scope="session")
def vision_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(write_tiny(tmp_path_factory.mktemp("vision"), "qwen3_vl", max_position_embeddings=CONTEXT))


@pytest.fixture(scope="session")
def omni_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(write_tiny(tmp_path_factory.mktemp("omni"), "qwen3_omni", max_position_embeddings=512))


@pytest.fixture(params=sorted(FACTORIES))
def start_engine(request: pytest.FixtureRequest, text_oracle: Oracle) -> EngineFactory:
    """Every engine, over a tiny text model whose context is 256 tokens."""
    return FACTORIES[request.param](text_oracle)


@pytest.fixture
def start_transformers(text_oracle: Oracle) -> EngineFactory:
    return TransformersFactory(text_oracle)


@pytest.fixture
def start_vision(vision_oracle: Oracle) -> EngineFactory:
    return TransformersFactory(vision_oracle)


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    """A request with a random prompt of printable tokens, drawn from its seed."""

    def make(name: str, seed: int = 0, length: int = 12, **sampling: Any) -> GenerationRequest:
        tokens = np.random.default_rng(seed).integers(7, 100, length).astype(np.int32)
        settings = {"temperature": 0.8, "max_new_tokens": 16} | sampling
        return GenerationRequest(name, tokens, Sampling(**settings), seed)

    return make


@pytest.fixture
def collect() -> Callable[..., Any]:
    """Read a stream to its end: generations by request id."""

    async def read(engine: InferenceEngine, requests: Iterable[GenerationRequest]) -> dict[str, Generation]:
        return {one.id: one.generation async for one in engine.generate(list(requests))}

    return read
