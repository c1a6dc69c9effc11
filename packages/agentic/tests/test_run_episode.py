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
    InvalidValue,
    Limits,
    Observation,
    Sampling,
    Step,
    derive_seed,
    run_episode,
)

PROMPT = 8  # user role, "hello", end of turn, assistant role


@pytest.fixture
def play(task):
    async def play(environment, policy, *, limits=None, sampling=None, seed=11):
        return await run_episode(
            environment,
            task,
            policy,
            limits=limits or Limits(),
            sampling=sampling or Sampling(),
            request_id="e",
            seed=seed,
        )

    return play


async def test_an_episode_ends_when_the_environment_is_done(play, echo_environment, policy_of, turns_of):
    environment, policy = echo_environment(), policy_of(turns_of("ab", "bye"), version=3)
    episode = await play(environment, policy)
    assert (episode.end, episode.truncated, episode.turns) == (EpisodeEnd.DONE, False, 2)
    assert (episode.reward, episode.reward_parts) == (2.0, {"turns": 2.0})
    assert episode.infos == [{"said": "ab"}, {"said": "bye"}]
    assert episode.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "ab"},
        {"role": "tool", "content": "ab"},
        {"role": "assistant", "content": "bye"},
    ]
    assert (episode.task_id, episode.request_id, episode.seed) == ("greeting", "e", 11)
    assert (environment.resets, environment.closes) == (1, 1)


async def test_the_transcript_is_what_the_engine_saw_and_sampled(play, echo_environment, policy_of, turns_of):
    policy = policy_of(turns_of("ab", "bye"), version=3)
    transcript = (await play(echo_environment(), policy)).transcript
    observation = [5, ord("a"), ord("b"), 1, 4]
    assert transcript.prompt_length == PROMPT
    assert transcript.tokens[PROMPT:].tolist() == [*map(ord, "ab"), 1, *observation, *map(ord, "bye"), 1]
    assert transcript.loss_mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert transcript.logprobs.tolist() == [-1, -2, -3, 0, 0, 0, 0, 0, -1, -2, -3, -4]
    assert transcript.versions.tolist() == [[3, 0, 3], [3, 8, 12]]
    assert policy.requests[1].tokens.tolist() == transcript.tokens[: PROMPT + 8].tolist()


async def test_each_turn_has_its_own_id_and_seed(play, echo_environment, policy_of, turns_of):
    policy = policy_of(turns_of("a", "b", "bye"))
    await play(echo_environment(), policy, seed=5)
    assert [request.id for request in policy.requests] == ["e/0", "e/1", "e/2"]
    assert [request.seed for request in policy.requests] == [derive_seed(5, turn) for turn in range(3)]


async def test_the_environment_sees_the_exact_turn(play, echo_environment, policy_of, turns_of):
    environment = echo_environment()
    episode = await play(environment, policy_of(turns_of("a", "bye")))
    first, last = environment.actions
    assert (first.text, first.finish_reason, first.tokens.tolist()) == ("a", "stop", [ord("a"), 1])
    assert first.transcript.tokens.tolist() == episode.transcript.tokens[: PROMPT + 2].tolist()
    assert last.transcript.tokens.tolist() == episode.transcript.tokens.tolist()


async def test_max_turns_ends_with_the_last_sampled_token(play, echo_environment, policy_of):
    episode = await play(echo_environment(), policy_of(lambda _: "a"), limits=Limits(max_turns=3))
    assert (episode.end, episode.turns, episode.reward) == (EpisodeEnd.MAX_TURNS, 3, 3.0)
    assert episode.truncated
    assert episode.transcript.loss_mask[-1] == 1


async def test_a_turn_cut_off_is_shown_to_the_environment_and_is_the_last(
    play, echo_environment, policy_of, turns_of
):
    environment = echo_environment()
    policy = policy_of(turns_of("a", "longer"))
    episode = await play(environment, policy, sampling=Sampling(max_new_tokens=4))
    assert (episode.end, episode.turns, episode.reward) == (EpisodeEnd.TRUNCATED, 2, 2.0)
    assert (environment.actions[1].text, environment.actions[1].finish_reason) == ("long", "length")


