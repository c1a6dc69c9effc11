import numpy as np
import pytest
from agentic import Encoded, Generation, GenerationRequest, InvalidValue, Sampling


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_generation_holds_its_arrays_without_a_copy():
    tokens = ids(5, 6, 7)
    generation = Generation(tokens, logprobs(-1, -2, -3), [(3, 0, 1), (4, 1, 3)], "stop")
    assert generation.tokens is tokens


def test_only_an_abort_may_be_empty():
    empty = Generation(ids(), logprobs(), [], "abort")
    assert len(empty.tokens) == 0
    with pytest.raises(InvalidValue, match="no tokens but finish_reason 'stop'"):
        Generation(ids(), logprobs(), [], "stop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1, 2], logprobs(-1, -2), [(0, 0, 2)], "stop"),
            "found list; expected a one-dimensional numpy array",
        ),
        ((np.array([1, 2]), logprobs(-1, -2), [(0, 0, 2)], "stop"), "int64"),
        ((ids(1, 2), np.array([-1.0, -2.0]), [(0, 0, 2)], "stop"), "float64"),
        ((ids(1, 2).reshape(1, 2), logprobs(-1, -2), [(0, 0, 2)], "stop"), r"shape \(1, 2\)"),
        ((ids(1, 2), logprobs(-1), [(0, 0, 2)], "stop"), "2 tokens and 1 logprobs"),
        ((ids(1, 2), logprobs(-1, -np.inf), [(0, 0, 2)], "stop"), "logprob 1 of a generation is -inf"),
        ((ids(1, 2), logprobs(np.nan, -1), [(0, 0, 2)], "stop"), "logprob 0 of a generation is nan"),
        ((ids(1, 2), logprobs(-1, -2), [(0, 0, 2)], "eos"), "finish_reason is 'eos'"),
        ((ids(1, 2), logprobs(-1, -2), [], "stop"), "spans end at 0; expected 2"),
        ((ids(1, 2), logprobs(-1, -2), [(0, 0, 1)], "stop"), "spans end at 1; expected 2"),
        ((ids(1, 2), logprobs(-1, -2), [(0, 0, 3)], "stop"), "spans end at 3; expected 2"),
        ((ids(1, 2), logprobs(-1, -2), [(0, 0, 1), (1, 0, 2)], "stop"), r"\(1, 0, 2\) comes at position 1"),
        ((ids(1, 2), logprobs(-1, -2), [(0, 0, 0), (1, 0, 2)], "stop"), r"\(0, 0, 0\) comes at position 0"),
        ((ids(1, 2), logprobs(-1, -2), [(-1, 0, 2)], "stop"), "version >= 0"),
    ],
)
def test_a_malformed_generation_is_refused_with_the_value(arguments, message):
    with pytest.raises(InvalidValue, match=message):
        Generation(*arguments)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_routes_are_held_in_the_integer_type_they_come_in(dtype):
    routes = np.zeros((4, 2, 3), dtype)
    generation = Generation(ids(5, 6), logprobs(-1, -2), [(0, 0, 2)], "length", routes)
    assert generation.routes is routes
    assert Generation(ids(5), logprobs(-1), [(0, 0, 1)], "length").routes is None


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[1]]], "found list"),
        (np.zeros((4, 2, 3), np.int64), "int64"),
        (np.zeros((4, 6), np.uint8), r"shape \(4, 6\)"),
    ],
)
def test_routes_of_another_kind_are_refused(routes, message):
    with pytest.raises(InvalidValue, match=message):
        Generation(ids(5, 6), logprobs(-1, -2), [(0, 0, 2)], "length", routes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", ids(1), Sampling(), 0), "id of a generation request is empty"),
        (("a", ids(), Sampling(), 0), "request 'a' has no tokens"),
        (("a", np.array([1]), Sampling(), 0), "int64"),
        (("a", ids(1), Sampling(), -1), "the seed is -1"),
        (("a", ids(1), Sampling(), 2**64), "the seed is 18446744073709551616"),
    ],
)
def test_a_malformed_request_is_refused(arguments, message):
    with pytest.raises(InvalidValue, match=message):
        GenerationRequest(*arguments)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"stop_token_ids": (-1,)},
    ],
)
def test_sampling_out_of_range_is_refused_by_name(values):
    with pytest.raises(InvalidValue, match=next(iter(values))):
        Sampling(**values)


def test_encoded_tokens_must_be_int32():
    with pytest.raises(InvalidValue, match="int64"):
        Encoded(np.array([1, 2]))


def test_media_lists_are_not_shared_between_requests():
    first, second = (GenerationRequest(name, ids(1), Sampling(), 0) for name in "ab")
    first.media.append("image")
    assert second.media == []
