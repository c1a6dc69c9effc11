"""Requests and answers of SGLang, held against what a real server of it (0.5.23, on CPUs) took and said."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from agentic import GenerationRequest, Sampling
from relax.backends.inference.sglang.answers import (
    Answer,
    BadAnswer,
    Captured,
    Finish,
    Meta,
    Piece,
    WeightSpan,
    read_routes,
)
from relax.backends.inference.sglang.requests import body, sampling, signed
from relax.backends.routes import Routing, check

RECORDED = json.loads((Path(__file__).parent / "data" / "sglang_0.5.23.json").read_text())
CAPTURED = Captured(Routing(experts=8, top_k=2, layers=(0, 1)), depth=2)


def asked(case: str) -> list[Answer]:
    """The answers of a recorded call, begun; their requests are read from what was sent."""
    sent = RECORDED[case]["body"]
    found = []
    for rid, tokens, how in zip(sent["rid"], sent["input_ids"], sent["sampling_params"], strict=True):
        settings = Sampling(
            temperature=how["temperature"],
            max_new_tokens=how["max_new_tokens"],
            stop_token_ids=tuple(how.get("stop_token_ids", ())),
        )
        request = GenerationRequest(rid.split(".")[2], np.array(tokens, np.int32), settings, 2**63 + 5)
        answer = Answer(request, how["max_new_tokens"], CAPTURED)
        answer.begin(rid, 7)
        found.append(answer)
    return found


def pieces(case: str) -> list[Piece]:
    lines = [line.removeprefix("data: ") for line in RECORDED[case]["stream"]]
    assert lines[-1] == "[DONE]"
    return [msgspec.json.decode(line, type=Piece) for line in lines[:-1]]


def played(case: str) -> list[Answer]:
    answers = asked(case)
    for piece in pieces(case):
        assert piece.meta_info is not None
        answers[piece.index].take(piece.meta_info)
    return answers


def meta(entries: list[Any], total: int, **more: Any) -> Meta:
    return Meta(output_token_logprobs=entries, output_token_logprobs_length=total, **more)


@pytest.mark.parametrize("case", ["length", "stop", "abort", "versions"])
def test_what_is_sent_is_what_the_server_took(case):
    assert json.loads(json.dumps(body(asked(case), 7))) == RECORDED[case]["body"]


@pytest.mark.parametrize(("case", "reason"), [("length", "length"), ("stop", "stop"), ("abort", "abort")])
def test_a_stream_comes_to_one_generation_with_its_routes(case, reason):
    said = [json.loads(line[6:]) for line in RECORDED[case]["stream"][:-1]]
    for index, answer in enumerate(played(case)):
        mine = [message for message in said if message.get("index") == index]
        generation = answer.generation(reason)
        assert generation.tokens.tolist() == [token for message in mine for token in message["output_ids"]]
        assert len(generation.tokens) == mine[-1]["meta_info"]["completion_tokens"]
        assert generation.spans == [(7, 0, len(generation.tokens))]
        assert mine[-1]["meta_info"]["finish_reason"]["type"] == reason
        assert (generation.logprobs < 0).all()
        check(generation.routes, CAPTURED.routing, len(answer.request.tokens) + len(generation.tokens))


def test_a_generation_over_an_update_has_a_span_for_each_version():
    (answer,) = played("versions")
    first, second = answer.generation("length").spans
    assert (first[:2], second[0], second[2]) == ((7, 0), 8, 200)
    assert first[2] == second[1]


def test_a_refusal_in_a_stream_is_read():
    (fault,) = pieces("too long")
    assert fault.error is not None
    assert (fault.error.code, "264 tokens" in fault.error.message) == (400, True)


def test_pieces_that_repeat_all_come_to_the_same_as_those_that_add():
    increments, repeats = asked("length")[0], asked("length")[0]
    so_far: list[Any] = []
    for piece in pieces("length"):
        if piece.index == 0 and piece.meta_info is not None:
            so_far += piece.meta_info.output_token_logprobs
            increments.take(piece.meta_info)
            repeats.take(msgspec.structs.replace(piece.meta_info, output_token_logprobs=list(so_far)))
    assert repeats.tokens == increments.tokens
    assert repeats.generation("length").spans == increments.generation("length").spans


def test_an_answer_that_is_asked_again_appends_tokens_spans_and_routes():
    (answer,) = played("abort")
    kept, routed = len(answer.tokens), answer.routed
    assert routed == 3 + kept - 1
    answer.hold(interrupted=True)
    answer.begin("again", 9)
    sent = body([answer], 9)
    assert sent["input_ids"] == [[10, 11, 12, *answer.tokens]]
    assert sent["routed_experts_start_len"] == routed
    assert sent["sampling_params"][0]["max_new_tokens"] == 240 - kept
    new = base64.b64encode(np.array([[[0, 1], [2, 3]]] * 2, "<i4").tobytes()).decode()
    entries = [(-0.5, 4, None), (-0.25, 5, None)]
    answer.take(
        meta(
            entries,
            2,
            finish_reason=Finish("length"),
            weight_versions=[WeightSpan("9", 0, 2)],
            routed_experts=new,
        )
    )
    whole = answer.generation("length")
    assert whole.spans == [(7, 0, kept), (9, kept, kept + 2)]
    assert whole.tokens[-2:].tolist() == [4, 5]
    check(whole.routes, CAPTURED.routing, 3 + kept + 2)
    assert whole.routes is not None
    assert whole.routes[-1].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("entries", "total", "message"),
    [
        ([(-1.0, 5, None)], 3, "speaks of tokens 2 to 3 of its answer, and 0 have come"),
        ([(None, 5, None)], 1, "token 5 was sampled with the logprob None"),
        ([(-1.0, 5, None), (-1.0, 5, None)], 1, "speaks of tokens -1 to 1"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(entries, total, message):
    with pytest.raises(BadAnswer, match=message):
        asked("stop")[0].take(meta(entries, total))


def test_weights_that_somebody_else_put_in_are_no_version_of_the_run():
    answer = asked("stop")[0]
    last = pieces("stop")[-1].meta_info
    assert last is not None
    renamed = [msgspec.structs.replace(span, version="default") for span in last.weight_versions or []]
    odd = msgspec.structs.replace(
        last, weight_versions=renamed, output_token_logprobs=[(-1.0, 5, None)], output_token_logprobs_length=1
    )
    with pytest.raises(BadAnswer, match="'default', which no version of this run is called"):
        answer.take(odd)


def test_what_a_lost_server_has_told_is_kept_as_far_as_its_version_is_sure():
    request = GenerationRequest("r", np.array([1, 2], np.int32), Sampling(max_new_tokens=9), 0)
    answer = Answer(request, 9)
    assert answer.partial() is None
    answer.begin("rid", 4)
    answer.take(meta([(-1.0, 5, None), (-2.0, 6, None)], 2))
    kept = answer.partial()
    assert kept is not None
    assert (kept.tokens.tolist(), kept.spans, kept.finish_reason) == ([5, 6], [(4, 0, 2)], "abort")
    answer.hold(interrupted=False)  # a version is put in
    answer.take(meta([(-3.0, 7, None)], 3))
    assert (again := answer.partial()) is not None
    assert again.tokens.tolist() == [5, 6]


def test_with_routes_only_what_came_with_them_is_kept():
    (answer,) = played("abort")
    kept = len(answer.tokens)
    answer.begin("again", 8)
    answer.take(meta([(-1.0, 5, None)], 1))
    partial = answer.partial()
    assert partial is not None
    assert len(partial.tokens) == kept
    check(partial.routes, CAPTURED.routing, 3 + kept)


@pytest.mark.parametrize("encoded", [None, "!", "AAAA", base64.b64encode(b"\0" * 12).decode()])
def test_routes_that_cannot_be_read_leave_no_rows_for_the_check_of_samples(encoded):
    answer = asked("stop")[0]
    for piece in pieces("stop"):
        assert piece.meta_info is not None
        answer.take(msgspec.structs.replace(piece.meta_info, routed_experts=encoded))
    routes = answer.generation("stop").routes
    assert routes is not None
    assert routes.shape == (0, 2, 2)


def test_only_layers_that_route_are_kept_and_odd_numbers_stay_to_be_refused():
    captured = Captured(Routing(experts=300, top_k=1, layers=(1, 3)), depth=4)
    told = np.arange(8, dtype="<i4").reshape(2, 4, 1)
    routes = read_routes(base64.b64encode(told.tobytes()).decode(), captured)
    assert routes is not None
    assert (routes.dtype, routes[..., 0].tolist()) == (np.int16, [[1, 3], [5, 7]])
    told[0, 1, 0] = 70_000
    odd = read_routes(base64.b64encode(told.tobytes()).decode(), captured)
    assert odd is not None
    assert (odd.dtype, int(odd[0, 0, 0])) == (np.int32, 70_000)


def test_sampling_is_said_as_the_server_understands_it():
    free = sampling(Sampling(temperature=0.5, top_k=0, top_p=0.9), 7, 3, never=(5,))
    assert (free["top_k"], free["top_p"], free["ignore_eos"], free["max_new_tokens"]) == (-1, 0.9, True, 7)
    assert free["logit_bias"] == {"5": -1e9}
    stopped = sampling(Sampling(stop_token_ids=(3, 4), top_k=5), 7, 3)
    assert (stopped["stop_token_ids"], stopped["top_k"], "ignore_eos" in stopped) == ([3, 4], 5, False)
    assert [signed(seed) for seed in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