async def test_a_turn_cut_off_is_truncated_though_the_environment_is_done(play, echo_environment, policy_of):
    episode = await play(echo_environment(), policy_of(lambda _: "bye"), sampling=Sampling(max_new_tokens=3))
    assert (episode.end, episode.reward) == (EpisodeEnd.TRUNCATED, 1.0)


async def test_turns_are_clipped_to_the_context(play, echo_environment, policy_of, turns_of):
    # PROMPT + "a" and end of turn + observation of 4 leaves 3 of 17.
    policy = policy_of(turns_of("a", "longer"))
    episode = await play(
        echo_environment(), policy, limits=Limits(max_tokens=17), sampling=Sampling(max_new_tokens=5)
    )
    assert [request.sampling.max_new_tokens for request in policy.requests] == [5, 3]
    assert (episode.end, len(episode.transcript.tokens)) == (EpisodeEnd.CONTEXT_FULL, 17)


@pytest.mark.parametrize(("max_tokens", "turns"), [(14, 1), (15, 2)])
async def test_an_observation_must_leave_room_for_a_turn(
    play, echo_environment, policy_of, turns_of, max_tokens, turns
):
    episode = await play(
        echo_environment(), policy_of(turns_of("a", "b")), limits=Limits(max_tokens=max_tokens)
    )
    assert (episode.end, episode.turns) == (EpisodeEnd.CONTEXT_FULL, turns)
    assert episode.transcript.loss_mask[-1] == 1, "an observation nobody answers is left out"


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


async def test_a_turn_without_end_of_turn_gets_it_from_the_observation(play, echo_environment, policy_of):
    def stops_elsewhere(request):
        if request.id == "e/1":
            return "bye"
        tokens = np.array([*map(ord, "x]")], np.int32)
        return Generation(tokens, np.full(2, -1, np.float32), [(0, 0, 2)], "stop")

    transcript = (await play(echo_environment(), policy_of(stops_elsewhere))).transcript
    assert transcript.tokens[PROMPT : PROMPT + 4].tolist() == [ord("x"), ord("]"), 1, 5]
    assert transcript.loss_mask[:4].tolist() == [1, 1, 0, 0]


def test_a_step_is_over_or_goes_on_and_its_reward_is_finite():
    with pytest.raises(InvalidValue, match="no observation though the episode is not done"):
        Step(None, 0.0, False)
    with pytest.raises(InvalidValue, match="reward of a step is nan"):
        Step(Observation([]), float("nan"), False)


@pytest.mark.parametrize(
    "values", [{"max_turns": 0}, {"max_tokens": 1}, {"max_seconds": 0.0}, {"grace_seconds": 0.0}]
)
def test_limits_out_of_range_are_refused_by_name(values):
    with pytest.raises(InvalidValue, match=next(iter(values))):
        Limits(**values)


async def test_seeds_and_ids_are_checked_before_anything_starts(task, echo_environment, policy_of):
    environment = echo_environment()
    for request_id, seed in (("e", -1), ("e", 2**64), ("", 0)):
        with pytest.raises(InvalidValue):
            await run_episode(
                environment,
                task,
                policy_of(lambda _: "a"),
                limits=Limits(),
                sampling=Sampling(),
                request_id=request_id,
                seed=seed,
            )
    assert environment.resets == 0


async def test_an_observation_is_encoded_after_the_conversation_before_its_turn(
    play, echo_environment, policy_of, turns_of
):
    seen = []

    class Policy(policy_of):
        def encode_observation(self, conversation, action, observation):
            seen.append(([message["content"] for message in conversation], action.text, observation.messages))
            return super().encode_observation(conversation, action, observation)

    await play(echo_environment(), Policy(turns_of("a", "b", "bye")))
    assert seen == [
        (["hello"], "a", [{"role": "tool", "content": "a"}]),
        (["hello", "a", "a"], "b", [{"role": "tool", "content": "b"}]),
    ]


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
