"""Where what a row is shown stands among its tokens, and the rotary positions that follow from it.

As transformers' `get_rope_index` of the thinker places them, with two differences that a trainer needs: only
the places that belong to a row's items are pictures and sounds, any other such token (that a tool printed, or
that marks a beginning) is text; and it works on a row alone, so that padding changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.backends.train.errors import BatchError
from relax.backends.train.omni.items import Media, Picture, Shown, Sound, shown_in
from relax.backends.train.visuals import patch_values, require_patches

Places = NDArray[np.int64]
Positions = NDArray[np.float32]


FARTHEST = 2**24
"""Positions are float32, which tells whole numbers apart up to here."""


@dataclass(frozen=True)
class Reading:
    """What a thinker's config says about its placeholders.

    Attributes:
        image, video, audio: token ids that stand for a piece of each.
        merge: patches on a side that one token stands for.
        values: of a patch.
        bins: of a mel spectrogram.
        window: mel frames in half a chunk of the audio tower (`n_window`).
        rate: positions that a second of video takes.
    """

    image: int
    video: int
    audio: int
    merge: int
    values: int
    bins: int
    window: int
    rate: float

    @classmethod
    def of(cls, config: Any) -> "Reading":
        """From a Qwen3OmniMoeThinkerConfig."""
        return cls(
            image=int(config.image_token_id),
            video=int(config.video_token_id),
            audio=int(config.audio_token_id),
            merge=int(config.vision_config.spatial_merge_size),
            values=patch_values(config.vision_config),
            bins=int(config.audio_config.num_mel_bins),
            window=int(config.audio_config.n_window),
            rate=config.position_id_per_seconds,
        )

    def picture_tokens(self, picture: Picture) -> int:
        time, height, width = picture.grid
        return time * (height // self.merge) * (width // self.merge)

    def sound_tokens(self, sound: Sound) -> int:
        return sound_tokens(sound.frames, self.window)


def sound_tokens(frames: int, window: int) -> int:
    """Tokens that a sound takes: three convolutions of stride 2 over each chunk of 2 x window mel frames.

    transformers writes 13 for a whole chunk whatever the window is, so that is what processors expand.
    """
    chunks, rest = divmod(frames, 2 * window)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return 13 * chunks + rest


@dataclass(frozen=True)
class Placed:
    """Where one item stands in its row: int64 places of the tokens of its picture and of its sound."""

    picture: Places
    sound: Places


@dataclass(frozen=True)
class Row:
    """Attributes:
    placed: for each item of the row, in order.
    positions: float32 [3, tokens]: time, height and width; all equal where there is text or sound.
    """

    placed: tuple[Placed, ...]
    positions: Positions


def place(row: int, tokens: Places, items: Sequence[Shown], reading: Reading) -> Row:
    """Place the items of a row, each at the next run of its tokens that is long enough.

    Args:
        row: its number, for messages.
        tokens: int64 [tokens], placeholders expanded.
        items: what the row is shown, in order.
        reading: of the model.

    Raises:
        BatchError: the placeholders do not hold the items.
    """
    placed: list[Placed] = []
    positions = np.empty((3, len(tokens)), np.float32)
    cursor, following = 0, np.float32(0)
    for number, shown in enumerate(items):
        _require_sized(row, number, shown, reading)
        start, end = _run(row, tokens, cursor, number, shown, reading)
        positions[:, cursor:start] = _text(start - cursor, following)
        following = np.float32(following + (start - cursor))
        positions[:, start:end], following = _positions(shown, following, reading)
        window = tokens[start:end]
        visual = reading.video if shown.kind != "image" else reading.image
        placed.append(
            Placed(np.flatnonzero(window == visual) + start, np.flatnonzero(window == reading.audio) + start)
        )
        cursor = end
    positions[:, cursor:] = _text(len(tokens) - cursor, following)
    return Row(tuple(placed), positions)


def _require_sized(row: int, number: int, shown: Shown, reading: Reading) -> None:
    """See that the towers take it."""
    if (picture := shown.picture) is not None:
        names = (
            ("pixel_values", "image_grid_thw")
            if shown.kind == "image"
            else ("pixel_values_videos", "video_grid_thw")
        )
        require_patches(row, names, picture.pixels, np.asarray([picture.grid]), reading)
        last = (picture.grid[0] - 1) * (picture.seconds or 0.0) * reading.rate
        if last >= FARTHEST:
            raise BatchError(
                f"item {number} of row {row}, {shown.kind}, has {picture.grid[0]} steps in time of "
                f"{picture.seconds:g} seconds each, which puts the last one at position {last:g}; below "
                f"{FARTHEST} were expected, as positions beyond it are no longer told apart"
            )
    if (sound := shown.sound) is not None and len(sound.mel) != reading.bins:
        raise BatchError(
            f"item {number} of row {row}, {shown.kind}, has {len(sound.mel)} mel bins; this model hears "
            f"{reading.bins}"
        )


def _text(count: int, first: np.float32) -> Positions:
    return np.arange(count).astype(np.float32) + first


def _run(
    row: int, tokens: Places, cursor: int, number: int, shown: Shown, reading: Reading
) -> tuple[int, int]:
    visual = reading.image if shown.kind == "image" else reading.video
    pictured = 0 if shown.picture is None else reading.picture_tokens(shown.picture)
    sounded = 0 if shown.sound is None else reading.sound_tokens(shown.sound)
    count = pictured + sounded
    wanted = [token for token, size in ((visual, pictured), (reading.audio, sounded)) if size]
    places = np.flatnonzero(np.isin(tokens[cursor:], wanted)) + cursor
    fits = places[count - 1 :] - places[: max(0, len(places) - count + 1)] == count - 1
    if len(wanted) > 1:
        seen = np.concatenate([[0], (tokens[places] == visual).cumsum()])
        fits &= seen[count:] - seen[: max(0, len(seen) - count)] == pictured
    if not fits.any():
        ids = " and ".join(
            f"{size} {word} tokens (id {token})"
            for word, token, size in (
                ("image" if shown.kind == "image" else "video", visual, pictured),
                ("audio", reading.audio, sounded),
            )
            if size
        )
        raise BatchError(
            f"item {number} of row {row}, {shown.kind}, needs a run of {ids}, but the row has "
            f"{len(places)} such tokens from place {cursor} on; expand the prompt with its processor"
        )
    start = int(places[fits.argmax()])
    return start, start + count


def _positions(shown: Shown, first: np.float32, reading: Reading) -> tuple[Positions, np.float32]:
    """float32 [3, tokens] of an item that begins at `first`, and where what follows it begins."""
    if shown.picture is None:
        assert shown.sound is not None
        found = _text(reading.sound_tokens(shown.sound), first)
        return np.broadcast_to(found, (3, len(found))), np.float32(found[-1] + 1)
    seen = _grid(shown.picture, first, reading)
    if shown.sound is None:
        return seen, np.float32(seen.max() + 1)
    # By time, the picture before the sound that comes with it.
    heard = _text(reading.sound_tokens(shown.sound), first)
    of_seen = np.arange(seen.shape[1]) + np.searchsorted(heard, seen[0], side="left")
    found = np.empty((3, seen.shape[1] + len(heard)), np.float32)
    is_seen = np.zeros(found.shape[1], np.bool_)
    is_seen[of_seen] = True
    found[:, is_seen] = seen
    found[:, ~is_seen] = heard
    # What follows begins behind what is left of the one when the other is over, as published; a tall frame
    # whose rows count further than that does not matter.
    left = np.flatnonzero(is_seen != is_seen[-1])[-1] + 1
    return found, np.float32(found[:, left:].max() + 1)


def _grid(picture: Picture, first: np.float32, reading: Reading) -> Positions:
    time, height, width = picture.grid
    height, width = height // reading.merge, width // reading.merge
    step = np.float32(1.0 if picture.seconds is None else picture.seconds)
    moments = np.arange(time).astype(np.float32) * step * np.float32(reading.rate)
    axes = np.meshgrid(moments, np.arange(height), np.arange(width), indexing="ij")
    return np.stack([axis.ravel() for axis in axes]).astype(np.float32) + first


def require(rows: Sequence[Places], media: Media, reading: Reading) -> None:
    """See that rows, int64 [tokens] each, hold the items they are shown.

    Raises:
        BatchError: they do not.
    """
    for number, (tokens, items) in enumerate(zip(rows, media, strict=True)):
        place(number, tokens, shown_in(number, items), reading)
