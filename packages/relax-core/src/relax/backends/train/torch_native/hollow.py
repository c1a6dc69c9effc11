"""A model without its weights, and filling a rank's shards from the files: nothing is ever whole on a rank.

A hollow parameter has its shape, dtype and device, and one number of memory. What looks at a model before
its weights are there (adapters, recomputation, packing) finds what it looks for. When it is sharded, its
parameters become meta tensors, as FSDP2 wants them, and after that this rank's shards of them are read.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from relax.backends.model_files import ModelFolderError
from relax.backends.models import build_model, has_weights, weights_prefix
from relax.backends.train import shared_prompts
from relax.backends.train.errors import UntrainableModelError
from relax.backends.train.rms_norm import use_fused_norms
from relax.backends.train.routing_replay import follow_routes
from relax.backends.train.safetensors_folder import SafetensorsFolder
from relax.backends.train.torch_native.adapters import own_name

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that are registered within go to the meta device; buffers stay, as they are computed when a
    model is built and stand in no file.
    """
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        plain(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def hollow_model(folder: Path, dtype: torch.dtype) -> Any | None:
    """The model of a folder without its weights; None where its files cannot be read by shards, because there
    are none or they hold the tensors under other names than the model does.

    Raises:
        UntrainableModelError: the folder holds no model that this backend can train.
    """
    if not has_weights(folder):
        return None
    try:
        with parameters_on_meta():
            model: Any = build_model(folder, dtype, weights=False, attention=shared_prompts.ATTENTION)
    except ModelFolderError as error:
        raise UntrainableModelError(str(error)) from error
    for parameter in model.parameters():
        hollow = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(hollow, parameter.requires_grad))
    files = SafetensorsFolder(folder, weights_prefix(folder))
    wanted: set[str] = set()
    for name, parameter in model.named_parameters():
        found = sources(name, tuple(parameter.shape), files)
        if found is None:
            return None
        wanted |= found
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if set(files.names()) - wanted - tied:
        return None  # foreign tensors are named where the model is loaded whole
    use_fused_norms(model)
    follow_routes(model)
    return model


def sources(name: str, shape: tuple[int, ...], files: SafetensorsFolder) -> set[str] | None:
    """The tensors of the files that a parameter is made of; None where they are not there, or of another
    shape.
    """
    if name in files:
        return {name} if files.shape(name) == shape else None
    parts = _of_experts(name, shape)
    if parts and all(part in files and files.shape(part) == size for part, size in parts.items()):
        return set(parts)
    return None


def emptied(model: nn.Module) -> None:
    """Make the hollow parameters meta tensors; those that have memory stay."""
    for parameter in model.parameters():
        if 0 in parameter.stride():
            hollow = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
            )
            torch.utils.swap_tensors(parameter, hollow)


@torch.no_grad()
def fill_shards(model: nn.Module, folder: Path, device: torch.device) -> int:
    """Give every parameter that is sharded and on the meta device memory, and this rank's part of the files.

    Returns:
        The bytes that were read.
    """
    files = SafetensorsFolder(folder, weights_prefix(folder))
    for full_name, parameter in model.named_parameters():
        name = own_name(full_name)
        if name is None or not isinstance(parameter, DTensor) or not parameter.is_meta:
            continue
        shape, mesh, placements = tuple(parameter.shape), parameter.device_mesh, parameter.placements
        extent, start = compute_local_shape_and_global_offset(shape, mesh, placements)
        own = torch.empty(extent, dtype=parameter.dtype, device=device)
        if own.numel():
            _read(name, shape, tuple(start), own, files)
        filled = DTensor.from_local(
            own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        torch.utils.swap_tensors(parameter, nn.Parameter(filled, parameter.requires_grad))
    return files.bytes_read


def _read(
    name: str, shape: tuple[int, ...], start: tuple[int, ...], own: Tensor, files: SafetensorsFolder
) -> None:
    if name in files:
        own.copy_(files.box(name, start, own.shape))
        return
    rows, columns = own.shape[1:]
    if (start[1:], (rows, columns)) != ((0, 0), shape[1:]):
        raise UntrainableModelError(f"{name} is sharded inside an expert, which the files cannot be read by")
    for place in range(len(own)):
        target = own[place]
        for part, size in _of_experts(name, shape, start[0] + place).items():
            box = files.box(part, (0, 0), size)
            if name.endswith(_GATE_UP):
                first = 0 if "gate_proj" in part else size[0]
                target[first : first + size[0]].copy_(box)
            else:
                target.copy_(box)


def _of_experts(name: str, shape: tuple[int, ...], only: int | None = None) -> Mapping[str, tuple[int, int]]:
    """On disk each expert has its own tensors; transformers holds those of a layer in two. Their names and
    shapes, of all experts or one; none where `name` is no such tensor.
    """
    head, found, kind = name.rpartition(".experts.")
    if not found or len(shape) != 3 or kind not in (_GATE_UP, _DOWN):
        return {}
    experts, rows, columns = shape
    chosen = range(experts) if only is None else (only,)
    if kind == _DOWN:
        return {f"{head}.experts.{e}.down_proj.weight": (rows, columns) for e in chosen}
    return {
        f"{head}.experts.{e}.{part}.weight": (rows // 2, columns)
        for e in chosen
        for part in ("gate_proj", "up_proj")
    }
