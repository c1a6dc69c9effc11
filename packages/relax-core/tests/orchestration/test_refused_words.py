"""Words of a command line that cannot be meant, each refused by name before anything is started."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from relax.orchestration.launcher import RoleFailed
from relax.orchestration.local import LocalLauncher
from relax.orchestration.plan import plan
from typer.testing import CliRunner

REFUSED = {
    "actor.lr=inf": "actor.lr = 'inf': Input should be a finite number",
    "steps=true": "steps = True: Value error, true and false are no value of it",
    "actor=3": "actor = 3: it has keys of its own: data_parallel, tensor_parallel,",
    "seed=999999999999999999999999": "seed = 999999999999999999999999: Input should be less than",
    "actor.backend=megatorn": "did you mean 'megatron'?",
    "rollout.engine=json:loads": "engine 'json:loads' leads to <function loads",
    "rollout.engine=no_such_module:Engine": "module 'no_such_module' cannot be imported",
    "algorithm=json:loads": "algorithm.name = 'json:loads': loads() missing",
    "model.tiny={hiden_size: 8}": "model.tiny.hiden_size = 8: there is no such size, did you mean",
    "model.tiny={hidden_size: -4}": "model.tiny.hidden_size = -4: Input should be greater than 0",
    "rollout.max_new_tokens=4000": "leaves no room for a prompt in the model's context of 2048 tokens",
    "model.context_length=4000": "model.context_length = 4000 is more than the 2048 tokens of the model",
    "actor.lora.rank=2 actor.lora.targets=[qkv]": "actor.lora.targets names ['qkv'], and the model has no",
    "actor.freeze=[vision]": "actor.freeze names 'vision', and the model (qwen3) has language only",
    "rollout.engine=sglang rollout.sglang.tensor_parallel=3": "does not divide the model's num_at",
    "actor.backend=megatron actor.pipeline_parallel=3 ray.num_cpus=9": "does not divide the model's num_h",
    "run.root=/proc/nowhere": "run.root = '/proc/nowhere': no folder can be made in /proc",
    "run.root=/dev/null/runs": "run.root = '/dev/null/runs': no folder can be made in /dev/null",
    "ray.nodes=2": "ray.nodes = 2 is for a Ray with a ray.address that launcher = ray visits",
    "ray.address=127.0.0.1:1": "ray.address = '127.0.0.1:1': no Ray is reached there",
}


@pytest.fixture(scope="module")
def doctor(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, str]]:
    """`relax doctor` of a run that works, with these words: its exit code, and what it says."""
    from relax.entrypoints.cli import app

    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    data.write_text('{"prompt": "say 7"}\n')
    given = [f"data={data}", "reward=char_share", "reward.kwargs={character: '7', length: 4}"]

    def run(words: str) -> tuple[int, str]:
        separate = re.split(r" (?=[\w.]+=)", words)
        done = CliRunner().invoke(app, ["doctor", *given, *(word for word in separate if word)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, re.sub(r"\s+", " ", done.output)

    return run


def test_without_such_words_the_run_is_ready(doctor: Callable[[str], tuple[int, str]]) -> None:
    code, said = doctor("")
    assert code == 0, said


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_cannot_be_meant_are_refused_by_name(
    words: str, doctor: Callable[[str], tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "megatron" in words:  # as if there were GPUs, without which it is refused before
        monkeypatch.setattr("relax.orchestration.train.check_gpus", lambda *given: None)
    code, said = doctor(words)
    assert code == 2, said
    assert REFUSED[words] in said


async def test_a_role_that_cannot_be_built_ends_a_local_run_by_its_name(config, tmp_path: Path) -> None:
    """With its traceback, as the end of a role under Ray, and not as the end of the command."""
    from relax.components.context import RunContext
    from relax.distributed.bus import Endpoint

    nowhere = Endpoint("")
    launcher = LocalLauncher(
        plan(config()), RunContext(config(), tmp_path, tmp_path / "none", nowhere, nowhere)
    )
    with pytest.raises(RoleFailed, match=r"(?s)^engine-0 failed:\nTraceback.*has no config.json"):
        await launcher.start()
    await launcher.close()
