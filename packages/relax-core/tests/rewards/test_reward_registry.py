import subprocess
import sys
from typing import Any

import pytest
from relax.engine.rewards import RewardError, Score, build, close, names
from relax.engine.rewards.mixture import Mixture

OWN_REWARDS = """
class Constant:
    name = "constant"
    def __init__(self, value):
        self.value = value
        self.closed = 0
    async def __call__(self, sample):
        from relax.engine.rewards import Score
        return Score(self.value, {"half": self.value / 2}, "because")
    def close(self):
        self.closed += 1

async def shouting(sample, factor=1.0):
    return factor * sample.response.isupper()

class Nameless:
    async def __call__(self, sample):
        return None

def number():
    return 3

NOTHING = 3
"""


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rewards", None)


def test_every_registered_reward_is_built_under_its_name():
    settings = {
        "char_share": {"character": "7", "length": 16},
        "mixture": {"rewards": [{"reward": "exact_match", "weight": 1}]},
    }
    for name in names():
        reward = build(name, settings.get(name))
        assert reward.name == name
        close(reward)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("char_shar", {}, "'char_shar' is not known, did you mean 'char_share'.*exact_match"),
        ("char_share", {"charcter": "7"}, "no setting 'charcter', did you mean 'character'"),
        ("char_share", {"character": "7"}, "needs the setting 'length'"),
        ("char_share", {"character": 7, "length": 4}, "character=7: Expected `str`, got `int`"),
        ("char_share", {"character": "77", "length": 4}, "character='77': expected exactly one"),
        ("char_share", {"character": "7", "length": 0}, "length=0: expected 1 or more"),
        ("mixture", {"rewards": []}, "no rewards"),
        ("mixture", {"rewards": [{"reward": "math"}]}, "and a number as `weight`"),
        ("mixture", {"rewards": [{"reward": "math", "wieght": 1}]}, "'wieght'.*did you mean 'weight'"),
        ("mixture", {"rewards": [{"reward": "math", "weight": float("nan")}]}, "weight nan of 'math'"),
        ("mixture", {"rewards": [{"reward": "math", "weight": 1}] * 2}, "two rewards are named 'math'"),
        ("no_such_package.rewards:score", {}, "'no_such_package.rewards' cannot be imported"),
        ("own_rewards:shoutin", {}, "no attribute 'shoutin', did you mean 'shouting'"),
        ("own_rewards:shouting", {"facto": 2}, "no setting 'facto', did you mean 'factor'"),
        ("own_rewards:Constant", {}, "needs the setting 'value'"),
        ("own_rewards:Nameless", {}, "made a Nameless: expected an object with a `name`"),
        ("own_rewards:number", {}, "made a int: expected an object"),
        ("own_rewards:NOTHING", {}, "is a int: expected an async function or a class"),
    ],
)
@pytest.mark.usefixtures("own_rewards")
def test_what_cannot_be_built_is_refused_with_the_way_out(name, settings, message):
    with pytest.raises(RewardError, match=message):
        build(name, settings)


@pytest.mark.usefixtures("own_rewards")
async def test_an_async_function_of_ones_own_is_a_reward(sample):
    reward = build("own_rewards:shouting", {"factor": 0.5})
    assert reward.name == "shouting"
    assert await reward(sample("HEY")) == Score(0.5)
    assert await reward(sample("hey")) == Score(0.0)


@pytest.mark.usefixtures("own_rewards")
async def test_a_mixture_is_the_weighted_sum_and_keeps_every_part(sample):
    reward = build(
        "mixture",
        {
            "rewards": [
                {"reward": "exact_match", "weight": 0.75},
                {"reward": "own_rewards:Constant", "weight": -2, "settings": {"value": 0.25}},
            ]
        },
    )
    assert await reward(sample("7", "7")) == Score(
        0.75 - 0.5,
        {"exact_match": 1.0, "exact_match/correct": 1.0, "constant": 0.25, "constant/half": 0.125},
        "constant: because",
    )


@pytest.mark.usefixtures("own_rewards")
async def test_a_sample_one_part_cannot_judge_is_not_judged(sample):
    constant: Any = build("own_rewards:Constant", {"value": 1.0})
    mixture = Mixture([(1.0, constant), (1.0, build("exact_match"))])
    with pytest.raises(RewardError, match="the row has no answer"):
        await mixture(sample("7"))
    close(mixture)
    assert constant.closed == 1


def test_importing_the_rewards_imports_neither_torch_nor_a_verifier():
    code = (
        "import sys; import relax.engine.rewards as rewards; rewards.build('math');"
        "print([name for name in ('torch', 'math_verify', 'sympy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
