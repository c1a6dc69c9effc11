"""An answer that outlives its engine, an engine that only answers, and how often one is started again."""

import pickle
from collections.abc import Sequence

import numpy as np
from agentic import FinishReason, Generation, GenerationRequest, Sampling
from hypothesis import given
from hypothesis import strategies as st
from relax.backends.inference.base import Health
from relax.backends.inference.errors import EngineClosed, EngineFailed, EngineLost, InvalidRequest
from relax.engine.failover import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STEADY_SECONDS,
    NoReplicaLeft,
    ProgressWatch,
    RestartBudget,
    aborted,
    as_lost,
    ended,
    joined,
    resumed,
)

PROMPT = np.array([3, 4, 5], np.int32)
REQUEST = GenerationRequest("g/0", PROMPT, Sampling(max_new_tokens=6, stop_token_ids=(9,)), seed=11)


def generation(
    tokens: Sequence[int], versions: Sequence[int], reason: FinishReason = "length", routes=None
) -> Generation:
    spans: list[tuple[int, int, int]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], at + 1)
        else:
            spans.append((version, at, at + 1))
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return Generation(np.array(tokens, np.int32), logprobs, spans, reason, routes)


def test_only_what_is_left_is_asked_for_under_the_same_id() -> None:
    rest = resumed(REQUEST, generation([7, 8], [1, 1]))
    assert rest.id == REQUEST.id
    assert rest.tokens.tolist() == [3, 4, 5, 7, 8]
    assert rest.sampling == Sampling(max_new_tokens=4, stop_token_ids=(9,))
    # The draws of the first positions of the seed are used up.
    assert rest.seed != REQUEST.seed
    assert rest.seed == resumed(REQUEST, generation([1, 2], [0, 0])).seed
    assert rest.seed != resumed(REQUEST, generation([7], [1])).seed


@given(parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_join_to_the_answer_that_one_engine_would_have_given(parts: list[list[int]]) -> None:
    versions = [version for part in parts for version in part]
    whole: Generation | None = None
    for part in parts:
        whole = joined(3, whole, generation(range(len(part)), part))
    assert whole is not None
    assert whole.spans == generation(range(len(versions)), versions).spans
    assert len(whole.logprobs) == len(whole.tokens) == len(versions)
    assert whole.tokens.tolist() == [token for part in parts for token in range(len(part))]


def test_routes_are_those_of_the_engine_that_saw_a_token_first() -> None:
    def routes(tokens: int, expert: int) -> np.ndarray:
        return np.full((tokens, 2, 1), expert, np.uint8)

    first = generation([7, 8], [1, 1], routes=routes(3 + 2 - 1, 0))
    rest = generation([6, 9], [2, 2], "stop", routes=routes(3 + 2 + 2 - 1, 1))
    both = joined(3, first, rest)
    assert both.finish_reason == "stop"
    assert both.routes is not None
    assert both.routes[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 1]
    assert joined(3, first, aborted(None)).routes is first.routes
    assert joined(3, generation([7], [1]), rest).routes is None


def test_what_was_kept_may_be_all() -> None:
    assert ended(REQUEST, generation([7, 8], [0, 0])) is None
    stopped = ended(REQUEST, generation([7, 9], [0, 0], "abort"))
    assert stopped is not None
    assert stopped.finish_reason == "stop"
    full = ended(REQUEST, generation([7] * 6, [0] * 6, "abort"))
    assert full is not None
    assert full.finish_reason == "length"


def test_a_loss_is_told_from_a_fault() -> None:
    lost = as_lost("engine-1", EngineFailed("its thread ended"))
    assert str(lost) == "engine-1 is lost: its thread ended"
    assert as_lost("engine-1", EngineClosed("closed")) is not None
    own = EngineLost("engine-0", "gone")
    assert as_lost("engine-1", own) is own
    assert as_lost("engine-1", InvalidRequest("too long")) is None


def test_losses_travel_between_processes_with_what_they_know() -> None:
    lost = pickle.loads(pickle.dumps(EngineLost("engine-0", "gone", {"g/0": generation([7], [1])})))  # noqa: S301
    assert (lost.engine, lost.reason, str(lost)) == ("engine-0", "gone", "engine-0 is lost: gone")
    assert lost.partial["g/0"].tokens.tolist() == [7]
    none = pickle.loads(pickle.dumps(NoReplicaLeft({"engine-0": "gone"})))  # noqa: S301
    assert "no engine is left, and none is started again: engine-0: gone" in str(none)


def health(steps: int, *, tokens: int = 0, version: int = 0, running: int = 0) -> Health:
    return Health(True, version, running, 0, 8, steps, tokens, 0.0)


def test_an_engine_that_answers_and_does_not_get_on_is_told_from_one_that_works() -> None:
    watch = ProgressWatch()
    assert watch.idle_seconds(health(5), open_requests=2, now=0.0) == 0
    assert watch.idle_seconds(health(6), open_requests=2, now=1.0) == 0
    assert watch.idle_seconds(health(6), open_requests=2, now=4.0) == 3
    assert watch.idle_seconds(health(6), open_requests=0, now=9.0) == 0  # it has nothing to do
    assert watch.idle_seconds(health(6, running=1), open_requests=0, now=12.0) == 3
    assert watch.idle_seconds(health(6, version=1, running=1), open_requests=0, now=15.0) == 0  # a commit
    assert watch.idle_seconds(health(6, tokens=3, version=1), open_requests=1, now=18.0) == 0


def test_pauses_grow_and_restarts_are_used_up_unless_it_served_long() -> None:
    budget = RestartBudget(3)
    assert [budget.pause(1.0) for _ in range(4)] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, None]
    assert budget.pause(STEADY_SECONDS) == FIRST_PAUSE
    many = RestartBudget(100)
    assert max(pause for _ in range(100) if (pause := many.pause(1.0)) is not None) == LONGEST_PAUSE
    assert RestartBudget(0).pause(1e9) is None


def test_an_answer_given_up_keeps_what_there_is() -> None:
    assert aborted(generation([7], [1])).tokens.tolist() == [7]
    assert len(aborted(None).tokens) == 0
    assert aborted(None).finish_reason == "abort"
