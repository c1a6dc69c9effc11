import asyncio

import numpy as np
import pytest
from agentic import EpisodeEnd, EpisodeError, Limits, Sampling, Score, Task, run_episode
from agentic.environments import SingleTurn


@pytest.fixture
def score_with(policy_of):
    """Play one single-turn episode, answered with "77a", scored by a reward."""

    async def play(reward, *, max_new_tokens=100):
        return await run_episode(
            SingleTurn(reward),
            Task("sevens", [{"role": "user", "content": "more 7s"}], answer="7"),
            policy_of(lambda _: "77a"),
            limits=Limits(),
            sampling=Sampling(max_new_tokens=max_new_tokens),
            request_id="e",
            seed=0,
        )

    return play


async def test_a_plain_function_is_a_reward(score_with):
    episode = await score_with(lambda task, response, transcript: response.count(task.answer) / len(response))
    assert (episode.reward, episode.end, episode.turns) == (2 / 3, EpisodeEnd.DONE, 1)


async def test_an_async_function_is_a_reward(score_with):
    async def judge(task, response, transcript):
        await asyncio.sleep(0)
        return Score(0.5, {"style": 1.0}, "fine")

    episode = await score_with(judge)
    assert (episode.reward, episode.reward_parts, episode.infos) == (
        0.5,
        {"style": 1.0},
        [{"reason": "fine"}],
    )


async def test_an_object_with_a_call_is_a_reward(score_with):
    class Length:
        def __call__(self, task, response, transcript):
            return transcript.sampled_length

    assert (await score_with(Length())).reward == 4.0


@pytest.mark.parametrize("number", [True, 1, np.float32(1), np.bool_(True)])
async def test_any_number_is_a_reward(score_with, number):
    episode = await score_with(lambda *_: number)
    assert type(episode.reward) is float
    assert episode.reward == 1.0


async def test_an_answer_cut_off_is_scored_too(score_with):
    episode = await score_with(lambda task, response, transcript: float(response == "77"), max_new_tokens=2)
    assert (episode.reward, episode.end) == (1.0, EpisodeEnd.TRUNCATED)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("good", "reward of task 'sevens' returned str"),
        (None, "returned NoneType"),
        (float("nan"), "reward of task 'sevens' is nan"),
        (Score(float("inf")), "is inf"),
    ],
)
async def test_a_reward_that_is_no_finite_number_fails_the_episode(score_with, reward, message):
    with pytest.raises(EpisodeError, match=message):
        await score_with(lambda *_: reward)


async def test_a_reward_that_raises_fails_the_episode(score_with):
    def broken(task, response, transcript):
        raise ZeroDivisionError("no verifier")

    with pytest.raises(EpisodeError, match="at step: ZeroDivisionError: no verifier"):
        await score_with(broken)
