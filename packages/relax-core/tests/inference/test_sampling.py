"""Drawing tokens: the generator against published outputs, the draw against the distribution it claims."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax.backends.inference.sampling import draw, mix64, uniforms


def columns(rows, temperature=1.0, top_p=1.0, top_k=0):
    return (
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k, np.int64),
    )


def test_uniforms_of_seed_zero_are_splitmix64s_published_outputs():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert mix64(np.zeros(1, np.uint64))[0] == 0
    found = uniforms(np.zeros(4, np.uint64), np.arange(4))
    assert found.tolist() == [(value >> 11) * 2.0**-53 for value in published]


def test_uniforms_are_uniform_over_seeds_and_positions_and_do_not_repeat():
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    found = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(found)) == found.size
    counts, _ = np.histogram(found, bins=100, range=(0, 1))
    assert (
        (counts - 900) ** 2 / 900
    ).sum() < 150  # chi-square with 99 degrees: 0.07% of generators pass this
    grid = found.reshape(seeds.shape)
    for axis in (0, 1):
        a, b = np.delete(grid, -1, axis).ravel(), np.delete(grid, 0, axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_a_uniform_is_in_the_unit_interval(seed, position):
    found = uniforms(np.array([seed], np.uint64), np.array([position]))[0]
    assert 0 <= found < 1


def test_draws_follow_the_temperature_scaled_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    rows = 40_000
    drawn = draw(
        logits.expand(rows, -1),
        uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)),
        *columns(rows, temperature=0.7),
    )
    expected = torch.softmax(logits.double() / 0.7, 0).numpy()
    shares = np.bincount(drawn.tokens, minlength=5) / rows
    assert np.abs(shares - expected).max() < 0.01
    assert np.abs(drawn.logprobs - np.log(expected)[drawn.tokens]).max() < 1e-6


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    u=st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
    temperature=st.sampled_from([0.0, 0.1, 0.8, 2.0]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    top_k=st.integers(0, 5),
)
def test_a_draw_is_possible_kept_and_has_the_full_distributions_logprob(logits, u, temperature, top_p, top_k):
    # One impossible token at each end: rounding at the edges of [0, 1) must not reach it.
    row = torch.tensor([-torch.inf, *logits, -torch.inf])
    drawn = draw(row[None], np.array([u]), *columns(1, temperature, top_p, top_k))
    token = int(drawn.tokens[0])
    full = torch.log_softmax(row.double() / (temperature or 1.0), 0)
    assert 1 <= token <= len(logits)
    assert abs(float(full[token]) - float(drawn.logprobs[0])) < 1e-4
    order = torch.sort(torch.softmax(row / (temperature or 1.0), 0), descending=True, stable=True)
    rank = order.indices.tolist().index(token)
    if temperature == 0:
        assert rank == 0
    if top_k:
        assert rank < top_k
    assert float(order.values[:rank].double().sum()) < top_p + 1e-6


def test_rows_are_drawn_independently_of_each_other():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(50, 103)).astype(np.float32))
    u = rng.random(50)
    temperature = rng.choice([0.0, 0.8, 1.2], 50).astype(np.float32)
    top_p = rng.choice([0.5, 1.0], 50).astype(np.float32)
    top_k = rng.choice([0, 7], 50)
    together = draw(logits, u, temperature, top_p, top_k)
    for row in range(50):
        one = slice(row, row + 1)
        alone = draw(logits[one], u[one], temperature[one], top_p[one], top_k[one])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inverse_of_the_distribution_splits_the_unit_interval_in_token_order(dtype):
    logits = torch.log(torch.tensor([0.25, 0.25, 0.5])).to(dtype).expand(4, -1)
    drawn = draw(logits, np.array([0.0, 0.24, 0.26, 0.99]), *columns(4))
    assert drawn.tokens.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_never_drawn_has_no_share_of_the_logprobs(temperature):
    logits = torch.tensor([3.0, 2.0, 1.0]).expand(500, -1)
    u = np.random.default_rng(0).random(500)
    drawn = draw(logits, u, *columns(500, temperature), never=(0,))
    expected = np.concatenate([[-np.inf], torch.log_softmax(logits[0, 1:].double(), 0).numpy()])
    assert set(drawn.tokens.tolist()) == ({1} if temperature == 0 else {1, 2})
    assert np.abs(drawn.logprobs - expected[drawn.tokens]).max() < 1e-6
