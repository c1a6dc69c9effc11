"""From a source of any kind to the item a model is fed: resolved and planned first, decoded only then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_processor import images, sounds, sources, videos
from omni_processor.errors import Empty, UnsupportedModality
from omni_processor.families import Family
from omni_processor.sample import Budget, ItemPlan, Limits, MediaItem
from omni_processor.videos import Clip


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item before it is decoded.

    Attributes:
        plan: what it will become.
        key: equal for what becomes equal items of one model.
        make: decodes it.
    """

    plan: ItemPlan
    key: bytes
    make: Callable[[], MediaItem]


@dataclass(frozen=True, slots=True)
class Preparer:
    """What sources are prepared with: the family's rules, budget and limits."""

    family: Family
    budget: Budget
    limits: Limits

    def prepare(self, kind: str, source: Any, label: str, *, own_sound: bool = False) -> Prepared:
        """Resolve a source, read its header and plan it; nothing is decoded but frames given one by one.

        Args:
            kind: image, audio or video.
            source: where it is.
            label: which item of the sample, for messages.
            own_sound: whether a video comes with its own sound.

        Raises:
            UnsupportedModality: the model does not take it.
            MediaError: it cannot be used; see `omni_processor.errors`.
        """
        if kind not in self.family.placeholder_ids:
            raise UnsupportedModality(refusal(self.family, kind), item=label)
        if own_sound and not self.family.hears_videos:
            raise UnsupportedModality(
                f"the sound of a video was asked for (use_audio_in_video), but {self.family.name} hears "
                "none: leave it out, or use a model that does",
                item=label,
            )
        match kind:
            case "image":
                return self._image(source, label)
            case "audio":
                return self._sound(source, label)
        return self._video(source, label, own_sound)

    def _image(self, source: Any, label: str) -> Prepared:
        resolved = sources.resolve(source, self.limits, label)
        header = images.read_header(resolved, self.limits, label)
        plan = self.family.plan(header, self.budget)
        with images.decoder_errors(label, resolved.label):
            key = sources.content_digest(resolved, header.orientation)
        return Prepared(
            plan,
            b"image" + key,
            lambda: self.family.tensorize(images.decode(resolved, header, label), plan, label),
        )

    def _sound(self, source: Any, label: str) -> Prepared:
        rate = self.family.sampling_rate
        resolved = sounds.resolve(source, self.limits, rate, label)
        header = sounds.read_header(resolved, self.limits, label)
        plan = self.family.plan(header, self.budget)

        def make() -> MediaItem:
            samples = sounds.decode(resolved, header, rate, self.limits, label)
            return self.family.tensorize(samples, plan, label) | {"file": sounds.file_of(resolved)}

        return Prepared(plan, b"audio" + sounds.digest(resolved), make)

    def _video(self, source: Any, label: str, own_sound: bool) -> Prepared:
        encoded = videos.resolve(source, self.limits, self.family.fps, label)
        header = videos.read_header(encoded, self.limits, label)
        track = None
        if own_sound:
            if not header.sounds:
                raise Empty(
                    "the sound of this video was asked for (use_audio_in_video), and it has no sound track: "
                    "leave that out for it",
                    item=label,
                    source=encoded.label,
                )
            track = sounds.track_header(encoded, self.limits, label)
        plan = self.family.plan(header, self.budget, track)

        def make() -> MediaItem:
            frames = videos.decode(encoded, header, plan.frames, label)
            sound = None
            if track is not None:
                sound = sounds.decode(encoded, track, self.family.sampling_rate, self.limits, label)
            made = self.family.tensorize(Clip(frames, header.fps, sound), plan, label)
            return made | {"file": np.frombuffer(encoded.data, np.uint8)}

        return Prepared(plan, b"video" + bytes([own_sound]) + videos.digest(encoded), make)


def refusal(family: Family, kind: str) -> str:
    """Why a model does not take media of a kind."""
    if not family.placeholder_ids:
        return f"this model reads text only: use a model that takes {kind}s, or leave the {kind}s out"
    taken = ", ".join(("text", *sorted(family.placeholder_ids)))
    return f"this model takes {taken}: use a model that takes {kind}s, or leave them out"
