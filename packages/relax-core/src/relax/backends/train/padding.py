"""A ragged micro-batch as the rectangle a model takes, and where its response logits lie in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from relax.backends.train.base import Packed
from relax.backends.train.errors import BatchError

UNSCORED = -100
"""Stands in `scored_targets` for a token that no policy may say."""


@dataclass(frozen=True)
class Padded:
    """A micro-batch, padded on the right to its own longest row: its bits depend on nothing else.

    Attention is causal: no real token sees the padding behind it, so no mask is needed.

    Attributes:
        input_ids: int64 [rows, width]; 0 where padded.
        predictors: int64 [total response], index into [rows * width] of the position that predicts each
            response token.
        targets: int64 [total response], the response tokens.
    """

    input_ids: Tensor
    predictors: Tensor
    targets: Tensor

    def sources(self, batch: Packed) -> Tensor:
        """int64 [rows * width]: the token of the batch at each place; where padded, the last of row 0."""
        column = torch.arange(self.input_ids.shape[1], device=batch.tokens.device)
        tokens = batch.offsets[:-1, None] + column
        return torch.where(column < batch.offsets.diff()[:, None], tokens, batch.offsets[1] - 1).flatten()


def pad(batch: Packed) -> Padded:
    """Lay out a micro-batch that `check` passed."""
    tokens, lengths = batch.tokens, batch.offsets.diff()
    longest = int(lengths.max())
    column = torch.arange(longest, device=tokens.device)
    real = column < lengths[:, None]
    input_ids = tokens.new_zeros((batch.rows, longest))
    input_ids[real] = tokens
    # A token is predicted one place before it. Row-major order is the order of the responses.
    predicts = (column >= batch.prompt_lengths[:, None] - 1) & (column < lengths[:, None] - 1)
    predictors = predicts.flatten().nonzero().flatten()
    return Padded(input_ids, predictors, input_ids.flatten()[predictors + 1])


def scored_targets(batch: Packed, targets: Tensor, unsampled: Tensor) -> Tensor:
    """int64 [total response]: the targets of a batch, UNSCORED where a tool showed media.

    Args:
        batch: its `loss_mask`, where there is one, tells what the policy said from what it was shown.
        targets: int64 [total response], the response tokens.
        unsampled: int64 [tokens], those that only stand for media.

    Raises:
        BatchError: the policy is said to have sampled one of them.
    """
    unsaid = torch.isin(targets, unsampled)
    if "loss_mask" in batch.fields:
        wrong = (unsaid & (batch.fields["loss_mask"] != 0)).nonzero().flatten()
        if len(wrong):
            offsets = batch.response_offsets
            place = int(wrong[0])
            row = int(torch.searchsorted(offsets, place, right=True)) - 1
            raise BatchError(
                f"response token {place - int(offsets[row])} of row {row} is {int(targets[place])}, which "
                "only stands for media and has probability 0, but its loss_mask says that the policy sampled "
                "it; set loss_mask to 0 where an environment showed it, drop the row otherwise"
            )
    return targets.masked_fill(unsaid, UNSCORED)


def check(batch: Packed, *, vocabulary: int, context: int) -> None:
    """See that a micro-batch fits itself and a model with so many token ids and positions.

    Raises:
        BatchError: it does not.
    """
    offsets, prompts = batch.offsets, batch.prompt_lengths
    for name, tensor in (("tokens", batch.tokens), ("offsets", offsets), ("prompt_lengths", prompts)):
        if tensor.ndim != 1 or tensor.dtype != torch.int64:
            raise BatchError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it has to be one row of int64"
            )
    if batch.rows == 0:
        raise BatchError("a micro-batch has no row; leave empty ones out")
    if len(offsets) == 0:
        raise BatchError(f"offsets is empty; {batch.rows} rows need {batch.rows + 1} entries")
    if len(offsets) != batch.rows + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(batch.tokens):
        raise BatchError(
            f"offsets has {len(offsets)} entries from {int(offsets[0])} to {int(offsets[-1])}; "
            f"{batch.rows} rows of {len(batch.tokens)} tokens need {batch.rows + 1} from 0 to "
            f"{len(batch.tokens)}"
        )
    lengths = offsets.diff()
    wrong = ((prompts < 1) | (prompts > lengths) | (lengths > context)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"row {row} has {int(lengths[row])} tokens of which {int(prompts[row])} are prompt; the prompt "
            f"needs at least 1 and at most all of them, and the model's context holds {context}"
        )
    responses = len(batch.tokens) - int(prompts.sum())
    if responses == 0:
        raise BatchError(
            f"none of the {batch.rows} rows has a response token, so there is nothing to train or score"
        )
    for name, column in batch.fields.items():
        if column.shape != (responses,):
            raise BatchError(
                f"column {name!r} has shape {tuple(column.shape)}; it needs one entry for each of the "
                f"{responses} response tokens"
            )
    if batch.routes is not None and (batch.routes.ndim != 3 or len(batch.routes) != len(batch.tokens)):
        raise BatchError(
            f"routes have shape {tuple(batch.routes.shape)}; the {len(batch.tokens)} tokens of the batch "
            f"need ({len(batch.tokens)}, routing layers, top_k)"
        )
    if batch.media and len(batch.media) != batch.rows:
        raise BatchError(
            f"media lists {len(batch.media)} rows, the batch has {batch.rows}; give an empty list for text"
        )
    low, high = int(batch.tokens.min()), int(batch.tokens.max())
    if low < 0 or high >= vocabulary:
        raise BatchError(
            f"token ids run from {low} to {high}, but the model knows 0 to {vocabulary - 1}; were they made "
            "with another tokenizer?"
        )


def marked(batch: Packed) -> int:
    """How many response tokens `loss_mask` marks.

    Raises:
        BatchError: none, so that there is nothing to learn.
    """
    mask = required(batch, "loss_mask")
    count = int(mask.count_nonzero())
    if count == 0:
        raise BatchError(f"loss_mask marks none of {len(mask)} response tokens, so there is nothing to learn")
    return count


def required(batch: Packed, name: str) -> Tensor:
    """A response-aligned column that must be there."""
    if name not in batch.fields:
        raise BatchError(f"column {name!r} is missing; the batch has {sorted(batch.fields)}")
    return batch.fields[name]
