"""Routes of a transcript: those of the first time, appended turn by turn."""

import numpy as np
import pytest
from agentic import Encoded, Generation, InvalidValue, Transcript, TranscriptBuilder


def _generation(count: int, routes: np.ndarray | None) -> Generation:
    return Generation(
        tokens=np.arange(count, dtype=np.int32),
        logprobs=np.zeros(count, np.float32),
        spans=[(0, 0, count)] if count else [],
        finish_reason="stop" if count else "abort",
        routes=routes,
    )


def _routes(tokens: int, value: int, dtype: type = np.uint8) -> np.ndarray:
    return np.full((tokens, 2, 3), value, dtype)


def _builder(prompt: int = 4) -> TranscriptBuilder:
    return TranscriptBuilder(Encoded(np.arange(prompt, dtype=np.int32)))


def test_a_further_turn_appends_the_routes_of_what_is_new():
    builder = _builder(4)
    builder.append_generation(_generation(3, _routes(6, 1)))
    builder.append_observation(Encoded(np.arange(5, dtype=np.int32)))
    # The engine saw all again, under other weights: the first 6 tokens went elsewhere now.
    builder.append_generation(_generation(2, _routes(13, 2)))

    found = builder.close().routes

    assert found is not None
    assert found.shape == (13, 2, 3)
    assert (found[:6] == 1).all()
    assert (found[6:] == 2).all()
    assert not found.flags.writeable


def test_the_last_token_of_a_turn_gets_its_route_in_the_next():
    builder = _builder(2)
    builder.append_generation(_generation(1, _routes(2, 1)))
    assert _length(builder.snapshot().routes) == 2
    builder.append_observation(Encoded(np.arange(1, dtype=np.int32)))
    builder.append_generation(_generation(1, _routes(4, 2)))

    found = builder.close().routes
    assert found is not None
    assert found[:, 0, 0].tolist() == [1, 1, 2, 2]


def test_a_last_turn_that_stayed_empty_leaves_the_observation_without_routes():
    builder = _builder(4)
    builder.append_generation(_generation(3, _routes(6, 1)))
    builder.append_observation(Encoded(np.arange(5, dtype=np.int32)))
    builder.append_generation(_generation(0, None))

    transcript = builder.close()

    assert len(transcript.tokens) == 12
    assert _length(transcript.routes) == 6


def test_an_engine_that_rewrites_its_buffer_changes_no_transcript():
    buffer = _routes(6, 1)
    builder = _builder(4)
    builder.append_generation(_generation(3, buffer))
    buffer[:] = 9

    assert (builder.close().routes == 1).all()


def test_a_turn_without_routes_ends_them_for_good():
    builder = _builder(4)
    builder.append_generation(_generation(3, _routes(6, 1)))
    builder.append_generation(_generation(1, None))
    builder.append_generation(_generation(1, _routes(8, 3)))

    assert _length(builder.close().routes) == 6


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (_routes(7, 1), "transcript of 7 tokens has 7 routes; expected 6"),
        (_routes(2, 1), "transcript of 7 tokens has 2 routes; expected 6"),
    ],
)
def test_routes_of_another_number_of_tokens_are_refused(routes, message):
    with pytest.raises(InvalidValue, match=message):
        _builder(4).append_generation(_generation(3, routes))


def test_a_turn_with_routes_of_another_kind_is_refused():
    builder = _builder(4)
    builder.append_generation(_generation(3, _routes(6, 1)))

    with pytest.raises(InvalidValue, match=r"int16 \[2, 3\] a token, those before it uint8 \[2, 3\]"):
        builder.append_generation(_generation(1, _routes(7, 1, np.int16)))


def test_a_transcript_has_fewer_routes_than_tokens():
    fields = {
        "tokens": np.arange(3, dtype=np.int32),
        "prompt_length": 2,
        "loss_mask": np.ones(1, np.uint8),
        "logprobs": np.zeros(1, np.float32),
        "versions": np.array([[0, 0, 1]], np.int32),
    }
    with pytest.raises(InvalidValue, match="3 tokens has 3 routes; expected at most 2"):
        Transcript(**fields, routes=_routes(3, 1))
    with pytest.raises(InvalidValue, match="routes of a transcript: found a numpy array of float64"):
        Transcript(**fields, routes=np.zeros((2, 1, 1)))


def _length(routes: np.ndarray | None) -> int:
    assert routes is not None
    return len(routes)
