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
from torch.nn import functional

from relax.backends.train.omni.items import Picture, Shown, Sound
from relax.backends.train.omni.placing import Reading, sound_tokens

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


def heard(tower: Any, mels: Sequence[Tensor], longest: int) -> Tensor:
    """[tokens of all sounds, hidden]: what transformers' audio tower makes of sounds.

    Chunks are cut and padded here, because the tower pads to the longest that it is given, and what is to be
    padded to may be with a sound that goes through it elsewhere.

    Args:
        tower: a Qwen3OmniMoeAudioEncoder.
        mels: float [mel bins, frames] of each sound, at least one.
        longest: mel frames to pad chunks to; none is longer.
    """
    device, chunk = mels[0].device, 2 * tower.n_window
    chunks = [part for mel in mels for part in mel.split(chunk, dim=1)]
    padded = torch.stack([functional.pad(part, (0, longest - part.shape[1])) for part in chunks])
    tokens = torch.tensor([sound_tokens(part.shape[1], tower.n_window) for part in chunks], device=device)
    width = sound_tokens(longest, tower.n_window)
    valid = torch.arange(width, device=device) < tokens[:, None]
    # Attention sees as many whole chunks at a time as `n_window_infer` says, of the width they are padded to.
    most = width * (tower.n_window_infer // chunk)
    ends = [0]
    for mel in mels:
        left = sound_tokens(mel.shape[1], tower.n_window)
        ends += [ends[-1] + first for first in (*range(most, left, most), left)]
    return tower(
        padded_feature=padded,
        chunk_lengths=torch.tensor([part.shape[1] for part in chunks], device=device),
        valid_indices=valid.flatten().nonzero().flatten(),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        return_dict=True,
    ).last_hidden_state


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
        mels = [torch.tensor(sound.mel).to(device) for sound in together.values()]
        sizes = [reading.sound_tokens(sound) for sound in together.values()]
        sounds |= dict(zip(together, heard(model.audio_tower, mels, longest).split(sizes), strict=True))
    return Features(pictures, deep, sounds)
