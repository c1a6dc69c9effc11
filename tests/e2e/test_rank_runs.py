"""Whole runs whose trainer has several ranks, or an adapter."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax.backends.models import build_model
from relax.config import ConfigError
from relax.entrypoints.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SMALL = (
    "mode=colocate",
    "max_staleness=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=8",
    "actor.micro_batch_size=8",
    "ray.start_seconds=300",
)


def close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_two_ranks_reward_as_one_and_go_on_as_one(local: Callable[..., Any], tmp_path: Path) -> None:
    one = local("quickstart", *SMALL, "steps=4", name="one")
    two = local("quickstart", *SMALL, "steps=2", "actor.data_parallel=2", name="two")
    close(two.metrics, one.metrics[:2])
    assert (two.folder / "logs" / "actor-1.log").is_file()
    (checkpoint,) = (two.folder / "checkpoints").iterdir()
    assert {path.name for path in (checkpoint / "trainer").iterdir()} >= {"rank-00001.safetensors"}
    out = tmp_path / "exported"
    app(args=["export", str(two.folder), str(out)], standalone_mode=False)
    again = local("quickstart", "steps=4", "actor.data_parallel=1", name="two", resume=True)
    close(again.metrics, one.metrics)
    assert build_model(out).config.model_type == "qwen3"


def test_a_checkpoint_of_ranks_that_was_cut_short_is_named(local: Callable[..., Any]) -> None:
    run = local("quickstart", *SMALL, "steps=1", "actor.data_parallel=2", "actor.fsdp=false")
    (part,) = run.folder.glob("checkpoints/*/trainer/rank-00001.safetensors")
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"rank-00001.safetensors: it has .* bytes, the manifest says"):
        local("quickstart", "steps=2", resume=True)


def test_under_ray_ranks_are_workers_and_a_dead_one_ends_the_run_by_name(command: Callable[..., Any]) -> None:
    words = ("train", "configs/quickstart.yaml", *SMALL, "actor.data_parallel=2", "ray.num_cpus=2")
    started = command(*words, "steps=3", "run.name=whole")
    run = started.finish(timeout=500)
    assert run.code == 0, run.output
    assert len(run.metrics) == 3
    assert (run.folder / "logs" / "actor-1.log").is_file()
    assert list(run.folder.glob("checkpoints/step-000003/trainer/rank-00001.safetensors"))

    started = command(*words, "steps=4000", "run.name=broken", root=run.folder.parent / "broken")
    started.wait_for(lambda: started.steps_done() >= 1, timeout=400)
    (rank,) = [p for p in started.descendants() if "relax.backends.train.gang.rank" in " ".join(p.cmdline())]
    rank.kill()
    run = started.finish(timeout=120)
    assert run.code == 1
    assert "rank 1" in run.output
    assert "killed by signal 9" in run.output or "is gone" in run.output


def test_ctrl_c_ends_a_gang_with_a_checkpoint(command: Callable[..., Any]) -> None:
    words = ("train", "configs/quickstart.yaml", *SMALL, "actor.data_parallel=2", "launcher=local")
    started = command(*words, "steps=4000")
    started.wait_for(lambda: started.steps_done() >= 2, timeout=400)
    os.killpg(started.process.pid, signal.SIGINT)
    run = started.finish(timeout=120)
    assert run.code == 0, run.output
    assert list(run.folder.glob(f"checkpoints/step-{len(run.metrics):06d}/trainer/rank-00001.safetensors"))


def test_an_adapter_learns_and_only_its_matrices_travel(local: Callable[..., Any], tmp_path: Path) -> None:
    lora = ("actor.lora.rank=4", "actor.lora.alpha=16", "actor.lr=1e-2")
    adapter = local("quickstart", *SMALL, "steps=3", *lora, name="adapter")
    merged = local("quickstart", *SMALL, "steps=3", *lora, "actor.lora.sync=merged", name="merged")
    close(adapter.metrics, merged.metrics)
    sizes = [
        {json.loads(line)["nbytes"] for line in (run.folder / "weights.jsonl").read_text().splitlines()}
        for run in (adapter, merged)
    ]
    assert max(sizes[0]) < 0.5 * min(sizes[1])
    app(args=["export", str(adapter.folder), str(tmp_path / "out")], standalone_mode=False)
    begun, ended = build_model(adapter.folder / "model", seed=0), build_model(tmp_path / "out")
    changed = {
        name
        for (name, before), after in zip(begun.state_dict().items(), ended.state_dict().values(), strict=True)
        if not torch.equal(before, after)
    }
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)


def test_megatron_on_two_tensor_ranks_names_pictures_as_torch_native(
    command: Callable[..., Any],
    local: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    shim = ROOT / "packages" / "relax-core" / "tests" / "train" / "megatron" / "shim"
    monkeypatch.setenv("PYTHONPATH", str(shim))
    small = (*SMALL, "rollout.max_new_tokens=2", "actor.supervised.steps=6", "steps=3")
    words = ("train", "configs/digits.yaml", *small, "launcher=local", "log.progress=plain")
    started = command(*words, "actor.backend=megatron", "actor.tensor_parallel=2")
    run = started.finish(timeout=500)
    assert run.code == 0, run.output
    native = local("digits", *small, name="native")
    close(run.metrics, native.metrics)
    out = tmp_path / "exported"
    app(args=["export", str(run.folder), str(out)], standalone_mode=False)
    begun, ended = (build_model(folder) for folder in (run.folder / "model", out))
    moved = {
        name
        for (name, before), after in zip(begun.state_dict().items(), ended.state_dict().values(), strict=True)
        if not torch.equal(before, after)
    }
    assert any(".visual." in name for name in moved)


def test_a_frozen_tower_is_exported_as_it_was(local: Callable[..., Any], tmp_path: Path) -> None:
    small = (*SMALL, "rollout.max_new_tokens=2", "actor.supervised.steps=2", "steps=2")
    run = local("digits", *small, "actor.data_parallel=2", "actor.freeze=[vision]")
    out = tmp_path / "exported"
    app(args=["export", str(run.folder), str(out)], standalone_mode=False)
    begun, ended = (build_model(folder).state_dict() for folder in (run.folder / "model", out))
    for name, before in begun.items():
        if ".visual." in name and "merger" not in name:
            assert torch.equal(before, ended[name]), name
    assert any(".visual." in name and not torch.equal(begun[name], ended[name]) for name in begun)
