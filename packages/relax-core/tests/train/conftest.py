"""Tiny model folders with weights, written once."""

from pathlib import Path

import pytest
import torch
from relax.backends.models import build_model
from relax.backends.tiny import Kind, write_tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def _write(folder: Path, kind: Kind) -> Path:
    write_tiny(folder, kind, max_position_embeddings=128)
    # Larger than the usual initialisation, so that logits are far apart and errors show.
    model = build_model(folder, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    return _write(tmp_path_factory.mktemp("train") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory) -> Path:
    return _write(tmp_path_factory.mktemp("train") / "qwen3_vl", "qwen3_vl")
