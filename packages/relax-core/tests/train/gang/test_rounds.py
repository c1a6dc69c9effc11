"""How a micro-batch is cut into equal rounds: whole rows, balanced, in order again, filled up by dummies."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax.algorithms.spec import LossInputs
from relax.backends.train.base import masked_out
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.errors import BatchError
from relax.backends.train.gang.flat import flatten, packed_of, unflatten
from relax.backends.train.gang.rounds import cut, in_row_order, select
from relax.backends.train.gang.verbs import shallow

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=12).filter(
    lambda lengths: any(response for _, response in lengths)
)


def of(lengths):
    return pack(make_rows(50, lengths))


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 60)), st.integers(1, 3), st.integers(1, 3)
)
def test_every_row_with_a_response_is_in_one_piece_and_every_replica_has_as_many(
    lengths, replicas, tokens, least, multiple
):
    batch = of(lengths)
    pieces = cut(batch, replicas, tokens=tokens, least=least, multiple=multiple)
    assert len(pieces) == replicas
    assert len({len(part) for part in pieces}) == 1
    assert len(pieces[0]) % multiple == 0
    answered = [row for row, (_, response) in enumerate(lengths) if response]
    assert sorted(row for part in pieces for piece in part for row in piece.rows) == answered
    for part in pieces:
        for piece in part:
            assert piece.batch.dummy == (not piece.rows)
            assert (piece.batch.response_offsets.diff() > 0).all()
            if piece.batch.dummy:
                assert piece.batch.rows == 1
                assert int(piece.batch.fields["loss_mask"].sum()) == 0
            elif tokens is not None and len(piece.rows) > 1:
                assert len(piece.batch.tokens) <= tokens


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 60)))
def test_results_come_back_in_row_order(lengths, replicas, tokens):
    batch = of(lengths)
    pieces = cut(batch, replicas, tokens=tokens)
    found = [[piece.batch.fields["rollout_logprobs"] for piece in part] for part in pieces]
    assert torch.equal(in_row_order(batch, pieces, found), batch.fields["rollout_logprobs"])


def test_parts_are_balanced_by_tokens_and_neighbours_stay_together():
    even = cut(of([(4, 4)] * 8), 2)
    assert [part[0].rows for part in even] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # Neighbours would give 60 and 12 tokens here.
    skewed = cut(of([(1, 29), (1, 5), (1, 5), (1, 29)]), 2)
    assert sorted(sum(len(piece.batch.tokens) for piece in part) for part in skewed) == [36, 36]


def test_a_dummy_has_a_gradient_of_exactly_0_and_no_count():
    dummy = cut(of([(3, 5)]), 2)[1][0].batch
    logprobs = torch.full((5,), float("inf")).requires_grad_()
    outputs = masked_out(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=dummy.fields["rollout_logprobs"],
            advantages=dummy.fields["advantages"],
            mask=dummy.fields["loss_mask"],
            offsets=dummy.response_offsets,
        )
    )
    outputs.loss.backward()
    assert (float(outputs.loss.detach()), outputs.count, outputs.metrics) == (0.0, 0.0, {})
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, torch.zeros(5))


def test_a_batch_that_contradicts_itself_is_refused_before_any_rank_sees_it():
    batch = of([(3, 5), (2, 2)])
    with pytest.raises(BatchError, match="offsets has 2 entries"):
        cut(dataclasses.replace(batch, offsets=batch.offsets[:-1]), 2)


def test_columns_of_tokens_and_pictures_go_with_their_rows():
    batch = of([(2, 2), (3, 3)])
    routes = torch.arange(10 * 2, dtype=torch.int16).view(10, 1, 2)
    pictures = [[{"kind": "image", "pixel_values": np.full((4, 3), row, np.float32)}] for row in range(2)]
    chosen = select(dataclasses.replace(batch, routes=routes, media=pictures), [1])
    assert chosen.routes is not None
    assert torch.equal(chosen.routes, routes[4:])
    assert chosen.media == [pictures[1]]


def test_what_is_sent_arrives_as_it_was_and_what_is_shown_twice_is_sent_once():
    picture = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    item = {"kind": "image", "pixel_values": picture, "size": np.int64(3)}
    batch = dataclasses.replace(
        of([(2, 2), (3, 3)]),
        media=[[item], [item]],
        fields={"half": torch.arange(5, dtype=torch.bfloat16), "empty": torch.zeros(0)},
    )
    header, buffer = flatten([shallow(batch)])
    assert picture.nbytes <= len(buffer) < 1.2 * picture.nbytes
    back = packed_of(unflatten(header, buffer)[0])
    assert torch.equal(back.tokens, batch.tokens)
    assert torch.equal(back.fields["half"], batch.fields["half"])
    assert back.fields["half"].dtype == torch.bfloat16
    assert back.fields["empty"].shape == (0,)
    assert back.media[1][0]["kind"] == "image"
    assert back.media[1][0]["size"] == 3
    assert (back.media[1][0]["pixel_values"] == picture).all()
