"""What a training backend does for the actor: a few verbs, each on one micro-batch or one step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from relax.algorithms.spec import LossInputs, LossOutputs

LossFn = Callable[[LossInputs], LossOutputs]


@dataclass(frozen=True)
class Packed:
    """One micro-batch, ragged: `rows` samples laid end to end.

    Attributes:
        tokens: int64 [total], prompt and response of each row, row after row.
        offsets: int64 [rows+1], where each row of `tokens` starts.
        prompt_lengths: int64 [rows], tokens of a row before its response; at least 1.
        fields: response-aligned columns, each [total response], rows in the same order: `loss_mask` (uint8),
            `rollout_logprobs`, `advantages`, `reference_logprobs` (float32).
        media: a row's media items (what omni_processor made), empty for a row without. Their arrays are
            read-only views of the bus's memory: copy what has to outlive the call.
        routes: int16 or int32 [total, routing layers, top_k], the experts that each token was sent to when it
            was sampled, to be replayed; -1 (all top_k of them) on the last token of every row and wherever
            there is no route. None routes freely. See `relax.backends.routes`.
        dummy: it only keeps ranks in step: a copy of a real row with `loss_mask` 0. A rank runs forward and
            backward on it with `masked_out` for a loss; it is no part of counts, metrics, auxiliary losses
            or expert statistics.
    """

    tokens: Tensor
    offsets: Tensor
    prompt_lengths: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    media: Sequence[Sequence[Mapping[str, Any]]] = ()
    routes: Tensor | None = None
    dummy: bool = False

    @property
    def rows(self) -> int:
        return len(self.prompt_lengths)

    @property
    def response_offsets(self) -> Tensor:
        """int64 [rows+1], where each row of the response-aligned columns starts."""
        lengths = self.offsets.diff() - self.prompt_lengths
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@dataclass(frozen=True)
class StepStats:
    """What an optimizer step did. `skipped` says the gradient was not finite and nothing was changed."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass
class StateTree:
    """Everything a rank needs to go on bit for bit: named tensors, and plain JSON data beside them."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]


class TrainBackend(Protocol):
    """One rank of the trainer.

    Logprobs are of the distribution the engine samples: temperature applied, and no probability for tokens
    that only stand for media (`relax.backends.models.unsampled_tokens`). Where a response shows such a token,
    in an observation, its entry is 0.
    """

    def forward(self, batch: Packed) -> Tensor:
        """float32 [total response]: the logprob of each response token, no gradient."""
        ...

    def forward_backward(self, batch: Packed, loss: LossFn) -> LossOutputs:
        """Accumulate the gradient of the unscaled loss sum of one micro-batch."""
        ...

    def optim_step(self, scale: float) -> StepStats:
        """Scale the accumulated gradient once, clip, step, zero it."""
        ...

    def discard_gradient(self) -> None:
        """Forget the accumulated gradient: the step at hand is given up."""
        ...

    def supervised_step(self, batch: Packed, lr: float) -> float:
        """One step of cross-entropy on the tokens `loss_mask` marks, before RL; returns the mean loss."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, tokenizer) that transformers loads with the same logits."""
        ...


class HoldsWeights(Protocol):
    """A trainer whose weights are whole in its process; those of many ranks are published shard by shard."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by Hugging Face name, as an engine takes them; tied weights once."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A trainer whose state fits into the memory of its process, as that of one rank does."""

    def state(self) -> StateTree: ...

    def load_state(self, state: StateTree) -> None: ...


@runtime_checkable
class Saves(Protocol):
    """A trainer whose state goes to files and comes from them, perhaps by many ranks."""

    def save(self, folder: Path) -> None:
        """Write all it needs to go on, bit for bit, into a folder of its own."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, perhaps on as many other ranks, or from the state of a single one."""
        ...


def ragged(rows: Sequence[np.ndarray | Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lay rows end to end: (values [total], offsets int64 [rows+1])."""
    arrays = [np.asarray(row) for row in rows]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return torch.as_tensor(values).to(dtype), torch.as_tensor(offsets)


def felt(loss: Tensor, logprobs: Tensor) -> Tensor:
    """The loss, with a gradient that is NaN where the loss is NaN or infinite.

    Where a loss clips, its gradient is 0 at what it clips, a NaN too: the step would be taken, and the loss
    of it would be NaN. A finite loss keeps its gradient.
    """
    return loss + (loss.detach() * 0.0) * logprobs.sum()


def masked_out(inputs: LossInputs) -> LossOutputs:
    """The loss of a dummy micro-batch: 0 with a gradient of exactly 0, and no count."""
    return LossOutputs(torch.where(inputs.mask != 0, inputs.logprobs, 0.0).sum(), 0.0)
