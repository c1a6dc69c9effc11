"""Megatron's process groups for a split, and where this rank stands in it."""

import torch
from megatron.core import parallel_state
from torch import distributed

from relax.backends.train.errors import SettingsError, StepOrderError
from relax.backends.train.ranks import Coordinates
from relax.config.parallel import ParallelSettings


def join(parallel: ParallelSettings, timeout: float) -> Coordinates:
    """Make Megatron's groups over all ranks of the default process group; every rank calls it.

    Args:
        parallel: the split.
        timeout: seconds that a collective waits for a rank that does not come.

    Raises:
        StepOrderError: torch.distributed is not up, or a model of this process still holds Megatron's groups.
        SettingsError: the split is for another number of ranks.
    """
    if not distributed.is_initialized():
        raise StepOrderError(
            "a megatron rank needs torch.distributed.init_process_group before it; relax's gang does that"
        )
    if parallel_state.is_initialized():
        raise StepOrderError(
            "this process already has a megatron model: its groups are the process's; close that one first"
        )
    world = distributed.get_world_size()
    if parallel.ranks != world:
        raise SettingsError(
            f"the split needs {parallel.ranks} ranks (tensor {parallel.tensor_parallel} x pipeline "
            f"{parallel.pipeline_parallel} x context {parallel.context_parallel} x data "
            f"{parallel.data_parallel}), torch.distributed has {world}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel,
        distributed_timeout_minutes=timeout / 60,  # type: ignore[arg-type]  # a part of one will do
        # Only a distributed optimizer's CPU checkpoints would use them; ours are written by every rank.
        create_gloo_process_groups=False,
    )
    return Coordinates(
        rank=distributed.get_rank(),
        world_size=world,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        speaks=(
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        ),
    )


def leave() -> None:
    """Give Megatron's groups up, and their threads and sockets; harmless when there are none."""
    if not parallel_state.is_initialized():
        return
    # Megatron only forgets them: about thirty groups, each with threads of its own.
    made = getattr(parallel_state, "_global_process_group_list", None) or []
    parallel_state.destroy_model_parallel()
    for group in {id(group): group for group in made if isinstance(group, distributed.ProcessGroup)}.values():
        distributed.destroy_process_group(group)


def device_of(device: str | torch.device) -> torch.device:
    """The device of this rank: an index where a GPU was named without one.

    Raises:
        SettingsError: there is no such device.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise SettingsError(f"device {str(device)!r} is not here: torch sees no GPU; use 'cpu'")
    return found if found.index is not None else torch.device(found.type, torch.cuda.current_device())
