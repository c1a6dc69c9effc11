"""Engines under test, each behind the same factory: one added later runs the same conformance checks."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from agentic import Generation, GenerationRequest, Sampling
from PIL import Image
from relax.backends.inference.base import InferenceEngine
from relax.backends.inference.registry import engine_class
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import write_tiny
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Qwen3OmniMoeProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata

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


SEEING = [(), ("image",), ("video",), ("video", "image", "video"), ("image", "video"), ("video", "video")]
HEARING = [
    (),
    ("audio",),
    ("image", "short", "audio"),
    ("video",),
    ("talking",),
    ("video", "audio"),
    ("talking", "image"),
    ("short",),
]
"""What one row is shown; a `short` sound has less than a second, `talking` is a video with its sound."""

MARKS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "talking": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    "short": "<|audio_start|><|audio_pad|><|audio_end|>",
}
"""What a processor expands for each part."""

TEMPERATURE = 0.8


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


class Cinema:
    """Clips, pictures and sounds by seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def image(self) -> Image.Image:
        return Image.fromarray(self._random.integers(0, 256, (64, 32, 3), dtype=np.uint8))

    def clip(self) -> np.ndarray:
        frames = int(self._random.integers(4, 7))
        return self._random.integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)

    def wave(self, seconds: float) -> np.ndarray:
        time = np.arange(int(16000 * seconds)) / 16000
        tones = self._random.uniform(100, 3000, 3)
        return np.sin(2 * np.pi * tones[:, None] * time).sum(0).astype(np.float32)


def arrays_of(made: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(made[name]) for name in made if name.startswith(("pixel", "image", "video_g"))}


def items_of(arrays: dict[str, np.ndarray], parts: tuple[str, ...]) -> list[dict[str, Any]]:
    """What a processor made of all of a row, cut into one item for each part."""
    grids = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
    taken = dict.fromkeys(("pixel_values", "pixel_values_videos", "sound"), 0)
    counts = {"image": 0, "video": 0}
    items: list[dict[str, Any]] = []
    for part in parts:
        kind = {"talking": "video", "short": "audio"}.get(part, part)
        item: dict[str, Any] = {"kind": kind}
        if kind != "audio":
            pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
            grid = arrays[grids[pixels]][counts[kind]]
            size = int(grid.prod())
            item |= {
                pixels: arrays[pixels][taken[pixels] : taken[pixels] + size].astype(np.float32),
                grids[pixels]: grid[None].astype(np.int64),
            }
            if kind == "video" and "video_second_per_grid" in arrays:
                seconds = arrays["video_second_per_grid"].reshape(-1)[counts[kind]]
                item["video_second_per_grid"] = np.array([seconds], np.float32)
            taken[pixels] += size
            counts[kind] += 1
        if part in ("audio", "short", "talking"):
            row = slice(taken["sound"], taken["sound"] + 1)
            frames = int(arrays["feature_attention_mask"][row].sum())
            item |= {
                name: arrays[name][row, ..., :frames] for name in ("input_features", "feature_attention_mask")
            }
            taken["sound"] += 1
        items.append(item)
    return items


class Watched:
    """Conversations with images and clips for a tiny Qwen3-VL, by transformers' own processor."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        video = Qwen3VLVideoProcessor(size={"shortest_edge": 1024, "longest_edge": 16384})
        images = AutoImageProcessor.from_pretrained(folder)
        self._processor: Any = Qwen3VLProcessor(
            images, tokenizer, video, chat_template=tokenizer.chat_template
        )

    def __call__(
        self, name: str, parts: tuple[str, ...], seed: int = 0, **sampling: Any
    ) -> GenerationRequest:
        cinema, shown = Cinema(seed), {"images": [], "videos": []}
        text = f"<|im_start|>user\n{seed}"
        for part in parts:
            shown[f"{part}s"].append(getattr(cinema, "clip" if part == "video" else "image")())
            text += f"<|vision_start|><|{part}_pad|><|vision_end|> and {seed % 7}"
        metadata = [
            VideoMetadata(total_num_frames=len(clip), fps=2.0, frames_indices=list(range(len(clip))))
            for clip in shown["videos"]
        ]
        made = self._processor(
            text=[text + "<|im_end|>\n"],
            **{kind: what for kind, what in shown.items() if what},
            **({"video_metadata": metadata, "do_sample_frames": False} if metadata else {}),
        )
        tokens = np.asarray(made["input_ids"][0], np.int32)
        how = Sampling(**({"temperature": TEMPERATURE, "max_new_tokens": 12} | sampling))
        return GenerationRequest(name, tokens, how, seed, items_of(arrays_of(made), parts))


class Attended:
    """The same with sound for a tiny thinker."""

    def __init__(self, folder: Path) -> None:
        self._processor: Any = Qwen3OmniMoeProcessor.from_pretrained(folder)

    def __call__(
        self, name: str, parts: tuple[str, ...], seed: int = 0, fps: float = 4.0, **sampling: Any
    ) -> GenerationRequest:
        cinema, shown = Cinema(seed), {"images": [], "videos": [], "audio": []}
        text = f"<|im_start|>user\n{seed}"
        for part in parts:
            text += MARKS[part] + f" and {seed % 7}"
            if part == "image":
                shown["images"].append(cinema.image())
            if part in ("video", "talking"):
                shown["videos"].append(cinema.clip())
            if part in ("audio", "short", "talking"):
                shown["audio"].append(cinema.wave(0.4 if part == "short" else 1.3))
        made = self._processor(
            text=[text + "<|im_end|>\n"],
            **{kind: what for kind, what in shown.items() if what},
            use_audio_in_video="talking" in parts,
            return_tensors="pt",
            do_sample_frames=False,
            fps=fps,
            size={"shortest_edge": 1024, "longest_edge": 4096},
        )
        arrays = {key: np.asarray(value) for key, value in made.items()}
        how = Sampling(**({"temperature": TEMPERATURE, "max_new_tokens": 12} | sampling))
        return GenerationRequest(
            name, arrays["input_ids"][0].astype(np.int32), how, seed, items_of(arrays, parts)
        )


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


@pytest.fixture(scope="session")
def watch(vision_oracle: Oracle) -> Watched:
    return Watched(vision_oracle.folder)


@pytest.fixture(scope="session")
def attend(omni_oracle: Oracle) -> Attended:
    return Attended(omni_oracle.folder)


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen3_omni"])
def world(request: pytest.FixtureRequest) -> tuple[Oracle, Any, list[tuple[str, ...]]]:
    """A model, how it is asked, and what it is shown."""
    if request.param == "qwen3_vl":
        return request.getfixturevalue("vision_oracle"), request.getfixturevalue("watch"), SEEING
    return request.getfixturevalue("omni_oracle"), request.getfixturevalue("attend"), HEARING


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
