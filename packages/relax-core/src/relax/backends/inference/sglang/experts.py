"""Experts under their two names: one tensor for all of a layer, as a trainer holds them, and one for each
expert, as model files and SGLang have them.

    X.experts.gate_up_proj  [experts, 2 * inner, hidden]   X.experts.N.gate_proj.weight, .N.up_proj.weight
    X.experts.down_proj     [experts, hidden, inner]       X.experts.N.down_proj.weight

Other tensors have one name. Nothing is copied: an expert's tensors are views of those of the layer. Files of
published Qwen3-VL mixtures, and SGLang, have the two of a layer under their names, input by output.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_ONE = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_PARTS = {"gate_proj", "up_proj", "down_proj"}


def together(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a model file describes, as a trainer names it; only shapes, on the meta device.

    A layer whose experts are not all there, or differ, keeps its names.
    """
    layers: dict[str, dict[tuple[int, str], Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        one = _ONE.fullmatch(name)
        if one is None:
            found[name] = tensor
        else:
            layers.setdefault(one["layer"], {})[int(one["number"]), one["part"]] = tensor
    for layer, parts in layers.items():
        experts = len(parts) // len(_PARTS)
        whole = {(number, part) for number in range(experts) for part in _PARTS}
        alike = {(part, tensor.shape, tensor.dtype) for (_, part), tensor in parts.items()}
        gate, down = parts.get((0, "gate_proj")), parts.get((0, "down_proj"))
        if parts.keys() != whole or len(alike) != len(_PARTS) or gate is None or down is None:
            found |= {f"{layer}.{number}.{part}.weight": tensor for (number, part), tensor in parts.items()}
            continue
        inner, hidden = gate.shape
        for name, shape in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
            found[f"{layer}.{name}"] = torch.empty((experts, *shape), dtype=gate.dtype, device="meta")
    return dict(sorted(found.items()))


def input_by_output(described: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the two tensors of a layer that a file has the other way round than a trainer."""
    found: set[str] = set()
    for name, down in described.items():
        layer, _, part = name.rpartition(".")
        up = described.get(f"{layer}.gate_up_proj")
        if part == "down_proj" and up is not None and down.ndim == up.ndim == 3:
            (_, inner, hidden), shape = down.shape, tuple(up.shape[1:])
            if shape == (hidden, 2 * inner):
                found |= {name, f"{layer}.gate_up_proj"}
    return frozenset(found)


def turned(tensors: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    """The same, with those of `names` the other way round; views."""
    return {name: tensor.transpose(1, 2) if name in names else tensor for name, tensor in tensors.items()}


def apart(tensors: Mapping[str, Tensor], whole: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """A version as a trainer names it, under the names of model files; those of `whole` keep theirs."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if name in whole or not layer.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for number, one in enumerate(tensor):
            if part == "down_proj":
                found[f"{layer}.{number}.down_proj.weight"] = one
            else:
                found[f"{layer}.{number}.gate_proj.weight"], found[f"{layer}.{number}.up_proj.weight"] = (
                    one.chunk(2)
                )
    return found
