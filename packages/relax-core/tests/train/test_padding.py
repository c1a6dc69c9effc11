"""A ragged micro-batch becomes a rectangle and back."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax.backends.train.base import Packed
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.errors import BatchError
from relax.backends.train.padding import check, pad

shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6).filter(
    lambda rows: any(response for _, response in rows)
)


@settings(deadline=None)  # a loaded machine is no finding
@given(shapes)
def test_each_response_token_is_predicted_one_place_before_it(lengths):
    rows = make_rows(50, lengths)
    padded = pad(pack(rows))
    width = max(prompt + response for prompt, response in lengths)
    assert padded.input_ids.shape == (len(rows), width)
    targets = []
    predictors = []
    for index, (row, (prompt, response)) in enumerate(zip(rows, lengths, strict=True)):
        assert padded.input_ids[index, : prompt + response].tolist() == row["tokens"].tolist()
        assert not padded.input_ids[index, prompt + response :].any()
        targets += row["tokens"][prompt:].tolist()
        predictors += [index * width + prompt - 1 + place for place in range(response)]
    assert padded.targets.tolist() == targets
    assert padded.predictors.tolist() == predictors


def packed(**changes) -> Packed:
    return dataclasses.replace(pack(make_rows(50, [(3, 2), (2, 4)])), **changes)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (packed(prompt_lengths=torch.tensor([0, 2])), "row 0 has 5 tokens of which 0 are prompt"),
        (packed(prompt_lengths=torch.tensor([3, 7])), "row 1 has 6 tokens of which 7 are prompt"),
        (packed(prompt_lengths=torch.tensor([5, 6]), fields={}), "none of the 2 rows has a response token"),
        (packed(prompt_lengths=torch.tensor([], dtype=torch.int64)), "no row"),
        (
            packed(offsets=torch.tensor([0, 5])),
            r"offsets has 2 entries from 0 to 5; 2 rows of 11 tokens need 3",
        ),
        (packed(offsets=torch.tensor([0, 5, 10])), r"from 0 to 10; 2 rows of 11 tokens"),
        (packed(tokens=torch.full((11,), 50)), "ids run from 50 to 50, but the model knows 0 to 49"),
        (packed(tokens=torch.full((11,), -1)), "ids run from -1 to -1"),
        (packed(fields={"advantages": torch.zeros(5)}), r"'advantages' has shape \(5,\).* 6 response tokens"),
        (packed(media=[[]]), "media lists 1 rows, the batch has 2"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(batch, message):
    with pytest.raises(BatchError, match=message):
        check(batch, vocabulary=50, context=12)


def test_a_row_longer_than_the_context_is_refused():
    with pytest.raises(BatchError, match=r"row 1 has 6 tokens .* context holds 5"):
        check(packed(), vocabulary=50, context=5)
