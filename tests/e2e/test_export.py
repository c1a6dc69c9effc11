"""An exported run is a Hugging Face folder with the trainer's logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax.backends.models import build_model
from relax.engine.checkpoints import Checkpoints, read_checkpoint
from relax.entrypoints.cli import app

SMALL = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4", "steps=2")


def test_export_loads_with_the_same_logits(
    local: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = local("quickstart", *SMALL, "actor.lr=1e-2")
    out = tmp_path / "exported"
    app(args=["export", str(run.folder), str(out)], standalone_mode=False)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    newest = Checkpoints(run.folder, 1).newest()
    assert newest is not None
    assert newest.step == 2
    state, _ = read_checkpoint(newest.folder)
    trained = build_model(run.folder / "model", seed=0)
    initial = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(state.tensors[f"weight.{name}"])
        tokens = torch.tensor([tokenizer.encode("emit more 7s")])
        assert torch.equal(exported(tokens).logits, trained(tokens).logits)
    assert any(not torch.equal(initial[name], tensor) for name, tensor in trained.state_dict().items())
    with pytest.raises(SystemExit) as ended:
        app(args=["export", str(run.folder), str(out)], standalone_mode=False)
    assert ended.value.code == 2
    assert "already there" in capfd.readouterr().err
