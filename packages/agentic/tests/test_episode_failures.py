"""Failures, time limits, aborts and cancellation of an episode."""

import asyncio
import gc
import pickle
import time

import numpy as np
import pytest
from agentic import (
    EpisodeEnd,
    EpisodeError,
    Generation,
    Limits,
    Sampling,
)

PROMPT = 8  # user role, "hello", end of turn, assistant role


async def test_an_aborted_turn_is_kept_and_not_shown(play, echo_environment, policy_of):
    def gives_up(request):
        if request.id == "e/0":
            return "a"
        return Generation(np.array([66], np.int32), np.array([-1], np.float32), [(1, 0, 1)], "abort")

    environment = echo_environment()
    episode = await play(environment, policy_of(gives_up))
    assert (episode.end, episode.turns, episode.reward) == (EpisodeEnd.ABORTED, 2, 1.0)
    assert [action.text for action in environment.actions] == ["a"]
    assert episode.transcript.tokens[-1] == 66
    assert episode.messages[-1] == {"role": "assistant", "content": "B"}


async def test_an_abort_before_the_first_token_leaves_an_empty_response(play, echo_environment, policy_of):
    nothing = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort")
    episode = await play(echo_environment(), policy_of(lambda _: nothing))
    assert (episode.end, episode.transcript.response_length) == (EpisodeEnd.ABORTED, 0)
    assert episode.messages == [{"role": "user", "content": "hello"}]


async def test_the_time_limit_aborts_and_keeps_what_was_sampled(play, echo_environment, policy_of):
    aborted = asyncio.Event()

    async def until_aborted(request):
        await aborted.wait()
        return Generation(np.array([65], np.int32), np.array([-1], np.float32), [(2, 0, 1)], "abort")

    class Policy(policy_of):
        async def abort(self, request_id):
            await super().abort(request_id)
            aborted.set()

    policy, environment = Policy(until_aborted), echo_environment()
    episode = await play(environment, policy, limits=Limits(max_seconds=0.05))
    assert (episode.end, policy.aborted) == (EpisodeEnd.TIME_LIMIT, ["e/0"])
    assert episode.transcript.tokens[PROMPT:].tolist() == [65]
    assert environment.actions == []
    assert environment.closes == 1


async def test_an_engine_that_ignores_an_abort_fails_the_episode(play, echo_environment, policy_of, never):
    ended = asyncio.Event()

    async def deaf(request):
        try:
            await never.wait()
        finally:
            ended.set()

    with pytest.raises(
        EpisodeError, match=r"at abort: TimeoutError: grace_seconds = 0.05 s passed"
    ) as caught:
        await play(echo_environment(), policy_of(deaf), limits=Limits(max_seconds=0.05, grace_seconds=0.05))
    assert (caught.value.stage, ended.is_set()) == ("abort", True)


async def test_the_time_limit_holds_for_a_step(play, echo_environment, policy_of, never):
    class Slow(echo_environment):
        async def step(self, action):
            await never.wait()
            raise AssertionError

    environment = Slow()
    episode = await play(environment, policy_of(lambda _: "a"), limits=Limits(max_seconds=0.05))
    assert (episode.end, episode.reward) == (EpisodeEnd.TIME_LIMIT, 0.0)
    assert episode.transcript.tokens[PROMPT:].tolist() == [ord("a"), 1]
    assert environment.closes == 1


async def test_the_time_limit_holds_for_reset(play, echo_environment, policy_of, never):
    class Slow(echo_environment):
        async def reset(self, task):
            await never.wait()
            raise AssertionError

    with pytest.raises(EpisodeError, match=r"at reset: TimeoutError: max_seconds = 0.05 s passed"):
        await play(Slow(), policy_of(lambda _: "a"), limits=Limits(max_seconds=0.05))


@pytest.mark.parametrize("method", ["reset", "step", "close"])
async def test_a_failing_environment_is_named_with_its_turn(
    play, echo_environment, policy_of, turns_of, method
):
    class Broken(echo_environment):
        pass

    async def fail(self, *_):
        raise KeyError("gone")

    setattr(Broken, method, fail)
    environment = Broken()
    with pytest.raises(
        EpisodeError, match=f"'e' of task 'greeting' failed .* at {method}: KeyError"
    ) as caught:
        await play(environment, policy_of(turns_of("bye")))
    error = caught.value
    assert (error.task_id, error.request_id, error.turn, error.stage) == ("greeting", "e", 0, method)
    assert isinstance(error.__cause__, KeyError)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.task_id, again.turn) == (str(error), "greeting", 0)
    assert environment.closes == (method != "close")


async def test_a_timeout_of_the_environments_own_is_its_failure(play, echo_environment, policy_of):
    class Broken(echo_environment):
        async def step(self, action):
            raise TimeoutError("the service did not answer")

    with pytest.raises(EpisodeError, match="at step: TimeoutError: the service did not answer"):
        await play(Broken(), policy_of(lambda _: "a"))


async def test_a_failing_policy_is_named_with_its_turn(play, echo_environment, policy_of):
    def fail(request):
        if request.id == "e/1":
            raise OSError("engine gone")
        return "a"

    environment = echo_environment()
    with pytest.raises(EpisodeError, match="turn 1 at generate: OSError: engine gone"):
        await play(environment, policy_of(fail))
    assert environment.closes == 1


