"""What a rank needs to go on, in Megatron's distributed format: each rank writes its part, any split reads.

    FOLDER/metadata.json, .metadata, *.distcp, common.pt    Megatron's `torch_dist`: weights and optimizer
    FOLDER/relax.json                                       steps done, the split, the model's config.json
    FOLDER/rng-RANK.safetensors                             random state of each rank
    FOLDER/sha256-RANK.json                                 digests of what each rank wrote

The folder is written beside its place and renamed into it by rank 0 when all have written.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from relax.backends.train.errors import (
    StateCorruptError,
    StateFileError,
    StateMismatchError,
    StateMissingError,
)
from relax.backends.train.megatron import digests, export, moments
from relax.backends.train.megatron.build import Blueprint
from relax.backends.train.megatron.files import PROGRESS
from relax.backends.train.megatron.optimizer import Optimizer
from relax.backends.train.megatron.weights import local_names
from relax.backends.train.state_files import written

SCHEMA = 2
_SPLIT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_OF_ALL = (PROGRESS, ".metadata", "metadata.json", "common.pt")
"""Files that the leader writes for all ranks."""
_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
"""What two models have to share for one to take the weights of the other."""
_CPU, _CUDA, _TRACKER = "cpu", "cuda", "tracker."


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a trainer is: optimizer steps done, and whether the optimizer's moments are a warm-up's."""

    steps: int
    warming: bool


def save(
    folder: Path, models: Sequence[GPTModel], optimizer: Optimizer, plan: Blueprint, progress: Progress
) -> None:
    """Write a checkpoint together; when this returns on any rank, it is whole and in its place.

    Raises:
        StateFileError: the folder is already there, on every rank alike; or it cannot be written, as on a
            full disk.
    """
    if _anywhere(folder.exists()):
        raise StateFileError(
            f"state folder {folder} is already there; states are never overwritten, name a new one"
        )
    try:
        with written(folder):
            _write(folder, models, optimizer, plan, progress)
    except CheckpointException as error:  # which is no Exception
        raise StateFileError(f"state folder {folder} cannot be written: {error}") from error


def _write(
    folder: Path, models: Sequence[GPTModel], optimizer: Optimizer, plan: Blueprint, progress: Progress
) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    leader = distributed.get_rank() == 0
    if leader:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    distributed.barrier()
    steps = moments.steps_of(optimizer.inner)
    parameters = _trained(models)
    state = moments.read(optimizer.inner, parameters, _has_masters(plan)) if steps else {}
    dist_checkpointing.save(_sharded(models, state), str(partial), sharded_strategy=_WriteHere())
    rank = distributed.get_rank()
    save_file(_random_state(), partial / _rng_name(rank))
    if leader:
        described = {
            "schema": SCHEMA,
            "backend": "megatron",
            "steps": progress.steps,
            "warming": progress.warming,
            "optimizer_steps": steps,
            "dtype": str(plan.config.params_dtype),
            "split": _split(plan),
            "critic": plan.critic,
            "freeze": sorted(plan.freeze),
            "config": plan.hf.to_dict(),
        }
        (partial / PROGRESS).write_text(json.dumps(described, indent=1, default=str) + "\n")
    distributed.barrier()
    own = [path.name for path in partial.glob(f"__{rank}_*")]
    of_all = [path.name for path in partial.iterdir() if path.name in _OF_ALL] if leader else []
    digests.write(partial, rank, [_rng_name(rank), *own, *of_all])
    distributed.barrier()
    if leader:
        os.rename(partial, folder)
        digests.flush(folder.parent)
    distributed.barrier()


def load(folder: Path, models: Sequence[GPTModel], optimizer: Optimizer, plan: Blueprint) -> Progress:
    """Go on from a checkpoint of any split; parameters keep their memory.

    Random state is restored under the split that saved it; another split keeps its own.

    Raises:
        StateMissingError: there is no checkpoint at this place.
        StateMismatchError: it is of another model or backend; nothing was loaded.
        StateCorruptError: it is damaged.
    """
    described = describe(folder)
    _require_same_model(folder, described, plan)
    steps = int(described["optimizer_steps"])
    if steps:
        _require_same_moments(folder, described, plan)
    _require_whole(folder, int(described["split"]["ranks"]))
    parameters = _trained(models)
    masters = _has_masters(plan)
    room = moments.empty(parameters, masters) if steps else {}
    try:
        found: Any = dist_checkpointing.load(_sharded(models, room), str(folder))
    except (CheckpointingException, CheckpointException, KeyError, OSError, EOFError) as error:
        raise StateCorruptError(f"checkpoint {folder} cannot be read: {error}") from error
    for name, model in _named(models):
        model.load_state_dict(found[name], strict=True)
    if steps:
        # A stage of which all is frozen has none.
        state = found.get("optimizer", {})
        moments.write(optimizer.inner, parameters, state, masters=masters, steps=steps)
    else:
        optimizer.forget_moments()
        optimizer.inner.reload_model_params()
    rng = folder / _rng_name(distributed.get_rank())
    if described["split"] == _split(plan):
        try:
            _restore_random_state(load_file(rng))
        except (OSError, SafetensorError, KeyError) as error:
            raise StateCorruptError(f"random state {rng} cannot be read: {error}") from error
    return Progress(steps=int(described["steps"]), warming=bool(described["warming"]))


