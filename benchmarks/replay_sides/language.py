"""A tiny mixture of experts that has learnt something: characters of this project's own documentation.

The routers of a random network are level and meaningless; those of a trained one have made up their minds,
some tokens excepted. What routing replay costs and mends is a question about the latter.
"""

from pathlib import Path

import numpy as np
import torch
from relax.backends.tiny import character_tokenizer, write_tiny
from relax.backends.train.base import Packed
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, LR = 16, 64, 3e-3
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
}


class Text:
    """The documentation as one sequence of tokens, and windows of it by seed."""

    def __init__(self) -> None:
        files = sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "packages").glob("*/README.md"))
        words = "\n".join(file.read_text(encoding="utf-8") for file in files)
        self._tokens = np.array(character_tokenizer().encode(words).ids, np.int32)

    def windows(self, count: int, length: int, seed: int) -> list[np.ndarray]:
        starts = np.random.default_rng(seed).integers(0, len(self._tokens) - length, count)
        return [self._tokens[start : start + length] for start in starts]


def trained(folder: Path, steps: int, text: Text) -> tuple[Path, list[float]]:
    """Write a model folder with weights that `steps` supervised steps made; also the loss of each step."""
    made = write_tiny(folder / "random", "qwen3_moe", **SHAPE)
    trainer = TorchNative(made, settings=TrainerSettings(lr=LR))
    losses = [
        trainer.supervised_step(_batch(text.windows(ROWS, LENGTH, seed)), LR * min(1.0, (seed + 1) / 20))
        for seed in range(steps)
    ]
    trainer.export(folder / "trained")
    return folder / "trained", losses


def _batch(windows: list[np.ndarray]) -> Packed:
    rows, length = len(windows), len(windows[0])
    return Packed(
        tokens=torch.from_numpy(np.concatenate(windows).astype(np.int64)),
        offsets=torch.arange(rows + 1) * length,
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        fields={"loss_mask": torch.ones(rows * (length - 1), dtype=torch.uint8)},
    )
