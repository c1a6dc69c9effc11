"""Placeholder tokens against media items: where each item sits, and a sequence's long and short form.

In the long (expanded) form an image of n tokens is n placeholders, which is what the model sees; in the short
(collapsed) form it is one, which is what text-level tools see. Every mismatch is an error that names the
item.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omni_processor.errors import SpanMismatch
from omni_processor.families.base import Family
from omni_processor.sample import MediaItem, Span


def match_spans(
    tokens: np.ndarray, media: Sequence[MediaItem], family: Family, side: str = "the tokens"
) -> list[Span]:
    """The span of every item, in order; the placeholders must be exactly those the items take.

    Raises:
        SpanMismatch: a run of placeholders too short, too long, of another kind, missing or left over.
    """
    spans: list[Span] = []
    for kind, start, end in _runs(tokens, family):
        while start < end:
            index = len(spans)
            if index == len(media):
                raise SpanMismatch(
                    f"{side} hold {end - start} {kind} placeholders at [{start}:{end}] beyond the "
                    f"{len(media)} media items: neither text nor a sampler may write them (see reserved_ids)",
                    item=f"{kind} {index}",
                )
            name, need = _describe(media, index, family)
            if media[index]["kind"] != kind or need > end - start:
                raise SpanMismatch(
                    f"it takes {need} {media[index]['kind']} tokens, but {side} hold {end - start} {kind} "
                    f"placeholders at [{start}:{end}]",
                    item=name,
                )
            spans.append(Span(kind, start, start + need, index))
            start += need
    if len(spans) < len(media):
        name, need = _describe(media, len(spans), family)
        raise SpanMismatch(f"it takes {need} tokens, but {side} hold no placeholders for it", item=name)
    return spans


def expand(tokens: np.ndarray, media: Sequence[MediaItem], family: Family) -> np.ndarray:
    """Short to long form: the k-th placeholder becomes as many as the k-th item takes. int32.

    Raises:
        SpanMismatch: not one placeholder an item.
    """
    tokens = np.asarray(tokens, np.int32)
    repeats = np.ones(len(tokens), np.int64)
    index = 0
    for kind, start, end in _runs(tokens, family):
        for position in range(start, end):
            if index == len(media) or media[index]["kind"] != kind:
                held = "nothing" if index == len(media) else f"a {media[index]['kind']} item"
                raise SpanMismatch(
                    f"the text has a {kind} placeholder at token {position}, where the media list holds "
                    f"{held}",
                    item=f"{kind} {index}",
                )
            repeats[position] = family.item_tokens(media[index])
            index += 1
    if index < len(media):
        name, _ = _describe(media, index, family)
        raise SpanMismatch(
            f"the text has only {index} placeholders for {len(media)} media items: does the chat template "
            "render media?",
            item=name,
        )
    return np.repeat(tokens, repeats)


def collapse(tokens: np.ndarray, media: Sequence[MediaItem] | None, family: Family) -> np.ndarray:
    """Long to short form, int32: one placeholder an item (without `media`: one a run of placeholders)."""
    tokens = np.asarray(tokens, np.int32)
    keep = np.ones(len(tokens), bool)
    if media is None:
        extents = [(start, end) for _, start, end in _runs(tokens, family)]
    else:
        extents = [(span.start, span.end) for span in match_spans(tokens, media, family)]
    for start, end in extents:
        keep[start + 1 : end] = False
    return tokens[keep]


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


def _runs(tokens: np.ndarray, family: Family) -> list[tuple[str, int, int]]:
    """(kind, start, end) of every maximal run of equal placeholders, in order."""
    tokens = np.asarray(tokens)
    runs = []
    for kind, token in family.placeholder_ids.items():
        edges = np.flatnonzero(np.diff(tokens == token, prepend=False, append=False))
        runs.extend((kind, int(start), int(end)) for start, end in edges.reshape(-1, 2))
    return sorted(runs, key=lambda run: run[1])


def _describe(media: Sequence[MediaItem], index: int, family: Family) -> tuple[str, int]:
    return f"{media[index]['kind']} {index}", family.item_tokens(media[index])
