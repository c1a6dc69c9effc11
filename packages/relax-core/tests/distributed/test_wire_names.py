"""Experts of a layer held together travel as single ones, whole or as any box of them; the rest as it is."""

from pathlib import Path
from typing import Any

import dcs
import pytest
import torch
from dcs.layout import Layout, MegatronShape, TensorSpec, boxed, megatron_layout, whole
from dcs.plan import plan
from relax.backends.models import build_model, load_config, named_weights
from relax.backends.tiny import write_tiny
from relax.distributed.wire_names import as_published

LAYER = "model.layers.0.mlp.experts"
EXPERTS, INNER, HIDDEN = 4, 6, 5
TOGETHER = {
    f"{LAYER}.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
    f"{LAYER}.down_proj": (EXPERTS, HIDDEN, INNER),
}


def single(source: str) -> torch.Tensor:
    """What is in a tensor of one expert: its number, its part, its row and its column."""
    number, part, _ = source.removeprefix(f"{LAYER}.").split(".")
    rows, columns = (HIDDEN, INNER) if part == "down_proj" else (INNER, HIDDEN)
    place = 1000 * int(number) + 100 * ["gate_proj", "up_proj", "down_proj"].index(part)
    return (place + torch.arange(rows)[:, None] * 10 + torch.arange(columns)).float()


def stacked(name: str) -> torch.Tensor:
    """What transformers makes of them."""
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    return torch.stack(
        [
            torch.cat([single(f"{LAYER}.{number}.{part}.weight") for part in parts])
            for number in range(EXPERTS)
        ]
    )


def filled(spec: TensorSpec) -> torch.Tensor:
    """A rank's tensor, of the single experts that its pieces name."""
    found = torch.full(spec.shape, torch.nan)
    for piece in spec.pieces:
        theirs = single(piece.source)
        assert tuple(theirs.shape) == piece.shape
        here, there = found, theirs
        for dimension, (first, length) in enumerate(zip(piece.at, piece.own_extent, strict=True)):
            here = here.narrow(dimension, first, length)
        for dimension, (first, length) in enumerate(zip(piece.start, piece.extent, strict=True)):
            there = there.narrow(dimension, first, length)
        here.copy_(there)
    return found


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        ((0, 0, 0), (EXPERTS, 99, 99)),
        ((1, 0, 0), (3, 99, 99)),
        ((2, 4, 1), (4, 9, 3)),
        ((3, 3, 2), (4, 4, 5)),
    ],
    ids=["all", "some experts", "across gate and up", "inside one"],
)
def test_a_box_of_all_experts_is_boxes_of_single_ones(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    for name, shape in TOGETHER.items():
        ends = tuple(map(min, stop, shape))
        begin = tuple(map(min, start, ends))
        extent = tuple(end - first for first, end in zip(begin, ends, strict=True))
        held = TensorSpec(name, extent, "float32", boxed(name, shape, begin, extent))
        (spec,) = as_published(Layout((held,))).tensors
        assert (spec.name, spec.shape) == (name, extent)
        box = tuple(slice(first, end) for first, end in zip(begin, ends, strict=True))
        assert torch.equal(filled(spec), stacked(name)[box])


def test_what_is_no_tensor_of_all_experts_is_left_alone() -> None:
    own = dcs.layout.of(
        {
            f"{LAYER}.3.down_proj.weight": torch.zeros(5, 6),
            f"{LAYER}.gate_up_proj_bias": torch.zeros(4, 12),
            "model.layers.1.mlp.experts.gate_up_proj": torch.zeros(4, 7, 5),  # no two halves
            "model.layers.1.mlp.down_proj.weight": torch.zeros(5, 6),
        },
        pieces={f"{LAYER}.3.down_proj.weight": whole("renamed", (5, 6))},
    )
    assert as_published(own) == own
    assert as_published(as_published(Layout(specs()))) == as_published(Layout(specs()))


def specs() -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, shape, "float32") for name, shape in sorted(TOGETHER.items()))


@pytest.mark.parametrize(
    "split",
    [{"tp_size": 2, "etp_size": 2}, {"ep_size": 2}, {"pp_size": 2}],
    ids=["parts", "experts", "pipeline"],
)
def test_ranks_of_megatron_fill_a_mixture_as_transformers_holds_it_and_the_other_way_round(
    split: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path / "moe", "qwen3_moe")
    shape = MegatronShape.from_huggingface(load_config(folder).to_dict())
    weights = dict(named_weights(build_model(folder)))
    engine = as_published(dcs.layout.of(weights))
    ranks: list[Layout] = []
    for rank in range(2):
        place: dict[str, Any] = {name.replace("size", "rank"): rank for name in split}
        ranks.append(megatron_layout(shape, "float32", **split, **place))
    assert plan(engine, ranks).nbytes == sum(tensor.nbytes for tensor in weights.values())
    assert all(plan(rank, [engine]).nbytes for rank in ranks)
    with pytest.raises(dcs.LayoutMismatch, match=r"experts\.(gate_up|down)_proj"):
        plan(dcs.layout.of(weights), ranks)
