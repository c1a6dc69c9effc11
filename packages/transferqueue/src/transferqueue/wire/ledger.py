"""The account of a task on the wire: ids as runs and every reason once, so that millions of samples which one
filter dropped are a few bytes.
"""

from collections.abc import Iterable

from ..errors import InvalidArgument
from .messages import LedgerPage

MAX_REASON_BYTES = 1024  # of UTF-8; it is kept for as long as the partition, whatever becomes of the sample


def cut_reason(reason: str) -> str:
    """As much of a reason as is kept. InvalidArgument if it is no text."""
    if not isinstance(reason, str):
        raise InvalidArgument(f"the reason of a drop is a {type(reason).__name__}; give text")
    try:
        raw = reason[: MAX_REASON_BYTES + 1].encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the reason of a drop cannot be sent: {error}") from error
    return reason if len(raw) <= MAX_REASON_BYTES else raw[:MAX_REASON_BYTES].decode(errors="ignore")


def runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Ids in their order as half-open ``(start, stop)``, one for ids that follow each other."""
    found: list[tuple[int, int]] = []
    start = stop = -1
    for sample in ids:
        if sample == stop:
            stop += 1
            continue
        if start >= 0:
            found.append((start, stop))
        start, stop = sample, sample + 1
    if start >= 0:
        found.append((start, stop))
    return found


def ids_of(found: Iterable[tuple[int, int]]) -> list[int]:
    """What `runs` was made of."""
    return [sample for start, stop in found for sample in range(start, stop)]


def page_of(
    acked: list[tuple[int, int]],
    dropped: Iterable[tuple[int, str]],
    leased: Iterable[int],
    pending: Iterable[int],
) -> LedgerPage:
    """The page of a task: intervals of what it has acked, dropped ids with their reasons, and the others."""
    by_reason: dict[str, list[int]] = {}
    for sample, reason in dropped:
        by_reason.setdefault(reason, []).append(sample)
    return LedgerPage(
        acked, [(why, runs(samples)) for why, samples in by_reason.items()], runs(leased), runs(pending)
    )


def dropped_of(page: LedgerPage) -> dict[int, str]:
    """Each dropped id with its reason."""
    return {sample: why for why, found in page.dropped for sample in ids_of(found)}
