import os
from pathlib import Path

import pytest
from relax.config import ConfigError, RunConfig
from relax.orchestration.export import export_run
from relax.orchestration.run_folder import create, hold, reopen


def config(root: Path, name: str | None = "mine") -> RunConfig:
    return RunConfig.model_validate({"run": {"root": str(root), "name": name}, "data": "x.jsonl"})


def test_a_run_is_held_once(tmp_path: Path) -> None:
    folder = create(config(tmp_path), "x")
    refused = pytest.raises(ConfigError, match=f"still being trained by process {os.getpid()}")
    with hold(folder), refused, hold(folder):
        pass
    with hold(folder):
        pass


def test_a_taken_name_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    create(config(tmp_path), "x")
    with pytest.raises(ConfigError, match=r"resume it with --resume .*, or choose another name"):
        create(config(tmp_path), "x")


def test_a_reopened_run_has_its_own_configuration_and_the_words_given(tmp_path: Path) -> None:
    folder = create(config(tmp_path), "x")
    _, reopened = reopen(folder.path, ["steps=99"])
    assert reopened.steps == 99
    assert reopened.data.path == "x.jsonl"
    with pytest.raises(ConfigError, match=r"^--resume .*none: no run lies there"):
        reopen(tmp_path / "none", [])
    with pytest.raises(ConfigError, match=r"^relax export .*none: no run lies there"):
        export_run(tmp_path / "none", tmp_path / "out", None)
