"""The quick start with SGLang servers that the run starts: it learns, and engine and trainer agree."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
STEPS = 30
AGREEMENT = 1e-4


SHIM = ROOT / "packages" / "relax-core" / "tests" / "train" / "megatron" / "shim"
MEGATRON = ["actor.backend=megatron", "actor.tensor_parallel=2"]


@pytest.mark.parametrize("trainer", [[], MEGATRON], ids=["torch_native", "megatron-tp2"])
def test_the_quick_start_learns_and_leaves_no_server_behind(
    trainer: list[str], sglang_settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    settings = sglang_settings()
    words = [
        "rollout.engine=sglang",
        "rollout.replicas=1",
        f"rollout.sglang={json.dumps(settings)}",
        "max_staleness=0",  # then the trainer's logprobs are of the weights that sampled
        "launcher=local",
        "log.progress=plain",
        f"steps={STEPS}",
        f"run.root={tmp_path}",
        "run.name=run",
        *trainer,
    ]
    # Ranks of Megatron find the shim there; the servers' python is another one, which it is kept from.
    around = os.environ | ({"PYTHONPATH": str(SHIM)} if trainer else {})
    train = [str(Path(sys.executable).with_name("relax")), "train", "configs/quickstart.yaml", *words]
    done = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, timeout=1400, env=around)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in metrics]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
    if trainer:
        assert (tmp_path / "run" / "logs" / "actor-1.log").is_file()
    assert max(step["loss/ratio_gap_max"] for step in metrics) < AGREEMENT
    (accounts,) = [
        json.loads(line) for line in (tmp_path / "run" / "accounting.jsonl").read_text().splitlines()
    ]
    assert not accounts.get("faults")
    assert "Prefill batch" in (tmp_path / "run" / "logs" / "engine-0.sglang.log").read_text()
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
