"""A policy that takes long to encode, as for a video: others go on, limits and cancellation hold."""

import asyncio

import pytest
from agentic import EpisodeEnd, EpisodeError, Limits


@pytest.fixture
def slow_policy(policy_of):
    """slow_policy(script, method, gate): a policy of which a method waits for the gate."""

    def make(script, method, gate):
        class Slow(policy_of):
            ended = 0
            began = asyncio.Event()

        async def wait(self, *arguments, **options):
            Slow.began.set()
            try:
                await gate.wait()
            finally:
                Slow.ended += 1
            return await getattr(policy_of, method)(self, *arguments, **options)

        setattr(Slow, method, wait)
        return Slow(script)

    return make


@pytest.mark.parametrize("method", ["encode", "encode_observation"])
async def test_others_go_on_while_one_is_encoded(
    play, echo_environment, policy_of, turns_of, slow_policy, method
):
    gate = asyncio.Event()
    slow = slow_policy(turns_of("a", "bye"), method, gate)
    waiting = asyncio.create_task(play(echo_environment(), slow))
    await asyncio.wait_for(slow.began.wait(), 20)
    other = await play(echo_environment(), policy_of(turns_of("a", "bye")))
    assert (other.end, waiting.done()) == (EpisodeEnd.DONE, False)
    gate.set()
    assert (await waiting).transcript.tokens.tolist() == other.transcript.tokens.tolist()


async def test_the_time_limit_holds_for_the_opening(play, echo_environment, turns_of, slow_policy, never):
    policy, environment = slow_policy(turns_of("bye"), "encode", never), echo_environment()
    with pytest.raises(EpisodeError, match=r"at encode: TimeoutError: max_seconds = 0.05 s passed") as caught:
        await play(environment, policy, limits=Limits(max_seconds=0.05))
    assert (caught.value.stage, policy.ended, environment.closes) == ("encode", 1, 1)


async def test_the_time_limit_ends_an_episode_whose_observation_is_encoded(
    play, echo_environment, turns_of, slow_policy, never
):
    policy, environment = slow_policy(turns_of("a"), "encode_observation", never), echo_environment()
    episode = await play(environment, policy, limits=Limits(max_seconds=0.05))
    assert (episode.end, episode.turns, episode.reward) == (EpisodeEnd.TIME_LIMIT, 1, 1.0)
    assert episode.transcript.loss_mask[-1] == 1, "what was not encoded in time is left out"
    assert (policy.ended, environment.closes) == (1, 1)


async def test_a_timeout_of_the_policys_own_is_its_failure(play, echo_environment, policy_of, turns_of):
    class Broken(policy_of):
        async def encode_observation(self, conversation, action, observation):
            raise TimeoutError("the disk did not answer")

    with pytest.raises(EpisodeError, match="at encode_observation: TimeoutError: the disk did not answer"):
        await play(echo_environment(), Broken(turns_of("a", "bye")), limits=Limits(max_seconds=60))


@pytest.mark.parametrize("method", ["encode", "encode_observation"])
async def test_a_cancelled_episode_gives_up_what_is_encoded(
    play, echo_environment, turns_of, slow_policy, never, method
):
    policy, environment = slow_policy(turns_of("a"), method, never), echo_environment()
    playing = asyncio.create_task(play(environment, policy))
    await asyncio.wait_for(policy.began.wait(), 20)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (policy.ended, environment.closes) == (1, 1)
