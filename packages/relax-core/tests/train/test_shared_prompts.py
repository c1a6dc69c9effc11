"""Members of a group share the computation of their prompt; results are those of plain rows."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.padding import pad
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.shared_prompts import fold
from relax.backends.train.torch_native import TorchNative
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

VOCABULARY = 102
GROUPS = {
    "one group": [(9, [3, 7, 1, 5])],
    "different prompts": [(5, [4, 2, 6]), (9, [3, 8]), (1, [5, 5, 5])],
    "single members": [(12, [3, 4, 2, 6, 1]), (4, [5]), (2, [9])],
    "a member says nothing": [(6, [0, 4, 3, 0]), (7, [2, 2])],
    "ragged without a shared prompt": [(3, [2]), (10, [14]), (1, [1])],
}


def grouped(groups, seed=0):
    """Rows of (prompt length, response lengths) groups, the members of a group under one prompt."""
    random = np.random.default_rng(seed)
    rows = make_rows(VOCABULARY, [(prompt, n) for prompt, members in groups for n in members], seed)
    index = 0
    for prompt, members in groups:
        tokens = random.integers(0, VOCABULARY, prompt)
        for _ in members:
            rows[index]["tokens"][:prompt] = tokens
            index += 1
    return rows


def results(trainer, rows):
    trainer.model.zero_grad()
    logprobs = trainer.forward(pack(rows))
    trainer.forward_backward(pack(rows), policy_gradient)
    return logprobs, torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.fixture(scope="module")
def trainer(text_folder):
    """In float64 throughout: transformers' norms would round a sum over members to float32."""
    trainer = TorchNative(
        text_folder, settings=TrainerSettings(lr=1e-3, temperature=0.8), dtype=torch.float64
    )
    for module in trainer.model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = partial(_norm, module)
    return trainer


def _norm(module, hidden_states):
    return torch.nn.functional.rms_norm(
        hidden_states, hidden_states.shape[-1:], module.weight, module.variance_epsilon
    )


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_logprobs_and_gradients_are_those_of_plain_rows(trainer, groups, monkeypatch):
    rows = grouped(groups)
    # Members of a group need not be neighbours.
    rows = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    assert fold(pack(rows)) is not None
    logprobs, gradient = results(trainer, rows)
    monkeypatch.setattr("relax.backends.train.shared_prompts.fold", lambda batch: None)
    plain_logprobs, plain_gradient = results(trainer, rows)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=0, atol=1e-6)
    assert float((gradient - plain_gradient).abs().max() / plain_gradient.abs().max()) < 1e-10


def test_a_member_does_not_see_the_responses_of_the_others(trainer):
    rows = grouped([(6, [4, 5, 3])])
    changed = [row | {"tokens": row["tokens"].copy()} for row in rows]
    for row in changed[1:]:
        row["tokens"][6:] = (row["tokens"][6:] + 1) % VOCABULARY
    before, after = (trainer.forward(pack(some)) for some in (rows, changed))
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).all()


def test_the_same_micro_batch_gives_the_same_bits(text_folder):
    rows = grouped(GROUPS["different prompts"])
    first, second = (TorchNative(text_folder, settings=TrainerSettings(lr=1e-3)) for _ in range(2))
    results(first, grouped(GROUPS["one group"]))
    for ours, theirs in zip(results(first, rows), results(second, rows), strict=True):
        assert torch.equal(ours, theirs)


groups = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=4
).filter(lambda groups: any(any(members) for _, members in groups))


@settings(deadline=None)  # a loaded machine is no finding
@given(groups)
def test_every_row_is_found_in_the_folded_sequence(groups):
    rows = grouped(groups)
    batch = pack(rows)
    folded, padded = fold(batch), pad(batch)
    prompts = {tuple(row["tokens"][: int(row["prompt_length"])]) for row in rows}
    size = sum(map(len, prompts)) + sum(sum(members) for _, members in groups)
    if folded is None:
        assert size > 0.95 * padded.input_ids.numel()
        return
    sequence, positions = folded.input_ids[0], folded.position_ids[0]
    assert len(sequence) == size
    assert torch.equal(folded.targets, padded.targets)
    assert torch.equal(folded.cells.flatten()[padded.predictors], folded.predictors)
    for row, cells in zip(rows, folded.cells, strict=True):
        cells = cells[: len(row["tokens"])]
        assert sequence[cells].tolist() == row["tokens"].tolist()
        assert positions[cells].tolist() == list(range(len(cells)))
    assert torch.equal(folded.cells.flatten()[folded.homes], torch.arange(size))


def test_rows_with_nothing_to_share_stay_as_they_are():
    assert fold(pack(make_rows(VOCABULARY, [(6, 4)] * 5))) is None
