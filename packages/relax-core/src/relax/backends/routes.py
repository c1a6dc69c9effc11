"""Routing replay (R3): what a route array is, in which type it travels, and when it is refused.

A mixture of experts sends every token, in every layer that routes, to `top_k` of its experts. Engine and
trainer compute the router's scores with other kernels, and where two experts are nearly level they choose
differently: logprobs of the same weights then differ far more than rounding explains. So the engine tells
what it chose, once, when it first saw a token, and the trainer follows ("Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", Ma et al., 2025, which names it R3).

    routes[i, j, :]   the experts of token i in routing layer j, best first; [tokens - 1, layers, top_k]

A sequence of n tokens has n - 1 routes: the last token was sampled and never fed. `layers` counts the layers
that route, by depth (`Routing.layers` says which decoder layers those are); dense layers have no place.

The type is the smallest that holds the model's expert numbers and `UNROUTED`, which stands in all `top_k`
places of a token in a layer that has no route. Unsigned bytes have no -1: there it is 255. A model with 256
experts still travels as bytes, because an expert never comes twice for one token: 255 in every place cannot
be a route. Only with 256 experts and a top_k of 1 it could, so those travel as int16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.uint8 | np.int16 | np.int32]

UNROUTED = -1
"""The mark of a token without a route in signed arrays, those of a trainer among them; see `unrouted`."""


class InvalidRoutes(ValueError):
    """Routes that cannot be those of this model and this sequence. The message says what, and where."""


@dataclass(frozen=True)
class Routing:
    """How a model routes.

    Attributes:
        experts: that a token can be sent to, shared ones (which every token visits) not counted.
        top_k: experts a token is sent to in each layer.
        layers: which decoder layers route, ascending, counted from 0 over the whole model.
    """

    experts: int
    top_k: int
    layers: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that routes travel in: uint8, int16 or int32."""
        if self.experts < 256 or (self.experts == 256 and self.top_k > 1):
            return np.dtype(np.uint8)
        return np.dtype(np.int16 if self.experts <= np.iinfo(np.int16).max else np.int32)

    @property
    def signed(self) -> np.dtype[Any]:
        """The type that holds UNROUTED as -1, which a trainer is given: int16 or int32."""
        return np.promote_types(self.dtype, np.int16) if self.dtype == np.uint8 else self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the routes of one token travel in."""
        return self.dtype.itemsize * len(self.layers) * self.top_k


def routing_of(config: Mapping[str, Any]) -> Routing | None:
    """How the model of a Hugging Face config.json routes; None if it is dense.

    Args:
        config: the file's content, of a model with several towers too: the language tower counts.
    """
    if "thinker_config" in config:
        config = config["thinker_config"]
    text = config.get("text_config") or config
    experts = next((text[key] for key in _EXPERTS if text.get(key)), None)
    top_k = text.get("num_experts_per_tok")
    if not experts or not top_k:
        return None
    every, dense = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or ())
    first = int(text.get("first_k_dense_replace") or 0)
    layers = tuple(
        layer
        for layer in range(first, int(text["num_hidden_layers"]))
        if layer not in dense and (layer + 1) % every == 0
    )
    return Routing(int(experts), int(top_k), layers) if layers else None


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def unrouted(dtype: np.dtype[Any]) -> int:
    """What stands for a missing route in an array of `dtype`: -1, or 255 in bytes."""
    return 255 if dtype == np.uint8 else UNROUTED


def without_route(routes: Routes) -> NDArray[np.bool_]:
    """bool [tokens, layers]: where a token has no route. UNROUTED fills all top_k places or none."""
    return (routes == unrouted(routes.dtype)).all(axis=-1)


def narrowed(experts: NDArray[np.integer[Any]], routing: Routing) -> Routes:
    """Expert numbers of any integer type, -1 where there is no route, in the type that routes travel in.

    Args:
        experts: [tokens, layers, top_k].
        routing: of the model; it decides the type.

    Raises:
        InvalidRoutes: a number below -1 or not below `routing.experts`, which the smaller type might turn
            into another expert's.
    """
    if experts.size and (int(experts.max()) >= routing.experts or int(experts.min()) < UNROUTED):
        _refuse_range(experts, (experts >= routing.experts) | (experts < UNROUTED), routing)
    return experts.astype(routing.dtype)  # -1 becomes 255 where the type is unsigned


def widened(routes: Routes, routing: Routing) -> Routes:
    """Routes as a trainer takes them: signed, -1 where there is no route."""
    if routes.dtype != np.uint8:
        return routes
    wide = routes.astype(routing.signed)
    if (routes == 255).any():
        wide[without_route(routes)] = UNROUTED
    return wide


def check(routes: object, routing: Routing, tokens: int) -> None:
    """See that routes are those of a sequence of `tokens` tokens, as far as one can see.

    Raises:
        InvalidRoutes: no array, or of another dtype or shape; an expert that the model does not have; one
            expert twice for one token in one layer; some but not all of a token's places without a route.
    """
    expected = (tokens - 1, len(routing.layers), routing.top_k)
    if not isinstance(routes, np.ndarray):
        raise InvalidRoutes(
            f"routes are {type(routes).__name__}; expected a numpy array of {routing.dtype} {list(expected)}"
        )
    if routes.dtype != routing.dtype:
        raise InvalidRoutes(
            f"routes are {routes.dtype}; {routing.experts} experts with top_k {routing.top_k} travel as "
            f"{routing.dtype}"
        )
    if routes.shape != expected:
        raise InvalidRoutes(
            f"routes have the shape {list(routes.shape)}; {tokens} tokens, {len(routing.layers)} routing "
            f"layers and top_k {routing.top_k} make {list(expected)}, as the last token is never fed"
        )
    check_experts(routes, routing)


def check_experts(routes: Routes, routing: Routing) -> None:
    """The part of `check` that looks at the numbers: of any count of tokens, several sequences' too.

    Raises:
        InvalidRoutes: see `check`.
    """
    if not routes.size:
        return
    mark = unrouted(routes.dtype)
    # One pass each over what is nearly always right: the exact place is looked for only when it is not.
    if int(routes.max()) >= routing.experts or (mark < 0 and int(routes.min()) < 0):
        wrong = (routes >= routing.experts) | (routes < 0)
        wrong &= ~without_route(routes)[..., None]
        if wrong.any():
            _refuse_range(routes, wrong, routing)
    if routing.top_k > 1:
        twice = _twice(routes)
        if twice.any():
            twice &= ~without_route(routes)
            if twice.any():
                token, layer = (int(found) for found in np.argwhere(twice)[0])
                raise InvalidRoutes(
                    f"token {token} goes to experts {routes[token, layer].tolist()} in layer "
                    f"{routing.layers[layer]}: an expert comes at most once"
                )


def _twice(routes: Routes) -> NDArray[np.bool_]:
    """bool [tokens, layers]: whether two of the top_k places hold the same number."""
    top_k = routes.shape[-1]
    if top_k == 2:
        return routes[..., 0] == routes[..., 1]
    ordered = np.sort(routes, axis=-1)
    return (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)


def _refuse_range(routes: NDArray[Any], wrong: NDArray[np.bool_], routing: Routing) -> None:
    token, layer, place = (int(found) for found in np.argwhere(wrong)[0])
    raise InvalidRoutes(
        f"token {token} goes to expert {int(routes[token, layer, place])} in layer {routing.layers[layer]}; "
        f"the model has experts 0 to {routing.experts - 1}"
    )
