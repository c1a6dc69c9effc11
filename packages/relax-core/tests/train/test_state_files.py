"""States on disk: whole or not at all, and checked when read."""

import os
import resource
import shutil

import pytest
import torch
from relax.backends.train.base import StateTree
from relax.backends.train.errors import StateCorruptError, StateFileError, StateMissingError
from relax.backends.train.state_files import read_state, write_state
from relax.backends.train.torch_native.shard_files import Box, Parts, write_part


@pytest.fixture
def state() -> StateTree:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "weight.a": torch.randn(3, 5, generator=generator),
        "weight.b": torch.randn(4, generator=generator, dtype=torch.float64),
        "weight.c": torch.tensor([float("nan"), float("-inf"), -0.0]).bfloat16(),
        "step": torch.tensor(7.0),
        "rng": torch.arange(256, dtype=torch.uint8),
    }
    return StateTree(tensors, {"backend": "x", "steps": 3, "nested": {"list": [1, 0.1, None, "é", True]}})


def test_a_state_comes_back_bit_for_bit(state, tmp_path):
    write_state(tmp_path / "deep" / "state", state)
    found = read_state(tmp_path / "deep" / "state")
    assert found.data == state.data
    assert found.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert bytes(found.tensors[name].flatten().view(torch.uint8)) == bytes(
            tensor.flatten().view(torch.uint8)
        )
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["state"]


def test_a_missing_state_is_a_missing_file(tmp_path):
    with pytest.raises(StateMissingError, match="no state folder"):
        read_state(tmp_path / "state")
    assert issubclass(StateMissingError, FileNotFoundError)


@pytest.mark.parametrize("name", ["tensors.safetensors", "data.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["remove", "cut", "flip"])
def test_any_damage_to_any_file_is_noticed(state, tmp_path, name, damage):
    write_state(tmp_path / "state", state)
    path = tmp_path / "state" / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-10] ^= 1
        path.write_bytes(content)
    with pytest.raises(StateCorruptError, match=name.replace(".", r"\.")):
        read_state(tmp_path / "state")


def test_another_schema_is_refused_by_number(state, tmp_path):
    write_state(tmp_path / "state", state)
    manifest = tmp_path / "state" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(StateCorruptError, match="schema 2, this version reads 1"):
        read_state(tmp_path / "state")


def test_an_existing_state_is_never_overwritten(state, tmp_path):
    write_state(tmp_path / "state", state)
    with pytest.raises(StateFileError, match="already there"):
        write_state(tmp_path / "state", StateTree({}, {}))
    assert read_state(tmp_path / "state").data == state.data


@pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": {1, 2}}, {"x": (1, 2)}, {1: "x"}])
def test_data_that_json_would_change_is_refused(data, tmp_path):
    with pytest.raises(StateFileError, match="state data"):
        write_state(tmp_path / "state", StateTree({}, data))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_no_state_and_the_next_one_cleans_up(state, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched:
        # A killed process runs no clean-up either.
        patched.setattr(os, "rename", killed)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            write_state(tmp_path / "state", state)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(StateMissingError):
        read_state(tmp_path / "state")
    write_state(tmp_path / "state", state)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert read_state(tmp_path / "state").data == state.data


def test_a_failed_write_leaves_nothing(state, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateFileError, match=r"state folder .* cannot be written: .*No space left"):
        write_state(tmp_path / "state", state)
    assert not list(tmp_path.iterdir())


def test_what_the_disk_refuses_of_a_state_of_many_ranks_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    boxes = {"weight.a": Box((4096,), (0,))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(StateFileError, match=r"state folder .* cannot be written: .*File too large"):
            write_part(tmp_path, 0, 1, {"weight.a": torch.zeros(4096)}, boxes, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(StateMissingError, match="there is no state folder"):
        Parts(tmp_path / "none")
    with pytest.raises(StateCorruptError, match=r"rank-00000\.json cannot be read"):
        Parts(tmp_path)
