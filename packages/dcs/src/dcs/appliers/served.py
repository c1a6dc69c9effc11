"""What a running engine takes, told without asking it to load anything.

Engines fuse and shard weights while they load, and none of them lists what it would accept. But it has
loaded a model folder, under the names and shapes that the headers of its safetensors say: so that is what it
takes.
"""

import os
from pathlib import Path

import msgspec
import torch

from dcs.appliers.checkpoint import layout_of_folder, ties_output_to_input
from dcs.appliers.names import NameMap
from dcs.appliers.version import in_dtype
from dcs.errors import LayoutMismatch
from dcs.layout import Layout, TensorSpec


def published_layout(
    url: str,
    model: str | os.PathLike[str],
    layout: Layout | None,
    dtype: torch.dtype | None,
    names: NameMap,
    *,
    required: bool,
) -> Layout:
    """The layout, in published names, of what is to be pushed to the engine at `url`.

    Args:
        model: the folder that it has loaded, or a name that is no folder here.
        layout: what is published; checked against the folder, of which it may leave tensors out. None: all
            of it.
        dtype: without `layout`: in which floating tensors are published, if not as in the folder.
        required: whether `model` has to be readable even when `layout` is given.

    Raises `LayoutMismatch` when the two differ, or there is neither.
    """
    folder = Path(model)
    if not required and not (folder.is_absolute() and folder.is_dir()):
        if layout is None:
            raise LayoutMismatch(
                f"{url} serves {os.fspath(model)!r}, which is no folder here, so what it takes cannot be"
                " told; give model= (a copy of that folder) or layout="
            )
        return layout
    held = layout_of_folder(folder)
    if layout is None:
        specs = [msgspec.structs.replace(spec, name=names.published(spec.name)) for spec in held.tensors]
        return in_dtype(Layout(tuple(sorted(specs, key=lambda spec: spec.name))), dtype)
    taken = {spec.name: spec for spec in held.tensors}
    for spec in layout.tensors:
        name = names.engine(spec.name)
        if name == "lm_head.weight" and name not in taken and ties_output_to_input(folder):
            continue
        expected = taken.get(name)
        if expected is None or not _loads(spec, expected):
            raise LayoutMismatch(
                f"tensor {spec.name!r} is published as {spec}, but {name!r} is {expected or 'absent'} in"
                f" {folder}, which {url} serves; nothing was touched",
                spec.name,
                str(spec),
                str(expected or "absent"),
            )
    return layout


def _loads(published: TensorSpec, taken: TensorSpec) -> bool:
    """Whether an engine that takes the one can load the other: it casts between floating dtypes."""
    kinds = [getattr(torch, spec.dtype).is_floating_point for spec in (published, taken)]
    return published.shape == taken.shape and (published.dtype == taken.dtype or all(kinds))
