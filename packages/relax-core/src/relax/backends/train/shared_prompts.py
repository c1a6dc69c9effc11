"""A micro-batch without padding, each different prompt once: what the samples of a group share costs once.

A hidden state of a causal model depends on nothing but the tokens up to it, so the members of a group have
the same ones all through their prompt. All that works on one token (norms, projections, MLP) meets one
sequence of the different tokens. Only attention meets the plain rows, gathered from that sequence and put
back. Gathering is a fiftieth of attention's own cost; one long masked sequence would cost more than rows do.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from relax.backends.models import text_config
from relax.backends.train.base import Packed

ATTENTION = "relax_shared_prompts"
"""The attention to build a model with. Without a `Folded` it is transformers' sdpa."""

_FOLDING_MODELS = frozenset({"qwen3", "qwen3_moe"})
# Below this share of the padded rectangle's places, what is saved outweighs the gathering.
_WORTHWHILE = 0.95


@dataclass(frozen=True)
class Folded:
    """A micro-batch as one sequence: its different prompts, then the responses in row order.

    Attributes:
        input_ids: int64 [1, tokens].
        position_ids: int64 [1, tokens], of each token in its row.
        predictors: int64 [total response], place in `tokens` that predicts each response token; the first
            response tokens of a group share one.
        targets: int64 [total response], the response tokens.
        cells: int64 [rows, width], place in `tokens` of each token of the plain rows; 0 where padded, which
            no real token sees.
        homes: int64 [tokens], the first place in [rows * width] where each token stands.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    cells: Tensor
    homes: Tensor

    def sources(self, batch: Packed) -> Tensor:
        """int64 [tokens]: the token of the batch at each place, of a shared prompt its first row's."""
        width = self.cells.shape[1]
        return batch.offsets[self.homes // width] + self.homes % width

    def hidden_states(self, decoder: nn.Module, **arguments: Any) -> Tensor:
        """Last hidden state [1, tokens, hidden] of a model that `can_fold`, built with ATTENTION."""
        # A mask of four dimensions is handed on as it is; attention knows what sees what from `folded`.
        no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.input_ids.device)
        return decoder(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=no_mask,
            use_cache=False,
            folded=self,
            **arguments,
        ).last_hidden_state


def can_fold(model: Any) -> bool:
    """Whether the family is known to hand `folded` on to its attention, and each layer sees all before it."""
    layers = getattr(text_config(model.config), "layer_types", None) or ()
    return model.config.model_type in _FOLDING_MODELS and set(layers) <= {"full_attention"}


def fold(batch: Packed) -> Folded | None:
    """Fold a micro-batch that `padding.check` passed; None where that saves too little to pay.

    Prompts are the same if their tokens and, where there are any, their routes are: members of a group that
    different engines saw first may have gone to different experts. The result depends on the micro-batch
    only.
    """
    device = batch.tokens.device
    routes = None if batch.routes is None else batch.routes.cpu()
    tokens, offsets, prompts = batch.tokens.cpu(), batch.offsets.cpu(), batch.prompt_lengths.cpu()
    lengths = offsets.diff()
    different: dict[bytes, Tensor] = {}
    starts: dict[bytes, int] = {}
    size = 0
    row_starts: list[int] = []
    for offset, length in zip(offsets.tolist(), prompts.tolist(), strict=False):
        prompt = tokens[offset : offset + length]
        key = prompt.numpy().tobytes()
        if routes is not None:
            key += routes[offset : offset + length].numpy().tobytes()
        if key not in starts:
            starts[key] = size
            different[key] = prompt
            size += length
        row_starts.append(starts[key])
    total = size + len(tokens) - int(prompts.sum())
    width = int(lengths.max())
    if total > _WORTHWHILE * batch.rows * width:
        return None

    column = torch.arange(width)
    real = column < lengths[:, None]
    response = real & (column >= prompts[:, None])
    targets = tokens[response[real]]
    cells = (torch.tensor(row_starts)[:, None] + column).masked_fill(~real, 0)
    cells[response] = torch.arange(size, total)
    homes = torch.full((total,), cells.numel())
    homes.scatter_reduce_(0, cells[real], real.flatten().nonzero().flatten(), "amin")
    return Folded(
        input_ids=torch.cat([*different.values(), targets])[None].to(device),
        position_ids=(homes % width)[None].to(device),
        predictors=cells[:, :-1][response[:, 1:]].to(device),
        targets=targets.to(device),
        cells=cells.to(device),
        homes=homes.to(device),
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    folded: Folded | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention over the plain rows; query, key and value are [1, heads, tokens, head size]."""
    if folded is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    cells = folded.cells.flatten()

    def rows(states: Tensor) -> Tensor:
        gathered = states[0].transpose(0, 1).index_select(0, cells)
        return gathered.unflatten(0, folded.cells.shape).transpose(1, 2)

    seen, _ = sdpa_attention_forward(module, rows(query), rows(key), rows(value), None, **kwargs)
    return seen.flatten(0, 1).index_select(0, folded.homes)[None], None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
