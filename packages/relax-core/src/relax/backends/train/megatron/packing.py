"""A ragged micro-batch as one packed sequence, and the part of it that this rank works on.

The sequence is the batch's own `tokens`, with padding behind where the ranks that share it could not cut it
evenly. What sees what is a block-diagonal mask, or with Transformer Engine the rows' ends (`thd`).
"""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from relax.backends.train.base import Packed
from relax.backends.train.padding import check, scored_targets


@dataclass(frozen=True)
class Sequence:
    """One micro-batch, for this rank.

    Attributes:
        input_ids: int64 [1, own tokens]; those of this context-parallel rank, all of them without.
        position_ids: int64 [1, own tokens] for the block-diagonal mask, place of each token in its row; with
            thd int64 [1, longest row], as Transformer Engine counts each row for itself. Of a micro-batch
            that shows media int64 [3, own tokens], with thd [3, all tokens], of which Megatron takes its own.
        mask: bool [1, 1, own tokens, all tokens], True where a query sees a key; None with thd.
        ends: thd's description of the rows; None with a mask.
        predictors: int64 [own responses], place in `input_ids` that predicts each response token this rank
            scores.
        targets: int64 [own responses], those tokens; `padding.UNSCORED` where a tool showed media.
        responses: int64 [own responses], which of the batch's response tokens those are.
        response_count: response tokens of the whole batch.
        tokens: int64 [own tokens], which token of the batch each is; -1 for padding.
        idle: bool [1, own tokens], True for padding and for rows whose `loss_mask` is all 0 (dummy rounds):
            no balancing loss counts them.
        busy: tokens of the whole batch that are not idle.
        marked: response tokens of the whole batch that `loss_mask` marks; all of them without one.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor | None
    ends: PackedSeqParams | None
    predictors: Tensor
    targets: Tensor
    responses: Tensor
    response_count: int
    tokens: Tensor
    idle: Tensor
    busy: int
    marked: int


def sequence(
    batch: Packed,
    *,
    vocabulary: int,
    context: int,
    unsampled: Tensor | None,
    multiple: int,
    thd: bool,
    length: int = 0,
    positions: Tensor | None = None,
) -> Sequence:
    """Lay out a micro-batch.

    Args:
        batch: on the device of the model.
        vocabulary: token ids of the model.
        context: longest row of the model.
        unsampled: int64, tokens that only stand for media; None if there are none.
        multiple: what the length has to be a multiple of (tensor ranks, with sequence parallelism).
        thd: for Transformer Engine.
        length: of the packed sequence, at least; see `packed_length`.
        positions: int64 [3, tokens of the batch], where media make them differ from places in the row.

    Raises:
        BatchError: the batch contradicts itself or does not fit the model.
    """
    check(batch, vocabulary=vocabulary, context=context)
    device = batch.tokens.device
    lengths = batch.offsets.diff()
    rows = torch.repeat_interleave(torch.arange(batch.rows, device=device), lengths)
    places = torch.arange(len(batch.tokens), device=device) - batch.offsets[rows]
    predicted = places >= batch.prompt_lengths[rows]
    targets = batch.tokens[predicted]
    if unsampled is not None:
        targets = scored_targets(batch, targets, unsampled)

    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    # Packed place -> token of the batch (-1: padding). thd cuts every row for itself, a mask the whole.
    if thd:
        padded = _padded_lengths(lengths, ranks, multiple, length)
        layout = _padded_rows(lengths, padded).to(device)
    else:
        padded = [max(length, packed_length(batch, multiple=multiple, thd=False))]
        layout = _padded_whole(len(batch.tokens), padded[0]).to(device)
    own = _own_places(padded, ranks, rank, thd).to(device)
    tokens = layout[own]
    real = tokens >= 0
    known = tokens.clamp(min=0)

    # Which own place predicts which response token: the token before it.
    home = torch.full((len(batch.tokens),), -1, dtype=torch.int64, device=device)
    home[tokens[real]] = real.nonzero().flatten()
    before = home[predicted.nonzero().flatten() - 1]
    responses = (before >= 0).nonzero().flatten()

    idle_rows = _idle_rows(batch)
    marks = batch.fields.get("loss_mask")
    common = {
        "input_ids": batch.tokens[known].masked_fill(~real, 0)[None],
        "predictors": before[responses],
        "targets": targets[responses],
        "responses": responses,
        "response_count": len(targets),
        "tokens": tokens,
        "idle": (~real | idle_rows[rows[known]])[None],
        "busy": int(lengths[~idle_rows].sum()),
        "marked": len(targets) if marks is None else int(marks.count_nonzero()),
    }
    if thd:
        if positions is None:
            counted = torch.arange(max(padded), device=device)[None]
        else:
            counted = positions.to(device)[:, layout.clamp(min=0)].masked_fill(layout < 0, 0)
        return Sequence(position_ids=counted, mask=None, ends=_ends(padded, device), **common)
    # Padding is a row of its own behind the others, each of its tokens alone.
    group = torch.where(layout >= 0, rows[layout.clamp(min=0)], batch.rows)
    order = torch.arange(len(layout), device=device)
    sees = (group[own][:, None] == group[None]) & (order[own][:, None] >= order[None])
    counted = places[None] if positions is None else positions.to(device)
    return Sequence(
        position_ids=torch.where(real, counted[:, known], 0), mask=sees[None, None], ends=None, **common
    )


def _idle_rows(batch: Packed) -> Tensor:
    """bool [rows]: rows of a dummy, and those with a `loss_mask` that is all 0."""
    mask = batch.fields.get("loss_mask")
    if batch.dummy or mask is None:
        return torch.full((batch.rows,), batch.dummy, device=batch.tokens.device)
    counts = batch.response_offsets.diff()
    rows = torch.repeat_interleave(torch.arange(batch.rows, device=mask.device), counts)
    marked = torch.zeros(batch.rows, dtype=torch.int64, device=mask.device)
    return marked.index_add_(0, rows, mask.to(torch.int64)) == 0


def packed_length(batch: Packed, *, multiple: int, thd: bool) -> int:
    """Places that a micro-batch takes, with the padding that the ranks which share it need."""
    ranks = parallel_state.get_context_parallel_world_size()
    if thd:
        return sum(_padded_lengths(batch.offsets.diff(), ranks, multiple, 0))
    return -(-len(batch.tokens) // (ranks * multiple)) * ranks * multiple


def _padded_whole(count: int, length: int) -> Tensor:
    layout = torch.full((length,), -1, dtype=torch.int64)
    layout[:count] = torch.arange(count)
    return layout


def _padded_lengths(lengths: Tensor, ranks: int, multiple: int, length: int) -> list[int]:
    """Of each row, so that every context rank gets two equal pieces of it; the last fills up the whole."""
    unit = 2 * ranks if ranks > 1 else 1
    padded = [-(-row // unit) * unit for row in lengths.tolist()]
    padded[-1] += max(0, length - sum(padded))
    padded[-1] += -sum(padded) % (unit * multiple)
    return padded


def _padded_rows(lengths: Tensor, padded: list[int]) -> Tensor:
    parts, first = [], 0
    for length, places in zip(lengths.tolist(), padded, strict=True):
        part = torch.full((places,), -1, dtype=torch.int64)
        part[:length] = torch.arange(first, first + length)
        parts.append(part)
        first += length
    return torch.cat(parts)


def _own_places(padded: list[int], ranks: int, rank: int, thd: bool) -> Tensor:
    """Packed places of this context rank: a stretch of the whole; with thd, of each row the rank-th piece of
    2 x ranks from the front and that from the back, so that all have as much to attend to.
    """
    everything = torch.arange(sum(padded))
    if ranks == 1:
        return everything
    if not thd:
        return everything.chunk(ranks)[rank]
    found = []
    for row in everything.split(padded):
        pieces = row.chunk(2 * ranks)
        found += [pieces[rank], pieces[2 * ranks - 1 - rank]]
    return torch.cat(found)


def _ends(padded: list[int], device: torch.device) -> PackedSeqParams:
    ends = torch.tensor([0, *padded], device=device).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )
