"""A tiny mixture of experts whose routers are worth asking, and what plain transformers says of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentic import GenerationRequest, Sampling
from relax.backends.models import build_model, named_weights
from relax.backends.routes import Routing, routing_of
from relax.backends.tiny import write_tiny
from safetensors.torch import save_file
from torch import Tensor

EXPERTS, TOP_K, LAYERS = 8, 2, 3


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE without weights, whose middle layer is dense."""
    return _write(tmp_path_factory.mktemp("mixture"))


def _write(folder: Path) -> Path:
    import json

    write_tiny(
        folder,
        "qwen3_moe",
        num_hidden_layers=LAYERS,
        max_position_embeddings=256,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config = json.loads((folder / "config.json").read_text())
    config["mlp_only_layers"] = [1]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def routing(folder: Path) -> Routing:
    import json

    found = routing_of(json.loads((folder / "config.json").read_text()))
    assert found is not None
    return found


def weights_of(folder: Path, version: int) -> dict[str, Tensor]:
    """Complete weights, unlike those of any other version, with distributions worth sampling."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: tensor * (6.0 if tensor.ndim > 1 else 1.0)
        + torch.randn(tensor.shape, generator=generator) * 0.03
        for name, tensor in named_weights(build_model(folder))
    }


@pytest.fixture(scope="session")
def weights(folder: Path) -> Callable[[int], dict[str, Tensor]]:
    return lambda version: weights_of(folder, version)


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with the weights of version 0 in it, for a trainer."""
    folder = _write(tmp_path_factory.mktemp("with-weights"))
    save_file({n: t.contiguous() for n, t in weights_of(folder, 0).items()}, folder / "model.safetensors")
    return folder


class Oracle:
    """Plain transformers: no cache, no batch."""

    def __init__(self, folder: Path) -> None:
        self.model = build_model(folder)
        self._gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        self.chosen: list[Tensor] = []
        for gate in self._gates:
            gate.register_forward_hook(lambda _, __, output: self.chosen.append(output[2]))

    @torch.inference_mode()
    def routes(self, weights: dict[str, Tensor], tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [tokens - 1, layers, top_k]: where every token but the last goes."""
        self.load(weights)
        self.chosen.clear()
        self.model(input_ids=torch.tensor(np.asarray(tokens)[None, :-1].astype(np.int64)), use_cache=False)
        return torch.stack(self.chosen, dim=1).numpy()

    def load(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in named_weights(self.model):
                tensor.copy_(weights[name])


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    """A request with a random prompt of printable tokens, drawn from its seed."""

    def make(name: str, seed: int = 0, length: int = 9, **sampling: Any) -> GenerationRequest:
        tokens = np.random.default_rng(seed).integers(7, 100, length).astype(np.int32)
        settings: dict[str, Any] = {"max_new_tokens": 12, **sampling}
        return GenerationRequest(name, tokens, Sampling(**settings), seed)

    return make
