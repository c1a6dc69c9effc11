"""How units of some length are split over ranks and micro-batches: pure functions of lists of lengths.

Every function returns lists of positions in `lengths`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

_EXCHANGES = 4


def split_equally(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Splits units over ranks, the same number for each (or one more for some, where they do not divide),
    with sums as equal as can be: the balanced largest differencing method, then exchanges.

    Units are dealt in rows of `ranks`, longest first; the two rows whose sums differ most are merged, largest
    sum to smallest, until one is left. As every row gives each rank one unit, a single long one may keep a
    rank too full: then the fullest and the emptiest rank exchange two units, as long as that helps.
    """
    order = sorted(range(len(lengths)), key=lambda unit: -lengths[unit])
    rows: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for at in range(0, len(order), ranks):
        row = [(lengths[unit], [unit]) for unit in order[at : at + ranks]]
        row += [(0, [])] * (ranks - len(row))  # an absent unit
        rows.append((row[-1][0] - row[0][0], at, row))
    if not rows:
        return [[] for _ in range(ranks)]
    heapify(rows)
    while len(rows) > 1:
        _, at, first = heappop(rows)
        _, _, second = rows[0]
        merged = [
            (sum_a + sum_b, units_a + units_b)
            for (sum_a, units_a), (sum_b, units_b) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapreplace(rows, (merged[-1][0] - merged[0][0], at, merged))
    return _exchanged([units for _, units in rows[0][2]], lengths)


def _exchanged(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Exchanges two units of the fullest and the emptiest part until that helps no more, at most a few times
    a part.
    """
    sums = [sum(lengths[unit] for unit in units) for units in parts]
    for _ in range(_EXCHANGES * len(parts)):
        fullest, emptiest = (sums.index(f(sums)) for f in (max, min))
        wanted = (sums[fullest] - sums[emptiest]) / 2  # longer by so much, the two would be equal
        others = sorted((lengths[unit], unit) for unit in parts[emptiest])
        found: tuple[float, int, int] | None = None
        for unit in parts[fullest]:
            at = bisect_left(others, (lengths[unit] - wanted, -1))
            for length, other in others[max(0, at - 1) : at + 1]:
                gain = lengths[unit] - length
                if 0 < gain < 2 * wanted and (found is None or abs(gain - wanted) < found[0]):
                    found = (abs(gain - wanted), unit, other)
        if found is None:
            break
        _, unit, other = found
        gain = lengths[unit] - lengths[other]
        parts[fullest][parts[fullest].index(unit)] = other
        parts[emptiest][parts[emptiest].index(other)] = unit
        sums[fullest] -= gain
        sums[emptiest] += gain
    return [sorted(units) for units in parts]


def bins_needed(lengths: Sequence[int], budget: int) -> int:
    """Bins that best-fit decreasing needs for the budget; a unit above it takes one alone."""
    return len(_best_fit(lengths, budget))


def pack(lengths: Sequence[int], budget: int, bins: int) -> list[list[int]]:
    """Packs units into exactly `bins` bins within the budget (a unit above it alone), evenly filled. Bins are
    empty only where there are fewer units than bins. `bins` must be at least `bins_needed`.
    """
    spread = _spread(lengths, bins)
    fits = all(len(units) <= 1 or sum(lengths[u] for u in units) <= budget for units in spread)
    packed = spread if fits else _best_fit(lengths, budget)
    return split_to(packed, lengths, bins)


def split_to(packed: list[list[int]], lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Splits the longest bins of several units until there are `bins` of them, or none is left to split; adds
    empty ones for the rest.
    """
    whole = [units for units in packed if units]
    heap = [(-sum(lengths[u] for u in units), at, units) for at, units in enumerate(whole)]
    heapify(heap)
    done: list[list[int]] = []
    while heap and len(heap) + len(done) < bins:
        _, _, units = heappop(heap)
        if len(units) == 1:
            done.append(units)
            continue
        for half in _spread([lengths[u] for u in units], 2):
            part = [units[position] for position in half]
            heappush(heap, (-sum(lengths[u] for u in part), part[0] + len(whole), part))
    found = done + [units for _, _, units in heap]
    found.sort(key=lambda units: units[0])
    return found + [[] for _ in range(bins - len(found))]


def _spread(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Longest first, each to the least filled bin."""
    heap: list[tuple[int, int]] = [(0, at) for at in range(bins)]
    found: list[list[int]] = [[] for _ in range(bins)]
    for unit in sorted(range(len(lengths)), key=lambda unit: -lengths[unit]):
        filled, at = heap[0]
        found[at].append(unit)
        # A bin with a unit of length 0 still counts as taken: no bin stays empty while another has two.
        heapreplace(heap, (filled + max(lengths[unit], 1), at))
    return [sorted(units) for units in found]


def _best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: longest first, each to the fullest bin that has room."""
    found: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending (room, bin)
    for unit in sorted(range(len(lengths)), key=lambda unit: -lengths[unit]):
        length = lengths[unit]
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, bin_ = rooms.pop(at)
            found[bin_].append(unit)
        else:
            room, bin_ = budget, len(found)
            found.append([unit])
        insort(rooms, (room - length, bin_))
    return [sorted(units) for units in found]
