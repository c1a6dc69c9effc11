"""What a route array is: its type, its marks, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax.backends.routes import (
    InvalidRoutes,
    Routing,
    check,
    narrowed,
    routing_of,
    unrouted,
    widened,
    without_route,
)


def _routing(experts: int, top_k: int = 2, layers: tuple[int, ...] = (0, 1)) -> Routing:
    return Routing(experts, top_k, layers)


def _routes(routing: Routing, tokens: int, seed: int = 0) -> np.ndarray:
    first = np.random.default_rng(seed).integers(0, routing.experts, (tokens - 1, len(routing.layers), 1))
    return ((first + np.arange(routing.top_k)) % routing.experts).astype(routing.dtype)


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"),
    [
        (8, 2, np.uint8),
        (128, 8, np.uint8),
        (255, 1, np.uint8),
        (256, 8, np.uint8),
        (256, 1, np.int16),
        (257, 2, np.int16),
        (32767, 2, np.int16),
        (32768, 2, np.int32),
    ],
)
def test_routes_travel_in_the_smallest_type_that_also_holds_a_mark(experts, top_k, dtype):
    routing = _routing(experts, top_k)

    assert routing.dtype == dtype
    assert routing.bytes_per_token == np.dtype(dtype).itemsize * 2 * top_k
    assert np.iinfo(routing.signed).max >= experts - 1
    assert np.iinfo(routing.signed).min < 0


@given(st.sampled_from([2, 8, 200, 255, 256, 300, 40_000]), st.integers(1, 3), st.integers(1, 6), st.data())
def test_narrow_and_wide_routes_hold_the_same_numbers_and_marks(experts, top_k, tokens, data):
    routing = _routing(experts, min(top_k, experts))
    wide = _routes(_routing(experts, routing.top_k), tokens + 1).astype(np.int64)
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=2 * tokens, max_size=2 * tokens)))
    wide[gone.reshape(tokens, 2)] = -1

    narrow = narrowed(wide, routing)

    assert narrow.dtype == routing.dtype
    check(narrow, routing, tokens + 1)
    assert np.array_equal(without_route(narrow), gone.reshape(tokens, 2))
    assert widened(narrow, routing).dtype == routing.signed
    assert np.array_equal(widened(narrow, routing), wide)


def test_a_model_of_256_experts_may_route_to_expert_255():
    routing = _routing(256)
    routes = np.array([[[255, 3], [3, 255]]], np.uint8)

    check(routes, routing, 2)

    assert not without_route(routes).any()
    assert widened(routes, routing).tolist() == [[[255, 3], [3, 255]]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: None, "routes are NoneType"),
        (lambda r: r.astype(np.int32), "routes are int32; 8 experts"),
        (lambda r: r[:-1], r"shape \[3, 2, 2\]; 5 tokens"),
        (lambda r: np.concatenate([r, r[:1]]), r"shape \[5, 2, 2\]; 5 tokens"),
        (lambda r: r[:, :1], r"shape \[4, 1, 2\]"),
        (lambda r: r[..., :1], r"shape \[4, 2, 1\]"),
        (
            lambda r: _with(r, (2, 1, 0), 8),
            "token 2 goes to expert 8 in layer 1; the model has experts 0 to 7",
        ),
        (lambda r: _with(r, (2, 1, 0), 255), "token 2 goes to expert 255 in layer 1"),
        (lambda r: _with(r, (3, 0), 5), r"token 3 goes to experts \[5, 5\] in layer 0"),
    ],
)
def test_routes_of_another_length_type_or_model_are_refused(spoil, message):
    routing = _routing(8)

    with pytest.raises(InvalidRoutes, match=message):
        check(spoil(_routes(routing, 5)), routing, 5)


@pytest.mark.parametrize("top_k", [3, 4])
def test_an_expert_twice_anywhere_among_many_is_refused(top_k):
    routing = _routing(300, top_k)
    routes = _routes(routing, 4)
    routes[1, 1, top_k - 1] = routes[1, 1, 0]  # not neighbours, so that an order is needed to see it

    with pytest.raises(InvalidRoutes, match=r"token 1 goes to experts .* an expert comes at most once"):
        check(routes, routing, 4)


def test_a_signed_number_below_the_mark_is_refused():
    routing = _routing(300)

    with pytest.raises(InvalidRoutes, match="token 0 goes to expert -7"):
        check(_with(_routes(routing, 3), (0, 0), (-7, -7)), routing, 3)
    with pytest.raises(InvalidRoutes, match="token 1 goes to expert -1 in layer 1"):
        check(_with(_routes(routing, 3), (1, 1, 0), -1), routing, 3)


def test_a_number_that_the_small_type_cannot_hold_is_refused_and_not_wrapped():
    with pytest.raises(InvalidRoutes, match="token 0 goes to expert 257"):
        narrowed(np.full((1, 2, 2), 257), _routing(8))


def test_a_mark_fills_all_places_of_a_token():
    assert unrouted(np.dtype(np.uint8)) == 255
    assert unrouted(np.dtype(np.int16)) == -1
    assert without_route(np.array([[[255, 255], [255, 1]]], np.uint8)).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 2, "hidden_size": 8}, None),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3},
            Routing(8, 2, (0, 1, 2)),
        ),
        (
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 6,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
            },
            Routing(8, 2, (1, 5)),
        ),
        (
            {
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 4,
                "first_k_dense_replace": 3,
            },
            Routing(256, 8, (3,)),
        ),
        (
            {
                "thinker_config": {
                    "text_config": {"num_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 1}
                }
            },
            Routing(4, 1, (0,)),
        ),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}, Routing(8, 2, (0,))),
        (
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 1,
                "mlp_only_layers": [0],
            },
            None,
        ),
    ],
)
def test_a_config_says_which_layers_route(config, expected):
    assert routing_of(config) == expected


def _with(routes: np.ndarray, where: tuple[int, ...], value: object) -> np.ndarray:
    routes = routes.copy()
    routes[where] = value
    return routes
