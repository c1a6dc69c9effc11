"""The math reward on real math-verify, in real child processes."""

import asyncio
import time
from collections.abc import Iterator

import psutil
import pytest
from relax.engine.rewards import Reward, RewardError, build, close
from relax.engine.rewards.math import MathReward


@pytest.fixture(scope="module")
def math() -> Iterator[Reward]:
    reward = build("math", {"timeout": 30})
    yield reward
    close(reward)


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"so the answer is $\frac{2}{4}$", "1/2", 1.0),
        (r"\boxed{7}", 7, 1.0),
        ("The answer is 7.", "7", 1.0),
        ("The answer is 8.", "7", 0.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("$1 + 2x$", "2x+1", 1.0),
        ("$2$", "2x+1", 0.0),
        ("1000", "1,000", 1.0),
        ("It costs 18 dollars.", "$18", 1.0),
    ],
)
async def test_equal_expressions_score_one(response, answer, value, math, sample):
    score = await math(sample(response, answer))
    assert (score.value, score.parts) == (value, {"correct": value, "verifier_failed": 0.0})


async def test_a_response_without_an_answer_says_so(math, sample):
    score = await math(sample("well, hm", "7"))
    assert (score.value, score.reason) == (0.0, "no answer found in the response")


async def test_an_answer_that_is_no_mathematics_is_an_error_of_the_data(math, sample):
    with pytest.raises(RewardError, match=r"the answer '\?\?!' of the row cannot be read"):
        await math(sample("7", "??!"))


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("7", "7", 1),
        (" 7\n", 7, 1),
        ("007", "7", 1),
        ("-3", "+3", 0),
        ("12", "7", 0),
        ("", "7", 0),
        ("+=", 7, 0),
    ],
)
async def test_plain_integers_are_judged_without_a_process(response, answer, value, sample):
    reward = MathReward()
    score = await reward(sample(response, answer))
    assert score.value == value
    assert reward._pool.pids == []
    close(reward)


async def test_a_hung_verifier_is_killed_its_sample_counted_and_the_next_judged(sample):
    reward = MathReward(timeout=3.0)
    try:
        assert (await reward(sample("$3$", "3"))).value == 1.0  # the child is up
        (pid,) = reward._pool.pids
        began = time.monotonic()
        score = await reward(sample("$9^{9^{9^{9}}}$", "1"))
        assert 3.0 <= time.monotonic() - began < 15.0
        assert (score.value, score.parts) == (0.0, {"correct": 0.0, "verifier_failed": 1.0})
        assert score.reason is not None
        assert "took longer than 3 s and was killed" in score.reason
        assert not psutil.pid_exists(pid)
        assert (await reward(sample("$3$", "3"))).value == 1.0
    finally:
        reward.close()


async def test_samples_are_judged_side_by_side_and_each_gets_its_own_verdict(sample):
    reward = MathReward(timeout=30.0, workers=2)
    try:
        samples = [sample(f"x = ${number}$", str(number // 2 * 2)) for number in range(40)]
        scores = await asyncio.gather(*(reward(each) for each in samples))
        assert [score.value for score in scores] == [1.0, 0.0] * 20
        assert len(reward._pool.pids) == 2
    finally:
        reward.close()


@pytest.mark.parametrize(("settings", "what"), [({"timeout": 0}, "timeout=0"), ({"workers": 0}, "workers=0")])
def test_limits_that_judge_nothing_are_refused(settings, what):
    with pytest.raises(RewardError, match=f"math: {what}"):
        build("math", settings)
