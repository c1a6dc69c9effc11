from pathlib import Path

import pytest
import yaml
from relax.config import ConfigError, check, dump, load, resolve
from relax.config.load import parse_overrides


def test_words_beat_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("actor: {lr: 1.0e-3, weight_decay: 0.1}\nsteps: 5\nseed: 5\n")
    monkeypatch.setenv("RELAX_ACTOR__LR", "2e-3")
    monkeypatch.setenv("RELAX_SEED", "7")
    config = load(file, ["seed=9"])
    assert (config.actor.lr, config.actor.weight_decay, config.steps, config.seed) == (2e-3, 0.1, 5, 9)


def test_short_forms_and_modes() -> None:
    config = load(None, ["model=org/name", "reward=math", "data=x.jsonl", "mode=colocate", "actor.lr=1e-6"])
    assert config.model.path == "org/name"
    assert config.reward.name == "math"
    assert config.max_staleness == 0
    assert config.actor.lr == 1e-6
    assert load(None, []).max_staleness == 1


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load(None, ["data=x.jsonl", "algorithm.kl_coef=0.1", "model.tiny={hidden_size: 32}"])
    assert config.reference
    assert resolve(yaml.safe_load(dump(config)), {}, "dump") == config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["actor.lrr=1"], "actor.lrr = 1: there is no such key; did you mean actor.lr?"),
        (["lr=1"], "did you mean actor.lr?"),
        (["modee=async"], "did you mean mode?"),
        (["mode=sync"], "mode = 'sync': Input should be 'async' or 'colocate'"),
        (["rollout.replicas=0"], "rollout.replicas = 0"),
        (["steps"], "not of the form key=value"),
        (["actor=3", "actor.lr=1"], "already given a value"),
        (["actor.lr=[1"], "not YAML"),
        (["weights.wires=[rdma]"], "weights.wires.0 = 'rdma': Input should be 'shm' or 'tcp'"),
        (["weights.streams=0"], "weights.streams = 0"),
    ],
)
def test_wrong_words_are_named_with_the_way_out(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, words)
    assert expected in str(caught.value)


def test_one_fault_is_not_told_twice() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["mode=sync"])
    assert "max_staleness" not in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("steps: 1\n")
    with pytest.raises(ConfigError, match=r"quickstart\.yaml is there"):
        load(tmp_path / "quickstrat.yaml")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "a\n  b: c: d"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(file)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mode=colocate", "max_staleness=1"], "set max_staleness=0 or mode=async"),
        (["rollout.top_p=0.9"], "set rollout.top_p=1.0"),
        (["rollout.top_k=5"], "set rollout.top_k=0"),
        (["rollout.samples_per_prompt=1"], "give at least 2"),
        (["environment=calculator"], "rollout.max_turns = 1"),
        (["model.context_length=16"], "leaves no room"),
        (["data.path="], "data.path is empty"),
        (["actor.supervised.steps=3"], "data.answer_column"),
        (["weights.wires=[tcp, tcp]"], "names a wire twice"),
        (
            ["weights.wires=[shm]", "weights.delta=true"],
            "add tcp to weights.wires, or leave weights.delta out",
        ),
        (["weights.wires=[shm]", "ray.address=auto"], "a cluster may have several; add tcp"),
    ],
)
def test_combinations_that_cannot_work_are_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(None, ["data=x.jsonl", *words]))
    assert expected in str(caught.value)


def test_numbers_in_words_are_numbers() -> None:
    assert parse_overrides(["a.b=1e-6", "a.c=7", "d=x7", "e=true", "f=[1, 2]"]) == {
        "a": {"b": 1e-6, "c": 7},
        "d": "x7",
        "e": True,
        "f": [1, 2],
    }


@pytest.mark.parametrize(
    "path", ["/my runs #2", "/a: b/c", "- x", "#7", "~x", "a, b", "x:", "r 1", "a: b: c", "@x"]
)
def test_a_path_in_words_is_taken_as_it_is(path: str) -> None:
    """YAML would begin a comment in it, or a mapping."""
    assert parse_overrides([f"run.root={path}"]) == {"run": {"root": path}}


def test_words_may_quote_and_say_nothing() -> None:
    assert parse_overrides(["a='7'", 'b="x # y"', "c=null", "d=~", "e={f: 1}", "g="]) == {
        "a": "7",
        "b": "x # y",
        "c": None,
        "d": None,
        "e": {"f": 1},
        "g": "",
    }


def test_another_reward_does_not_inherit_the_arguments_of_the_one_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("reward: {name: char_share, kwargs: {character: '7', length: 16}}\n")
    assert load(file, ["reward=math"]).reward.kwargs == {}
    assert load(file, ["reward.name=math", "reward.kwargs.timeout=2"]).reward.kwargs == {"timeout": 2}
    assert load(file, ["reward.kwargs.length=8"]).reward.kwargs == {"character": "7", "length": 8}


def test_a_folder_is_no_configuration_file(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder, and no configuration file$"):
        load(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"; .*config\.yaml is there$"):
        load(tmp_path)
