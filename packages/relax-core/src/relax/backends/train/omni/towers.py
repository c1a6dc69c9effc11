"""Pictures and sounds through transformers' towers, each different one of a micro-batch once.

The samples of a group are shown the same. A picture's features depend on nothing beside it; those of a sound
shorter than a chunk (a second) also on how long the longest chunk beside it is, because the tower pads all to
that and its convolutions look over the edge. What is beside a sound is what its own row is shown, so that a
row's features do not depend on which rows share a micro-batch: they are those of the model's own forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.backends.train.omni.items import Picture, Shown, Sound
from relax.backends.train.omni.placing import Reading

SoundKey = tuple[bytes, int]


@dataclass(frozen=True)
class Different:
    """What a micro-batch is shown, without repetition.

    Attributes:
        pictures: by `Picture.key`.
        sounds: by `Sound.key` and the longest chunk, in mel frames, that the tower sees with it.
    """

    pictures: Mapping[bytes, Picture]
    sounds: Mapping[SoundKey, Sound]

    @property
    def chunks(self) -> list[int]:
        """The different longest chunks; sounds of one of them go through the tower together."""
        return sorted({longest for _, longest in self.sounds})


def different(rows: Sequence[Sequence[Shown]], reading: Reading) -> Different:
    """The different pictures and sounds of rows, in order of their first appearance."""
    pictures: dict[bytes, Picture] = {}
    sounds: dict[SoundKey, Sound] = {}
    for row in rows:
        longest = longest_chunk(row, reading)
        for shown in row:
            if shown.picture is not None:
                pictures.setdefault(shown.picture.key, shown.picture)
            if shown.sound is not None:
                sounds.setdefault((shown.sound.key, longest), shown.sound)
    return Different(pictures, sounds)


def longest_chunk(row: Sequence[Shown], reading: Reading) -> int:
    """Mel frames of the longest chunk among the sounds of a row; 0 if there is none."""
    chunk = 2 * reading.window
    return max((min(chunk, shown.sound.frames) for shown in row if shown.sound is not None), default=0)


def patches_of(pictures: Mapping[bytes, Picture], device: torch.device) -> tuple[Tensor, Tensor]:
    """What a vision tower takes: (pixels [patches, values], grids int64 [pictures, 3])."""
    pixels = torch.as_tensor(np.concatenate([picture.pixels for picture in pictures.values()]))
    return pixels.to(device), torch.tensor([picture.grid for picture in pictures.values()], device=device)


def frames_of(sounds: Sequence[Sound], device: torch.device) -> tuple[Tensor, Tensor]:
    """What an audio tower takes: (mel [mel bins, all frames], frames int64 [sounds])."""
    mel = torch.as_tensor(np.concatenate([sound.mel for sound in sounds], axis=1))
    return mel.to(device), torch.tensor([sound.frames for sound in sounds], device=device)


@dataclass(frozen=True)
class Features:
    """What towers make of what is shown.

    Attributes:
        pictures: [tokens, hidden] each.
        deep: for each deepstack layer, by picture, [tokens, hidden].
        sounds: [tokens, hidden] each.
    """

    pictures: Mapping[bytes, Tensor]
    deep: Sequence[Mapping[bytes, Tensor]]
    sounds: Mapping[SoundKey, Tensor]


def features_of(model: Any, shown: Different, reading: Reading, device: torch.device) -> Features:
    """Run the towers of a Qwen3OmniMoeThinkerForConditionalGeneration on what they are shown, if anything."""
    pictures: dict[bytes, Tensor] = {}
    deep: list[dict[bytes, Tensor]] = []
    if shown.pictures:
        seen = model.get_image_features(*patches_of(shown.pictures, device), return_dict=True)
        pictures = dict(zip(shown.pictures, seen.pooler_output, strict=True))
        deep = [dict(zip(shown.pictures, layer, strict=True)) for layer in seen.deepstack_features]
    sounds: dict[SoundKey, Tensor] = {}
    for longest in shown.chunks:
        together = {key: sound for key, sound in shown.sounds.items() if key[1] == longest}
        mel, lengths = frames_of(list(together.values()), device)
        heard = model.audio_tower(mel, feature_lens=lengths, return_dict=True).last_hidden_state
        sizes = [reading.sound_tokens(sound) for sound in together.values()]
        sounds |= dict(zip(together, heard.split(sizes), strict=True))
    return Features(pictures, deep, sounds)
