import subprocess
import sys

import pytest
from relax.algorithms import AlgorithmError, GRPOSettings, build, check, names
from relax.schema import FIELDS


def test_names_are_presets_of_the_same_settings():
    assert names() == ["grpo", "dapo", "dr_grpo"]
    assert check("grpo") == GRPOSettings(aggregation="sequence")
    assert check("dapo") == GRPOSettings(clip_high=0.28)
    assert check("dr_grpo", {"max_length": 32}) == GRPOSettings(
        aggregation="fixed", normalize_std=False, max_length=32
    )
    assert check("dapo", {"clip_high": 0.3, "delta": 2}) == GRPOSettings(clip_high=0.3, delta=2)


def test_needs_are_fields_of_the_bus_and_the_reference_only_when_kl_asks():
    plain, with_kl = build("grpo"), build("grpo", {"kl_coef": 1e-3})
    assert plain.name == "grpo"
    assert plain.statistics == "group"
    assert with_kl.needs - plain.needs == {"reference_logprobs"}
    assert with_kl.needs <= set(FIELDS)


def test_a_settings_object_is_taken_whole():
    assert "reference_logprobs" in build("dapo", GRPOSettings(kl_coef=0.1)).needs


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dappo", {}, "'dappo' is not known, did you mean 'dapo'.*grpo, dapo, dr_grpo"),
        ("zzz", {}, "'zzz' is not known: expected one of"),
        ("grpo", {"clip_hihg": 0.2}, "no setting 'clip_hihg', did you mean 'clip_high'"),
        ("grpo", {"clip_low": "a bit"}, r"'grpo': Expected `float`, got `str` - at `\$.clip_low`"),
        ("grpo", {"aggregation": "tokens"}, r"Invalid enum value 'tokens' - at `\$.aggregation`"),
        ("grpo", {"clip_low": 1.5}, "clip_low=1.5: expected 0 to 1"),
        ("grpo", {"clip_high": -0.1}, "clip_high=-0.1"),
        ("grpo", {"delta": 1.1}, "delta=1.1: expected null, or more than 1"),
        ("grpo", {"kl_coef": -1}, "kl_coef=-1"),
        ("grpo", {"kl_unbiased": True}, "kl_unbiased=true has no effect with kl_coef=0"),
        ("grpo", {"std_eps": 0}, "std_eps=0"),
        ("dr_grpo", {}, "'dr_grpo': aggregation='fixed' needs max_length"),
        ("dr_grpo", {"max_length": 0}, "max_length=0"),
        ("no_such_package.algorithms:make", {}, "'no_such_package.algorithms' cannot be imported"),
        ("relax.algorithms.grpo:mak", {}, "no attribute 'mak', did you mean 'make'"),
        ("relax.algorithms.settings:GRPOSettings", {}, "made a GRPOSettings: expected a relax"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_way_out(name, settings, message):
    with pytest.raises(AlgorithmError, match=message):
        build(name, settings)


def test_an_algorithm_of_ones_own_is_built_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms.py").write_text(
        "from dataclasses import replace\n"
        "from relax.algorithms import build\n"
        "def reinforce(weight):\n"
        "    return replace(build('dapo', {'clip_low': weight}), name='reinforce')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build("my_algorithms:reinforce", {"weight": 0.5}).name == "reinforce"


def test_checking_a_configuration_imports_no_torch():
    code = (
        "import sys; from relax.algorithms import check; check('grpo', {'kl_coef': 0.1}); "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"
