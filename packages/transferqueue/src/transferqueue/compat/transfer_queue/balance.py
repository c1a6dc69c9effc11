"""Splitting weights over bins so that the sums are close: the largest differencing method (Karmarkar and
Karp, 1982).
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from .errors import InvalidRequest

Bins = list[tuple[int, list[int]]]  # (sum, items) of every bin, heaviest first


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Positions of `seqlen_list` in `k_partitions` lists whose sums are close, each in ascending order.

    Args:
        seqlen_list: the weights.
        k_partitions: how many lists.
        equal_size: every list gets the same number of items; the number of weights must allow it.

    Raises:
        InvalidRequest: fewer weights than lists, or not a multiple where sizes must be equal.
    """
    count = len(seqlen_list)
    if not 1 <= k_partitions <= count:
        raise InvalidRequest(f"{count} sequences cannot be split into {k_partitions} non-empty lists")
    if equal_size and count % k_partitions:
        raise InvalidRequest(f"{count} sequences cannot be split into {k_partitions} lists of equal size")
    ascending = sorted(range(count), key=lambda at: (seqlen_list[at], at))
    step = k_partitions if equal_size else 1
    # Each entry is a partial solution; those that differ most in their sums are joined first, heavy to light.
    heap = []
    for order, start in enumerate(range(0, count, step)):
        items = ascending[start : start + step]
        bins: Bins = [(seqlen_list[at], [at]) for at in items] + [(0, [])] * (k_partitions - len(items))
        bins.sort(key=lambda one: one[0], reverse=True)
        heap.append((bins[-1][0] - bins[0][0], order, bins))
    heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, wide = heappop(heap)
        _, _, other = heappop(heap)
        joined = [
            (heavy[0] + light[0], heavy[1] + light[1])
            for heavy, light in zip(wide, reversed(other), strict=True)
        ]
        joined.sort(key=lambda one: one[0], reverse=True)
        heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
        order += 1
    return _filled([sorted(items) for _, items in heap[0][2]], seqlen_list)


def _filled(lists: list[list[int]], weights: Sequence[int]) -> list[list[int]]:
    """Gives a list that stayed empty (beside weights of 0) the lightest item of the longest."""
    for one in lists:
        if not one:
            longest = max(lists, key=len)
            lightest = min(longest, key=lambda at: weights[at])
            longest.remove(lightest)
            one.append(lightest)
    return lists
