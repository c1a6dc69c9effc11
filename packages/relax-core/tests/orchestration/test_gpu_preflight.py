"""Runs that need GPUs are refused in words where there are none, before anything is started."""

from pathlib import Path
from typing import Any

import pytest
from relax.config import ConfigError
from relax.orchestration import gpus
from relax.orchestration.gpus import check_gpus, look
from relax.orchestration.plan import plan
from typer.testing import CliRunner

SHIM = Path(__file__).parents[1] / "train" / "megatron" / "shim"
CUDA = "actor.device=cuda"


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`there(2)`: this machine has two GPUs."""

    def say(count: int, device: bool | None = None) -> None:
        found = (count, count > 0 if device is None else device)
        monkeypatch.setattr(gpus, "look", lambda *, megatron=False: found)

    return say


@pytest.mark.parametrize(
    ("words", "count", "message"),
    [
        ([CUDA], 0, r"roles take 1 \(actor.device = cuda\), and torch sees none"),
        (["rollout.device=cuda"], 0, r"roles take 1 \(rollout.device = cuda\)"),
        ([CUDA, "rollout.device=cuda", "launcher=ray"], 2, "roles take 3 .* and torch sees 2"),
        ([CUDA, "actor.data_parallel=4"], 3, "roles take 4 "),
        ([CUDA, "rollout.engine=sglang", "rollout.sglang.tensor_parallel=2"], 4, "roles take 5 "),
        (["rollout.engine=sglang", "rollout.sglang.device=cuda"], 0, r"\(rollout.sglang.device = cuda\)"),
        (["actor.backend=megatron"], 0, "megatron-core computes on GPUs only, and torch sees none"),
    ],
)
def test_too_few_gpus_are_said_by_the_setting_that_asks_for_them(config, there, words, count, message):
    asked = config(*words)
    there(count)
    with pytest.raises(ConfigError, match=message):
        check_gpus(plan(asked), asked)
    there(8)
    check_gpus(plan(asked), asked)


@pytest.mark.parametrize(
    "words",
    [
        [],
        [
            "rollout.engine=sglang",
            "rollout.sglang.urls=[http://a:1,http://b:1]",
            "rollout.sglang.device=cuda",
        ],
        [CUDA, "launcher=ray", "ray.address=auto"],
    ],
)
def test_who_needs_none_of_this_machine_is_not_asked(config, monkeypatch, words):
    monkeypatch.setattr(gpus, "look", lambda **_: pytest.fail("torch was asked"))
    asked = config(*words)
    check_gpus(plan(asked), asked)


@pytest.mark.slow
def test_torch_says_what_there_is():
    import torch

    assert look() == (torch.cuda.device_count(), torch.cuda.is_available())


def test_what_stands_in_for_cuda_counts_for_megatron(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SHIM))
    assert look(megatron=True)[1]


def test_doctor_refuses_a_run_on_a_gpu_that_there_is_not(there, tmp_path):
    from relax.entrypoints.cli import app

    there(0)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["doctor", f"data={data}", "data.answer_column=answer", CUDA, "ray.num_cpus=8"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2
    assert "too few GPUs: the roles take 1 (actor.device = cuda)" in found.output + found.stderr
