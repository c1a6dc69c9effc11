"""Running micro-batches through Megatron's schedules: without a pipeline, 1F1B, or interleaved."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from relax.backends.train.megatron.media import OwnMedia
from relax.backends.train.megatron.outputs import Scoring, scored
from relax.backends.train.megatron.packing import Sequence as PackedSequence
from relax.backends.train.megatron.replay import Replay, own_tokens

LossOf = Callable[[int, Tensor], Tensor]
"""The unscaled loss of micro-batch i from its response logprobs (or values)."""


@dataclass(frozen=True)
class Work:
    """One micro-batch as the schedule runs it.

    Attributes:
        batch: its packed sequence.
        routes: integers [total tokens, layers, k] to replay, or None.
        counts: False for one that only fills the schedule up; its loss is taken times 0.
        media: what this rank's tokens show; None of text.
    """

    batch: PackedSequence
    routes: Tensor | None
    counts: bool
    media: OwnMedia | None = None


class Schedules:
    """One rank's side of a schedule; all ranks of a replica run it with the same micro-batches."""

    def __init__(
        self, chunks: Sequence[nn.Module], config: TransformerConfig, scoring: Scoring, replay: Replay | None
    ) -> None:
        self._chunks = list(chunks)
        self._config = config
        self._scoring = scoring
        self._replay = replay
        self._balances = bool(config.num_moe_experts) and bool(
            config.moe_aux_loss_coeff or config.moe_z_loss_coeff
        )

    @torch.no_grad()
    def forward(self, work: Sequence[Work]) -> list[Tensor]:
        """For each micro-batch float32 [responses]; on the ranks of the last stage, empty on others."""
        found = self._run(work, lambda index, scores: scores, forward_only=True)
        return [scores for scores, part in zip(found, self._filled(work), strict=False) if part.counts]

    def forward_backward(self, work: Sequence[Work], loss: LossOf) -> None:
        """Accumulate the gradient of the sum of losses."""
        self._run(work, loss, forward_only=False)

    def _run(self, work: Sequence[Work], loss: LossOf, *, forward_only: bool) -> list[Any]:
        filled = self._filled(work)
        self._config.moe_grad_scale_func = _share_of_marked(filled) if self._balances else None
        streams = [_numbered(filled, chunk) for chunk in range(len(self._chunks))]
        try:
            return get_forward_backward_func()(
                forward_step_func=lambda stream, chunk: self._step(stream, chunk, loss),
                data_iterator=streams,
                model=self._chunks,
                num_microbatches=len(filled),
                # Upper bounds: shapes travel with the tensors, as every micro-batch has its own.
                seq_length=max(part.batch.input_ids.shape[1] for part in filled),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            if self._replay is not None:
                self._replay.clear()

    def _filled(self, work: Sequence[Work]) -> list[Work]:
        """An interleaved schedule takes a multiple of the pipeline ranks; what lacks runs without effect."""
        stages = self._config.pipeline_model_parallel_size
        lacking = -len(work) % stages if len(self._chunks) > 1 else 0
        last = work[-1]
        return [*work, *[dataclasses.replace(last, counts=False)] * lacking]

    def _step(
        self, stream: Iterator[tuple[int, int, Work]], model: nn.Module, loss: LossOf
    ) -> tuple[Tensor, Callable[..., Any]]:
        chunk, index, part = next(stream)
        batch = part.batch
        if self._replay is not None:
            tokens = own_tokens(batch.tokens, self._scoring.sequence_parallel)
            self._replay.begin(chunk, part.routes, tokens)
        shown = {} if part.media is None else {"media": part.media}
        output = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.mask,
            packed_seq_params=batch.ends,
            padding_mask=self._padding_mask(batch, chunk),
            output_processor=scored,
            output_processor_context=(self._scoring, batch),
            **shown,
        )
        if self._replay is not None:
            self._replay.end(chunk)

        def outcome(scores: Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return scores
            found = loss(index, scores) if part.counts else scores.sum() * 0.0
            return found, torch.zeros((), dtype=torch.int, device=scores.device), {}

        return output, outcome

    def _padding_mask(self, batch: PackedSequence, chunk: int) -> Tensor | None:
        if not self._balances:
            return None
        first = parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=chunk if len(self._chunks) > 1 else None
        )
        if first or not self._scoring.sequence_parallel:
            return batch.idle
        # GPTModel cuts the mask for tensor ranks on its first stage only.
        return scatter_to_sequence_parallel_region(batch.idle.transpose(0, 1).contiguous()).transpose(0, 1)


def _numbered(work: Sequence[Work], chunk: int) -> Iterator[tuple[int, int, Work]]:
    for index, part in enumerate(work):
        yield chunk, index, part


def _share_of_marked(work: Sequence[Work]) -> Callable[[], Tensor]:
    """Scale of balancing losses.

    Megatron gives them the weight of all tokens of a micro-batch that are not idle; the gradient is divided
    by the count of the policy's loss. Times marked response tokens / tokens, their mean keeps its weight
    against the policy's mean loss.
    """
    parts = [part for part in work if part.counts]
    tokens = sum(part.batch.busy for part in parts)
    share = sum(part.batch.marked for part in parts) / tokens if tokens else 0.0
    return lambda: torch.tensor([share])
