"""Placeholder tokens against media items: where each item sits, and a sequence's long and short form.

In the long (expanded) form an image of n tokens is n placeholders, which is what the model sees; in the short
(collapsed) form it is one, which is what text-level tools see. A video may take more than its placeholders:
times between its frames, marks around its sound. Every mismatch is an error that names the item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omni_processor.errors import SpanMismatch
from omni_processor.families.base import Family
from omni_processor.sample import MediaItem, Span


@dataclass(frozen=True, slots=True)
class Placed:
    """A span, and the places of its placeholders, int64."""

    span: Span
    places: np.ndarray


def match(
    tokens: np.ndarray, media: Sequence[MediaItem], family: Family, side: str = "the tokens"
) -> list[Placed]:
    """Where every item sits, in order; the placeholders must be exactly those the items take.

    Raises:
        SpanMismatch: a run of placeholders too short, too long, of another kind, missing or left over.
    """
    tokens = np.asarray(tokens)
    ids = list(family.placeholder_ids.values())
    places = np.flatnonzero(np.isin(tokens, ids)) if ids else np.empty(0, np.int64)
    kinds = {token: kind for kind, token in family.placeholder_ids.items()}
    placed: list[Placed] = []
    at = 0
    for index, item in enumerate(media):
        needed = family.placeholders(item)
        name = f"{item['kind']} {index}"
        if at == len(places):
            raise SpanMismatch(
                f"it takes {len(needed)} tokens, but {side} hold no placeholders for it", item=name
            )
        for run in np.split(needed, np.cumsum(family.runs(item))[:-1]):
            found = places[at : at + len(run)]
            whole = len(found) == len(run) and found[-1] - found[0] == len(run) - 1
            if not whole or not np.array_equal(tokens[found], run):
                start, end = _run_at(tokens, places, at)
                held = kinds[int(tokens[start])] if at < len(places) else item["kind"]
                raise SpanMismatch(
                    f"it takes {len(needed)} {item['kind']} tokens{_in_runs(family, item)}, but {side} hold "
                    f"{end - start} {held} placeholders at [{start}:{end}]",
                    item=name,
                )
            at += len(run)
        own = places[at - len(needed) : at]
        placed.append(Placed(Span(item["kind"], int(own[0]), int(own[-1]) + 1, index), own))
    if at < len(places):
        start, end = _run_at(tokens, places, at)
        kind = kinds[int(tokens[start])]
        raise SpanMismatch(
            f"{side} hold {end - start} {kind} placeholders at [{start}:{end}] beyond the {len(media)} media "
            "items: neither text nor a sampler may write them (see reserved_ids)",
            item=f"{kind} {len(media)}",
        )
    return placed


def match_spans(
    tokens: np.ndarray, media: Sequence[MediaItem], family: Family, side: str = "the tokens"
) -> list[Span]:
    """The span of every item, in order. Raises: SpanMismatch."""
    return [one.span for one in match(tokens, media, family, side)]


def expand(tokens: np.ndarray, media: Sequence[MediaItem], family: Family) -> np.ndarray:
    """Short to long form: the k-th placeholder becomes what the k-th item takes. int32.

    Raises:
        SpanMismatch: not one placeholder an item.
    """
    tokens = np.asarray(tokens, np.int32)
    kinds = {token: kind for kind, token in family.placeholder_ids.items()}
    places = np.flatnonzero(np.isin(tokens, list(kinds))) if kinds else np.empty(0, np.int64)
    parts: list[np.ndarray] = []
    cursor = 0
    for index, place in enumerate(places):
        kind = kinds[int(tokens[place])]
        if index == len(media) or media[index]["kind"] != kind:
            held = "nothing" if index == len(media) else f"a {media[index]['kind']} item"
            raise SpanMismatch(
                f"the text has a {kind} placeholder at token {place}, where the media list holds {held}",
                item=f"{kind} {index}",
            )
        whole = family.expansion(media[index])
        _check_apart(tokens, int(place), whole, family, f"{kind} {index}")
        parts += [tokens[cursor:place], whole]
        cursor = int(place) + 1
    if len(places) < len(media):
        raise SpanMismatch(
            f"the text has only {len(places)} placeholders for {len(media)} media items: does the chat "
            "template render media?",
            item=f"{media[len(places)]['kind']} {len(places)}",
        )
    return np.concatenate([*parts, tokens[cursor:]]).astype(np.int32)


def collapse(tokens: np.ndarray, media: Sequence[MediaItem] | None, family: Family) -> np.ndarray:
    """Long to short form, int32: one placeholder an item.

    Without `media` every run of placeholders counts as one item, which is so of images and sounds only.

    Raises:
        SpanMismatch: the tokens do not hold the items as they are expanded, or hold videos without `media`.
    """
    tokens = np.asarray(tokens, np.int32)
    if media is None:
        return _collapse_runs(tokens, family)
    parts: list[np.ndarray] = []
    cursor = 0
    for placed, item in zip(match(tokens, media, family), media, strict=True):
        whole = family.expansion(item)
        token = family.placeholder_ids[item["kind"]]
        ids = np.fromiter(family.placeholder_ids.values(), np.int32)
        start = placed.span.start - int(np.flatnonzero(np.isin(whole, ids))[0])
        if start < cursor or not np.array_equal(tokens[start : start + len(whole)], whole):
            raise SpanMismatch(
                f"what stands among its placeholders at [{placed.span.start}:{placed.span.end}] is not "
                "what it is expanded to",
                item=f"{item['kind']} {placed.span.item}",
            )
        parts += [tokens[cursor:start], np.array([token], np.int32)]
        cursor = start + len(whole)
    return np.concatenate([*parts, tokens[cursor:]]).astype(np.int32)


def check_agreement(
    trained: np.ndarray, engine: np.ndarray, media: Sequence[MediaItem], family: Family
) -> None:
    """The ids the trainer uses against the ids the engine ran on, both in long form.

    Raises:
        SpanMismatch: naming the first item whose spans differ, or the first differing token.
    """
    ours = match_spans(trained, media, family, "the trainer's tokens")
    theirs = match_spans(engine, media, family, "the engine's tokens")
    for mine, its in zip(ours, theirs, strict=True):
        if (mine.start, mine.end) != (its.start, its.end):
            raise SpanMismatch(
                f"it sits at [{mine.start}:{mine.end}] for the trainer and at [{its.start}:{its.end}] for "
                "the engine",
                item=f"{mine.kind} {mine.item}",
            )
    if len(trained) != len(engine):
        raise SpanMismatch(f"the trainer has {len(trained)} tokens, the engine {len(engine)}", item="tokens")
    differing = np.flatnonzero(np.asarray(trained) != np.asarray(engine))
    if differing.size:
        at = int(differing[0])
        raise SpanMismatch(
            f"token {at} is {int(trained[at])} for the trainer and {int(engine[at])} for the engine",
            item="tokens",
        )


def _check_apart(tokens: np.ndarray, place: int, whole: np.ndarray, family: Family, name: str) -> None:
    """Text that an item begins with must not stand right behind other text: both would be encoded as one."""
    if int(whole[0]) not in family.reserved_ids and (
        place == 0 or int(tokens[place - 1]) not in family.reserved_ids
    ):
        raise SpanMismatch(
            f"its placeholder at token {place} does not stand behind a special token such as "
            "<|vision_start|>, as the model's own chat template writes it",
            item=name,
        )


def _run_at(tokens: np.ndarray, places: np.ndarray, at: int) -> tuple[int, int]:
    """[start, end) of the run of equal placeholders from the at-th place on."""
    if at == len(places):
        return len(tokens), len(tokens)
    start = end = int(places[at])
    while end < len(tokens) and tokens[end] == tokens[start]:
        end += 1
    return start, end


def _in_runs(family: Family, item: MediaItem) -> str:
    runs = family.runs(item)
    return "" if len(runs) == 1 else f" in {len(runs)} runs of {runs[0]}"


def _collapse_runs(tokens: np.ndarray, family: Family) -> np.ndarray:
    keep = np.ones(len(tokens), bool)
    for kind, token in family.placeholder_ids.items():
        here = tokens == token
        if kind == "video" and here.any():
            raise SpanMismatch(
                "a video is not one run of placeholders: pass the media it was expanded with", item=kind
            )
        keep[1:] &= ~(here[1:] & here[:-1])
    return tokens[keep]