def describe(folder: Path) -> dict[str, Any]:
    """`relax.json` of a checkpoint.

    Raises:
        StateMissingError: there is none.
        StateMismatchError: it is of another backend or schema.
        StateCorruptError: it cannot be read.
    """
    path = folder / PROGRESS
    if not path.is_file():
        raise StateMissingError(f"there is no megatron checkpoint at {folder}: {PROGRESS} is missing")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise StateCorruptError(f"{path} is no JSON: {error}") from error
    if (found.get("backend"), found.get("schema")) != ("megatron", SCHEMA):
        raise StateMismatchError(
            f"checkpoint {folder} is of {(found.get('backend'), found.get('schema'))}, this backend reads "
            f"{('megatron', SCHEMA)}"
        )
    return found


def _trained(models: Sequence[GPTModel]) -> dict[str, nn.Parameter]:
    """Parameters that have an optimizer's state: not those that are frozen."""
    return {name: part for name, part in local_names(models).items() if part.requires_grad}


class _WriteHere(TorchDistSaveShardedStrategy):
    """Megatron's format, written by this thread.

    Megatron's own writer starts a process for a queue even when it does not write in the background: the main
    module and all that it imports once more, for every rank and every save.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        save_distributed(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=planner,
        )


def _sharded(models: Sequence[GPTModel], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Megatron's description of weights and, each cut like its parameter, of the optimizer's tensors."""
    described: dict[str, Any] = {name: model.sharded_state_dict() for name, model in _named(models)}
    if not state:
        return described
    weights = {
        f"{name}.{key}" if len(models) > 1 else key: entry
        for name, part in described.items()
        for key, entry in part.items()
    }
    described["optimizer"] = {
        key: make_sharded_optimizer_tensor(
            weights[key.partition("/")[2]], tensor, f"optimizer.{key.partition('/')[0]}"
        )
        for key, tensor in state.items()
    }
    return described


def _has_masters(plan: Blueprint) -> bool:
    return plan.config.params_dtype != torch.float32


def _named(models: Sequence[GPTModel]) -> list[tuple[str, GPTModel]]:
    if len(models) == 1:
        return [("model", models[0])]
    return [(f"model{index}", model) for index, model in enumerate(models)]


def _split(plan: Blueprint) -> dict[str, Any]:
    sizes = {name: getattr(plan.config, name) for name in _SPLIT}
    return sizes | {"ranks": distributed.get_world_size()}


def _require_same_model(folder: Path, described: Mapping[str, Any], plan: Blueprint) -> None:
    ours = json.loads(json.dumps(plan.hf.to_dict(), default=str))
    for key in _SIZES:
        if described["config"].get(key) != ours.get(key):
            raise StateMismatchError(
                f"checkpoint {folder} is of a model with {key} = {described['config'].get(key)}, this one "
                f"has {ours.get(key)}"
            )
    if described["dtype"] != str(plan.config.params_dtype):
        raise StateMismatchError(
            f"checkpoint {folder} is of a model in {described['dtype']}, this one is in "
            f"{plan.config.params_dtype}; set actor.dtype to the same"
        )
    if described["critic"] != plan.critic:
        kinds = ["a policy", "a critic"]
        raise StateMismatchError(
            f"checkpoint {folder} is of {kinds[described['critic']]}, this is {kinds[plan.critic]}"
        )


def _require_same_moments(folder: Path, described: Mapping[str, Any], plan: Blueprint) -> None:
    """What is frozen has no moments to go on with."""
    frozen = described.get("freeze", [])
    if frozen != sorted(plan.freeze):
        raise StateMismatchError(
            f"checkpoint {folder} has the optimizer of a model with actor.freeze = {frozen}, this one has "
            f"{sorted(plan.freeze)}; set it to the same, or start from an export of the checkpoint"
        )


def _require_whole(folder: Path, ranks: int) -> None:
    """See that what `ranks` ranks wrote is all there; what one rank finds, every rank raises."""
    rank, size, said = distributed.get_rank(), distributed.get_world_size(), ""
    try:
        digests.require(folder, ranks, rank=rank, world_size=size)
    except StateCorruptError as error:
        said = str(error)
    first = _least(rank if said else size)
    if first < size:
        raise StateCorruptError(export.told(said, _device(), first))


def _anywhere(holds: bool) -> bool:
    """Whether it holds on any rank, so that all of them refuse together."""
    return _least(int(not holds)) == 0


def _least(number: int) -> int:
    """The smallest of all ranks' numbers."""
    found = torch.tensor([number], device=_device())
    distributed.all_reduce(found, op=distributed.ReduceOp.MIN)
    return int(found.item())


def _device() -> torch.device:
    """Where collectives of the default group take tensors."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _random_state() -> dict[str, Tensor]:
    found = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        found[_CUDA] = torch.cuda.get_rng_state()
    found |= {_TRACKER + name: state.cpu() for name, state in _tracker().get_states().items()}
    return {name: state.clone() for name, state in found.items()}


def _tracker() -> Any:
    """Megatron's own random states, beside those of torch."""
    return get_cuda_rng_tracker()


def _restore_random_state(found: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(found[_CPU])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(found[_CUDA])
    _tracker().set_states(
        {name.removeprefix(_TRACKER): state for name, state in found.items() if name.startswith(_TRACKER)}
    )
