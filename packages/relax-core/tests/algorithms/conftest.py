from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from relax.algorithms.spec import LossInputs, LossOutputs
from torch import Tensor

torch.set_num_threads(1)

ORACLE = Path(__file__).parent / "oracle"


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], dict[str, np.ndarray]]:
    """A public trainer's numbers by case: padded [8, 12] columns, `loss`, `grad`, settings in `config`."""

    def load(case: str) -> dict[str, np.ndarray]:
        with np.load(ORACLE / f"{case}.npz", allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    return load


@pytest.fixture(scope="session")
def flatten() -> Callable[..., tuple[LossInputs, Tensor]]:
    """Make padded oracle columns ragged: (inputs, bool [8, 12] of the positions kept, holes and all)."""

    def flat(case: dict[str, np.ndarray], *, reference: bool = False) -> tuple[LossInputs, Tensor]:
        mask = torch.as_tensor(case["mask"])
        # A row ends with its last sampled token: what is 0 before it is a hole, what is 0 after it padding.
        keep = (mask.flip(1).cumsum(1) > 0).flip(1)
        advantages = torch.as_tensor(case["advantages"])
        if advantages.dim() == 1:
            advantages = advantages[:, None].expand(mask.shape)
        lengths = keep.sum(1)
        inputs = LossInputs(
            logprobs=torch.as_tensor(case["logp"])[keep].requires_grad_(),
            old_logprobs=torch.as_tensor(case["old_logp"])[keep],
            advantages=advantages[keep],
            mask=mask[keep].to(torch.uint8),
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            reference_logprobs=torch.as_tensor(case["ref_logp"])[keep] if reference else None,
        )
        return inputs, keep

    return flat


@pytest.fixture(scope="session")
def take_rows() -> Callable[[LossInputs, Sequence[int]], LossInputs]:
    """Some rows of a batch, in order, as the micro-batch they make; the gradient flows to the batch."""

    def take(inputs: LossInputs, rows: Sequence[int]) -> LossInputs:
        starts, ends = inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist()
        tokens = torch.cat([torch.arange(starts[row], ends[row]) for row in rows] or [torch.arange(0)])
        lengths = torch.tensor([ends[row] - starts[row] for row in rows], dtype=torch.int64)
        columns = {
            name: column[tokens]
            for name in ("logprobs", "old_logprobs", "advantages", "mask", "reference_logprobs")
            if (column := getattr(inputs, name)) is not None
        }
        return replace(inputs, **columns, offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    return take


@pytest.fixture(scope="session")
def mean_loss() -> Callable[[Iterable[LossOutputs]], Tensor]:
    """What the trainer makes of a step's micro-batches: the sum of the sums over that of the counts."""

    def mean(outputs: Iterable[LossOutputs]) -> Tensor:
        parts = list(outputs)
        return torch.stack([part.loss for part in parts]).sum() / sum(part.count for part in parts)

    return mean


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., LossInputs]:
    """A random ragged batch of the given row lengths, with holes in its masks."""

    def make(lengths: Sequence[int], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> LossInputs:
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)

        def normal(scale: float) -> Tensor:
            return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

        logprobs = -normal(1).abs()
        mask = (torch.rand(tokens, generator=generator) < 0.8).to(torch.uint8)
        return LossInputs(
            logprobs=logprobs.clone().to(dtype).requires_grad_(),
            old_logprobs=(logprobs + normal(0.3)).to(dtype),
            advantages=(normal(1) * mask).to(dtype),
            mask=mask,
            offsets=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
            reference_logprobs=(logprobs + normal(0.3)).to(dtype),
        )

    return make
