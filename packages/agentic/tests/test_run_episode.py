import numpy as np
import pytest
from agentic import (
    EpisodeEnd,
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
        async def encode_observation(self, conversation, action, observation):
            seen.append(([message["content"] for message in conversation], action.text, observation.messages))
            return await super().encode_observation(conversation, action, observation)

    await play(echo_environment(), Policy(turns_of("a", "b", "bye")))
    assert seen == [
        (["hello"], "a", [{"role": "tool", "content": "a"}]),
        (["hello", "a", "a"], "b", [{"role": "tool", "content": "b"}]),
    ]