async def test_a_generation_the_policy_cancelled_itself_is_a_failure(play, echo_environment, policy_of):
    async def cancelled(request):
        raise asyncio.CancelledError

    with pytest.raises(EpisodeError, match="at generate: RuntimeError: the policy cancelled"):
        await play(echo_environment(), policy_of(cancelled))


async def test_more_tokens_than_asked_for_are_refused(play, echo_environment, policy_of):
    policy = policy_of(lambda _: policy.generation("four"))
    with pytest.raises(EpisodeError, match=r"'e/0' was answered with 5 tokens; expected at most 4"):
        await play(echo_environment(), policy, sampling=Sampling(max_new_tokens=4))


async def test_a_prompt_without_room_is_refused_with_both_lengths(play, echo_environment, policy_of):
    policy = policy_of(lambda _: "a")
    with pytest.raises(EpisodeError, match=r"at encode: .*prompt has 8 tokens but max_tokens is 8"):
        await play(echo_environment(), policy, limits=Limits(max_tokens=8))
    assert policy.requests == []


async def test_a_failing_close_does_not_hide_the_first_failure(play, echo_environment, policy_of):
    class Broken(echo_environment):
        async def step(self, action):
            raise KeyError("first")

        async def close(self):
            raise KeyError("second")

    with pytest.raises(EpisodeError, match="at step: KeyError: 'first'") as caught:
        await play(Broken(), policy_of(lambda _: "a"))
    assert "second" in caught.value.__notes__[0]


async def test_cancelling_aborts_the_request_in_flight_and_sees_it_end(
    play, echo_environment, policy_of, never
):
    events = []
    started = asyncio.Event()

    async def stuck(request):
        started.set()
        try:
            await never.wait()
        finally:
            events.append("generation ended")

    class Policy(policy_of):
        async def abort(self, request_id):
            events.append(f"abort {request_id}")

    class Environment(echo_environment):
        async def close(self):
            events.append("environment closed")

    playing = asyncio.create_task(play(Environment(), Policy(stuck)))
    await asyncio.wait_for(started.wait(), 10)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert events == ["abort e/0", "generation ended", "environment closed"]


async def test_a_second_cancel_does_not_cut_the_cleanup_short(play, echo_environment, policy_of, never):
    started, aborting, may_abort = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stuck(request):
        started.set()
        await never.wait()

    class Policy(policy_of):
        async def abort(self, request_id):
            aborting.set()
            await may_abort.wait()
            await super().abort(request_id)

    policy, environment = Policy(stuck), echo_environment()
    playing = asyncio.create_task(play(environment, policy))
    await asyncio.wait_for(started.wait(), 10)
    playing.cancel()
    await asyncio.wait_for(aborting.wait(), 10)
    playing.cancel()
    may_abort.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (policy.aborted, environment.closes) == (["e/0"], 1)


async def test_cancelling_during_a_step_closes_the_environment(play, echo_environment, policy_of, never):
    stepping = asyncio.Event()

    class Slow(echo_environment):
        async def step(self, action):
            stepping.set()
            await never.wait()
            raise AssertionError

    policy, environment = policy_of(lambda _: "a"), Slow()
    playing = asyncio.create_task(play(environment, policy))
    await asyncio.wait_for(stepping.wait(), 10)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (policy.aborted, environment.closes) == ([], 1)


async def test_cancelling_during_close_lets_it_finish(play, echo_environment, policy_of):
    closing, may_close = asyncio.Event(), asyncio.Event()

    class Slow(echo_environment):
        async def close(self):
            closing.set()
            await may_close.wait()
            await super().close()

    environment = Slow()
    playing = asyncio.create_task(play(environment, policy_of(lambda _: "bye")))
    await asyncio.wait_for(closing.wait(), 10)
    playing.cancel()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert environment.closes == 1


async def test_a_step_that_blocks_past_the_time_limit_counts_and_is_the_last(
    play, echo_environment, policy_of
):
    class Blocking(echo_environment):
        async def step(self, action):
            time.sleep(0.3)  # noqa: ASYNC251 - it is the blocking that is tested
            return await super().step(action)

    policy = policy_of(lambda _: "a")
    episode = await play(Blocking(), policy, limits=Limits(max_seconds=0.25))
    assert (episode.end, episode.reward, len(policy.requests)) == (EpisodeEnd.TIME_LIMIT, 1.0, 1)
    assert episode.transcript.loss_mask[-1] == 1


async def test_a_generation_that_fails_while_it_is_cancelled_is_not_reported_as_lost(
    play, echo_environment, policy_of, never
):
    started, lost = asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))

    async def fails_late(request):
        started.set()
        try:
            await never.wait()
        finally:
            raise OSError("connection closed")

    playing = asyncio.create_task(play(echo_environment(), policy_of(fails_late)))
    await asyncio.wait_for(started.wait(), 10)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    del playing
    await asyncio.sleep(0)  # the loop lets go of a finished task one iteration later
    gc.collect()
    assert lost == []


async def test_a_timeout_of_reset_that_is_not_our_limit_is_shown_as_it_is(play, echo_environment, policy_of):
    class Broken(echo_environment):
        async def reset(self, task):
            raise TimeoutError("the service did not answer")

    with pytest.raises(EpisodeError, match="at reset: TimeoutError: the service did not answer"):
        await play(Broken(), policy_of(lambda _: "a"))
