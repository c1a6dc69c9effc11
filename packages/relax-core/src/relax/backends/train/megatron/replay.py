"""Routing replay: a mixture of experts sends each token to the experts that the engine chose for it.

Routes are keyed by micro-batch and global layer. Megatron asks a router's `RouterReplay` for the chosen
experts in every forward, and again in a backward that recomputes; ours also lets tokens without a route
choose for themselves. Probabilities are gathered from live scores, so the router trains.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from relax.backends.routes import Routing
from relax.backends.train.errors import BatchError, StepOrderError

Choice = Callable[..., tuple[Tensor, Tensor]]


class LayerRoutes(RouterReplay):
    """The routes of one layer, for the forwards and the recomputing backwards of a schedule."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.recomputing = False
        self._now: Tensor | None = None
        self._for_backward: deque[Tensor | None] = deque()

    def begin(self, routes: Tensor | None) -> None:
        """A forward comes, with int64 [own tokens, k] (-1: no route) or without routes."""
        self.recomputing = False
        self._now = routes

    def end(self, keep: bool) -> None:
        """The forward is over: what asks from now on is a backward, of the oldest forward not yet done."""
        self.recomputing = True
        if keep:
            self._for_backward.append(self._now)
        self._now = None

    def clear(self) -> None:
        self._for_backward.clear()
        self._now = None
        self.recomputing = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choice | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts [own tokens, k] that a token is sent to; see RouterReplay."""
        if default_compute_topk is None:
            raise StepOrderError("a router asked for its experts without a way to choose them")
        routes = self._for_backward.popleft() if self.recomputing else self._now
        live_scores, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routes is None:
            self.record_indices(live)
            return live_scores, live
        if routes.shape != live.shape:
            raise BatchError(
                f"routes of layer {self.layer} are {list(routes.shape)}, the router has {list(live.shape)} "
                "(tokens of this rank, experts a token)"
            )
        chosen = torch.where(routes >= 0, routes, live)
        self.record_indices(chosen)
        return scores.gather(1, chosen), chosen


class Replay:
    """The routers of this rank's model chunks. Megatron lists them for the process: one model at a time."""

    def __init__(self, chunks: Iterable[GPTModel], routing: Routing, keep: bool) -> None:
        """Take over the routers of `chunks`; `keep` routes for backwards that recompute them."""
        RouterReplay.clear_global_router_replay_instances()
        self._keep = keep
        self._routing = routing
        self._routers: list[list[LayerRoutes]] = []
        for chunk in chunks:
            found = []
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    # Megatron counts layers over all stages, from 1.
                    module.router_replay = LayerRoutes(int(module.layer_number or 1) - 1)
                    found.append(module.router_replay)
            self._routers.append(found)

    def begin(self, chunk: int, routes: Tensor | None, tokens: Tensor) -> None:
        """A forward of a chunk comes.

        Args:
            chunk: which of this rank's.
            routes: the micro-batch's integers [total tokens, layers that route, k], or None.
            tokens: int64 [own tokens], which token of the batch each is; -1 for padding.
        """
        for router in self._routers[chunk]:
            if routes is None:
                router.begin(None)
                continue
            own = routes[:, self._routing.layers.index(router.layer)].to(torch.int64)[tokens.clamp(min=0)]
            router.begin(own.masked_fill((tokens < 0)[:, None], -1))

    def end(self, chunk: int) -> None:
        for router in self._routers[chunk]:
            router.end(self._keep and torch.is_grad_enabled())

    def clear(self) -> None:
        """A schedule is over, or was given up."""
        for routers in self._routers:
            for router in routers:
                router.clear()

    def recorded(self) -> dict[int, Tensor]:
        """int64 [own tokens, k] that each of this rank's layers used last, by global layer."""
        return {
            router.layer: router.recorded_topk_idx
            for routers in self._routers
            for router in routers
            if router.recorded_topk_idx is not None
        }

    def close(self) -> None:
        self.clear()
        RouterReplay.clear_global_router_replay_instances()


def own_tokens(tokens: Tensor, sequence_parallel: bool) -> Tensor:
    """Which token of the batch this rank's router sees at each place, of those of its context rank."""
    if not sequence_parallel:
        return tokens
    size = parallel_state.get_tensor_model_parallel_world_size()
    return tokens.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


def require_valid(routes: Tensor, tokens: int, routing: Routing) -> None:
    """Check a micro-batch's routes before any rank starts on it.

    Args:
        routes: signed integers [tokens, routing layers, k], -1 where there is no route.
        tokens: of the batch.
        routing: of the model.

    Raises:
        BatchError: a wrong shape or type, or an expert that there is not.
    """
    expected = [tokens, len(routing.layers), routing.top_k]
    if list(routes.shape) != expected:
        raise BatchError(
            f"routes are {list(routes.shape)}; a batch of {tokens} tokens needs {expected} (tokens, layers "
            "that route, experts a token): were they captured from this model?"
        )
    if routes.dtype not in (torch.int16, torch.int32, torch.int64):
        raise BatchError(
            f"routes are {routes.dtype}; a trainer takes signed integers, see backends/routes.py"
        )
    low, high = int(routes.min()), int(routes.max())
    if low < -1 or high >= routing.experts:
        raise BatchError(
            f"routes name experts {low} to {high}; the model has 0 to {routing.experts - 1} (-1: no route)"
        )
