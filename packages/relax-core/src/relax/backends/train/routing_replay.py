"""Routing replay in a Hugging Face model: routers follow the routes of a micro-batch, and train on.

Routes are handed to the decoder with the micro-batch, as attention's arguments are, and each layer gives its
router its part when it is called. A layer that is computed again in the backward pass is called with the same
arguments, so it follows the same routes, whatever was forwarded in between. A call without routes (a
reference pass, a warm-up) routes freely.

Which experts a token goes to is given; what each of them counts is the router's own present score, so
gradients reach it as ever. There is no choice to be made then: following is cheaper than routing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from relax.backends.routes import UNROUTED, Routing, routing_of
from relax.backends.train.base import Packed
from relax.backends.train.errors import BatchError

_ROUTERS = frozenset({"Qwen3MoeTopKRouter", "Qwen3OmniMoeThinkerTextTopKRouter"})
"""Classes of transformers' routers that `_route` repeats."""


@dataclass(frozen=True)
class Followed:
    """The routes of a micro-batch, laid out as its tokens are.

    Attributes:
        experts: integers [routing layers, places, top_k].
        free: some place is without routes (all UNROUTED) and matters: its router chooses. Otherwise every
            place has experts; those that nothing depends on (padding, the last token of a row) any ones.
    """

    experts: Tensor
    free: bool


def follow_routes(model: PreTrainedModel) -> None:
    """Let the layers of a model take `routes`, a Followed or None, with every call of its decoder. Does
    nothing to a model whose routers are not known.

    To be called before anything else wraps the layers, such as recomputation.
    """
    layers = list(getattr(model.get_decoder(), "layers", ()))
    routers = [layer for layer in layers if type(_gate_of(layer)).__name__ in _ROUTERS]
    if not routers:
        return
    for layer in layers:
        gate = _gate_of(layer)
        if type(gate).__name__ not in _ROUTERS:
            layer.forward = partial(_without_routes, layer.forward)
            continue
        router: Any = gate
        router.followed = None
        gate.forward = partial(_route, gate, gate.forward)
        layer.forward = partial(_with_routes, layer.forward, gate, routers.index(layer))


def routing_led(model: PreTrainedModel) -> Routing | None:
    """How a model routes that `follow_routes` has prepared; None if it cannot follow routes."""
    layers = getattr(model.get_decoder(), "layers", ())
    routers = [layer for layer in layers if hasattr(_gate_of(layer), "followed")]
    routing = routing_of(model.config.to_dict())
    return routing if routing is not None and len(routers) == len(routing.layers) else None


def _gate_of(layer: Any) -> Any:
    return getattr(getattr(layer, "mlp", None), "gate", None)


def followed(batch: Packed, sources: Tensor | None, routing: Routing | None) -> Followed | None:
    """The routes of a micro-batch in the layout that its tokens are computed in; None if it has none.

    Args:
        batch: that `Admission.admit` gave.
        sources: int64 [places], which token of the batch stands at each place of the layout; padding may name
            any last token of a row. None: the tokens stand as in the batch.
        routing: of the model, from `routing_led`.

    Raises:
        BatchError: the model cannot follow any.
    """
    routes = batch.routes
    if routes is None:
        return None
    if routing is None:
        raise BatchError(
            "the batch has routes to replay, but this model has no routers that torch_native can lead (it "
            "can those of qwen3_moe and of Omni's thinker); set actor.routing_replay=false"
        )
    missing = routes[..., 0] == UNROUTED
    # What stands on the last token of a row changes no logprob: it has no route, and needs none.
    free = int(missing.sum()) > int(missing[batch.offsets[1:] - 1].sum())
    if not free:
        filler = torch.arange(routing.top_k, device=routes.device, dtype=routes.dtype)
        routes = torch.where(missing[..., None], filler, routes)
    if sources is not None:
        routes = routes.index_select(0, sources)
    return Followed(routes.transpose(0, 1), free)


def _with_routes(
    forward: Any, gate: nn.Module, place: int, *args: Any, routes: Followed | None = None, **kwargs: Any
) -> Any:
    holder: Any = gate
    holder.followed = None if routes is None else (routes.experts[place], routes.free)
    return forward(*args, **kwargs)


def _without_routes(forward: Any, *args: Any, routes: Followed | None = None, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _route(gate: Any, free_choice: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What those of _ROUTERS give: logits [tokens, experts], scores and experts [tokens, top_k]."""
    if gate.followed is None:
        return free_choice(hidden_states)
    given, free = gate.followed
    given = given.long()
    logits = linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight)
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if free:
        chosen = probabilities.detach().topk(gate.top_k, dim=-1).indices
        given = torch.where(given == UNROUTED, chosen, given)
    scores = probabilities.gather(1, given)
    if gate.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return logits, scores.to(logits.dtype), given
