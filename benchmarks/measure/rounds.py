"""Sides measured in turn: whatever slows the machine for a while slows all of them alike."""

from collections.abc import Callable, Mapping

Round = Callable[[], Mapping[str, float]]
"""Does one round of a side; returns its figures by name."""
Figures = dict[str, list[float]]
"""A side's figures: name -> one value a round."""


def in_turn(sides: Mapping[str, Round], rounds: int, warm_up: int = 0) -> dict[str, Figures]:
    """Every side once a round; the side that begins changes from round to round.

    Args:
        sides: name -> what does one round.
        rounds: that count.
        warm_up: rounds before them, which do not.

    Returns:
        name -> its figures.
    """
    names = list(sides)
    figures: dict[str, Figures] = {name: {} for name in names}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for figure, value in sides[name]().items():
                if turn >= warm_up:
                    figures[name].setdefault(figure, []).append(value)
    return figures
