"""The vision tower of Qwen3-VL: Hugging Face's own module."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from relax.backends.models import ATTENTION
from relax.backends.train import visuals
from relax.backends.train.base import Packed
from relax.backends.train.megatron.media.encoder import EncoderSpec, MediaSpec
from relax.backends.train.megatron.media.inputs import Item, Media, Stream
from relax.backends.train.visuals import Marks

VISION = "vision"


class VisionEncoder(nn.Module):
    """Images and videos as rows of the language model's width.

    Args:
        tower: takes `pixel_values` [patches, values] and grids [items, 3], and gives merged features and
            DeepStack features.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, items: Sequence[Item]) -> Tensor:
        """[rows, 1 + deep, hidden]."""
        weight = next(self.parameters())
        pixels = torch.cat([item.tensors["pixels"] for item in items]).to(weight)
        grids = torch.stack([item.tensors["grid"] for item in items]).to(weight.device)
        found = self.tower(pixels, grid_thw=grids, return_dict=True)
        return torch.stack([found.pooler_output, *found.deepstack_features], dim=1)


def tower_spec(config: Any, tower_class: Any) -> EncoderSpec:
    """The encoder of a `vision_config`, for a class of transformers that builds it."""

    def build(dtype: torch.dtype, recompute: bool) -> nn.Module:
        with no_init_weights():
            tower = tower_class._from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        if recompute:
            tower.gradient_checkpointing_enable({"use_reentrant": False})
        # No tower has dropout; transformers recomputes in training mode only.
        return VisionEncoder(tower.train())

    return EncoderSpec(VISION, len(config.deepstack_visual_indexes), build)


def qwen3_vl(config: Any, tower_class: Any) -> MediaSpec:
    """How a Qwen3-VL, dense or a mixture of experts, takes images and videos.

    Args:
        config: the whole Hugging Face config.
        tower_class: of transformers, for its `vision_config`.
    """
    marks = Marks.of(config)
    section = config.text_config.rope_parameters["mrope_section"]
    return MediaSpec(
        encoders=(tower_spec(config.vision_config, tower_class),),
        width=config.text_config.hidden_size,
        section=tuple(section),
        read=lambda batch: read(batch, marks),
    )


def read(batch: Packed, marks: Marks) -> Media:
    """What a micro-batch shows, of images and videos.

    Raises:
        BatchError: an item is neither, or a row's placeholders do not hold its items.
    """
    offsets = batch.offsets.tolist()
    tokens = batch.tokens.cpu()
    rows = [tokens[first:last] for first, last in pairwise(offsets)]
    different, shown = visuals.read(rows, batch.media, marks)
    starts = [0]
    for visual in different:
        starts.append(starts[-1] + marks.tokens(visual.grid))
    runs: list[list[tuple[int, visuals.Grid]]] = [[] for _ in rows]
    where, taken = [], []
    for one in shown:
        visual = different[one.visual]
        runs[one.row] += zip(one.runs, visual.frames, strict=True)
        where.append(visuals.places(one, visual, marks) + offsets[one.row])
        taken.append(torch.arange(starts[one.visual], starts[one.visual + 1]))
    positions = torch.cat(
        [
            visuals.rope_positions(len(row), sorted(found), marks.merge)
            for row, found in zip(rows, runs, strict=True)
        ],
        dim=1,
    )
    items = [
        Item(
            {"pixels": visual.pixels, "grid": torch.tensor(visual.grid)},
            rows=marks.tokens(visual.grid),
            cost=visual.patches,
        )
        for visual in different
    ]
    return Media((Stream(VISION, items, torch.cat(where), torch.cat(taken)),), positions)
