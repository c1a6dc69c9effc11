"""An optimizer's state by parameter, whole on each rank that holds the parameter, however the state is split.

Megatron's own optimizer checkpoints depend on which optimizers a split is made of (one, or one for experts
beside it; distributed or not), and do not read each other's. Moments and masters have the shape of their
parameter, so they are kept like it: a checkpoint then resumes under any split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, distributed, nn

MASTER = "fp32_param"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """What this rank holds of a parameter's state.

    Attributes:
        optimizer: torch's (or a fused one), which steps `main`.
        group: of its `param_groups`.
        main: what is stepped: the parameter, its float32 master, or a flat stretch of either.
        first: where that stretch begins in the flat parameter.
    """

    optimizer: torch.optim.Optimizer
    group: dict[str, object]
    main: Tensor
    first: int


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is chained of."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def held(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> Held | None:
    """This rank's state of a parameter; None where other replicas have all of it."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if inner is None:
            continue
        if isinstance(part, DistributedOptimizer):
            place = part.model_param_group_index_map.get(parameter)
            if place is None:
                continue
            group = inner.param_groups[place[0]]
            first = part._get_model_param_range_map(parameter)["param"].start
            return Held(inner, group, group["params"][place[1]], first)
        main = getattr(parameter, "main_param", parameter)
        for group in inner.param_groups:
            if any(main is other for other in group["params"]):
                return Held(inner, group, main, 0)
    return None


@torch.no_grad()
def read(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter], masters: bool
) -> dict[str, Tensor]:
    """float32, in the shape of each parameter: `KIND/NAME` of moments and (of half precision) masters.

    Every rank calls it: replicas that hold stretches put them together.
    """
    split = any(isinstance(part, DistributedOptimizer) for part in parts_of(optimizer))
    return {
        f"{kind}/{name}": _whole(parameter, found, kind, split)
        for name, parameter, found in _all(optimizer, parameters)
        for kind in _kinds(masters)
    }


@torch.no_grad()
def write(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
    *,
    masters: bool,
    steps: float,
) -> None:
    """Take over what `read` gave, perhaps of another split, after `steps` optimizer steps."""
    for name, _, found in _all(optimizer, parameters):
        if found is None:
            continue
        stretch = slice(found.first, found.first + found.main.numel())
        if masters:
            found.main.copy_(state[f"{MASTER}/{name}"].flatten()[stretch].view_as(found.main))
        fresh: dict[str, Tensor] = {
            kind: state[f"{kind}/{name}"].flatten()[stretch].view_as(found.main).to(found.main, copy=True)
            for kind in _MOMENTS
        }
        if isinstance(found.optimizer, torch.optim.AdamW):
            fresh["step"] = torch.tensor(float(steps))
        else:
            found.group["step"] = int(steps)  # TE's and Apex's FusedAdam count in the group
        found.optimizer.state[found.main] = fresh


def empty(parameters: Mapping[str, nn.Parameter], masters: bool) -> dict[str, Tensor]:
    """Room for what `write` takes."""
    return {
        f"{kind}/{name}": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        for name, parameter in parameters.items()
        for kind in _kinds(masters)
    }


def steps_of(optimizer: MegatronOptimizer) -> int:
    """Steps that the moments have seen; 0 without moments."""
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue
        for state in part.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        for group in part.optimizer.param_groups:
            if group.get("step"):
                return int(group["step"])
    return 0


def _kinds(masters: bool) -> tuple[str, ...]:
    return (*_MOMENTS, MASTER) if masters else _MOMENTS


def _all(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter, Held | None]]:
    for name, parameter in parameters.items():
        yield name, parameter, held(optimizer, parameter)


def _whole(parameter: nn.Parameter, found: Held | None, kind: str, split: bool) -> Tensor:
    if found is not None and not split:
        return _value(found, kind).detach().float().view(parameter.shape).clone()
    flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if found is not None:
        flat[found.first : found.first + found.main.numel()] = _value(found, kind).detach().float().flatten()
    expert = not getattr(parameter, "allreduce", True)
    group: Any = (
        parallel_state.get_expert_data_parallel_group()
        if expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    distributed.all_reduce(flat, group=group)
    return flat.view(parameter.shape)


def _value(found: Held, kind: str) -> Tensor:
    return found.main if kind == MASTER else found.optimizer.state[found.main][kind]
