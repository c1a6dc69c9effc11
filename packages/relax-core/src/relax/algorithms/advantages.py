"""Advantages from the rewards of a group, found by the group's id and never by position."""

import torch
from torch import Tensor

from relax.algorithms.errors import AlgorithmError


def group_advantages(
    rewards: Tensor, groups: Tensor, *, normalize_std: bool = True, std_eps: float = 1e-4
) -> Tensor:
    """(r - mean) / (std + eps) within each group (GRPO, eq. 2 of arXiv 2402.03300), std with ddof 1.

    Args:
        rewards: [rows], finite.
        groups: int64 [rows], the id of each row's group, in any order.
        normalize_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
        std_eps: added to the standard deviation.

    Returns:
        float64 [rows]. Exactly 0 in a group of one and in a group whose rewards are all equal.

    Raises:
        AlgorithmError: a reward is not finite: there is no ranking to learn from, so the group must be
            dropped before.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise AlgorithmError(
            f"rewards {list(rewards.shape)} and groups {list(groups.shape)}: expected one of each a row, "
            f"shape [rows]"
        )
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise AlgorithmError(
            f"reward of row {bad[0]} (group {int(groups[bad[0]])}) is {float(rewards[bad[0]])}, and "
            f"{len(bad)} of {len(rewards)} rewards are not finite: expected numbers; let the reward drop "
            "such a group with a reason"
        )
    _, of_row = torch.unique(groups, return_inverse=True)
    size = torch.bincount(of_row).double()
    rewards = rewards.double()
    # Measured from the group's least reward, equal rewards give exactly 0, which the mean's rounding would
    # spoil.
    least = size.new_full(size.shape, float("inf")).scatter_reduce(0, of_row, rewards, "amin")
    above = rewards - least[of_row]
    mean = size.new_zeros(size.shape).index_add(0, of_row, above) / size
    centred = above - mean[of_row]
    if not normalize_std:
        return centred
    variance = size.new_zeros(size.shape).index_add(0, of_row, centred.square()) / (size - 1).clamp(min=1)
    return centred / (variance.sqrt() + std_eps)[of_row]


def spread_over_tokens(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Give each sampled token its row's value: [rows] -> float32 [tokens], 0 where the mask is 0."""
    of_token = torch.repeat_interleave(values.float(), offsets.diff(), output_size=len(mask))
    return of_token.masked_fill(mask == 0, 0.0)
