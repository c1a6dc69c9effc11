"""Whether a subscriber's layout can be filled from the ranks' layouts, found out before anything moves."""

from collections import OrderedDict

from dcs.errors import LayoutMismatch
from dcs.layout import Layout

_REMEMBERED = 1024


class Fitting:
    """Remembers the verdict on each pair of a subscriber's layout and the ranks' layouts."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[tuple[str, tuple[str, ...]], LayoutMismatch | None] = OrderedDict()

    def mismatch(
        self,
        layout: Layout,
        fingerprint: str,
        ranks: tuple[tuple[str, ...], tuple[Layout, ...]],
        who: str,
    ) -> LayoutMismatch | None:
        """The first tensor that the ranks cannot fill, as an error, or None; `who` names the subscriber."""
        fingerprints, layouts = ranks
        if fingerprint in fingerprints:
            return None
        key = (fingerprint, fingerprints)
        if key not in self._verdicts:
            self._verdicts[key] = _plan(layout, layouts)
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
        found = self._verdicts[key]
        if found is None:
            return None
        return LayoutMismatch(f"{who}: {found}", found.tensor, found.got, found.expected)


def _plan(layout: Layout, ranks: tuple[Layout, ...]) -> LayoutMismatch | None:
    from dcs.plan.planner import plan  # needs numpy, which a coordinator of equal layouts does without

    try:
        plan(layout, ranks)
    except LayoutMismatch as error:
        return error
    return None
