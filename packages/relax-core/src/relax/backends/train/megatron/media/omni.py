"""What a Qwen3-Omni thinker is shown, for the encoders of the first pipeline stage."""

from typing import Any

import torch
from torch import Tensor

from relax.backends.train.base import Packed
from relax.backends.train.megatron.media.audio import AUDIO, audio_spec, sound_item
from relax.backends.train.megatron.media.encoder import MediaSpec
from relax.backends.train.megatron.media.inputs import Item, Media, Stream
from relax.backends.train.megatron.media.vision import VISION, tower_spec
from relax.backends.train.omni.items import Picture, shown_in
from relax.backends.train.omni.placing import Reading, place
from relax.backends.train.omni.towers import different, longest_chunk


def thinker(config: Any) -> MediaSpec:
    """How a thinker takes images, video and sound; `config` is a Qwen3OmniMoeThinkerConfig."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    reading = Reading.of(config)
    return MediaSpec(
        encoders=(
            tower_spec(config.vision_config, Qwen3OmniMoeVisionEncoder),
            audio_spec(config.audio_config),
        ),
        width=config.text_config.hidden_size,
        section=tuple(config.text_config.rope_parameters["mrope_section"]),
        read=lambda batch: read(batch, reading),
    )


def read(batch: Packed, reading: Reading) -> Media:
    """What a micro-batch shows, of images, video and sound. Positions are float32: a step in time of a video
    need not be a whole number of them.

    Raises:
        BatchError: an item is none of these, or a row's placeholders do not hold its items.
    """
    offsets = batch.offsets.tolist()
    tokens = batch.tokens.cpu().numpy()
    rows = [shown_in(number, items) for number, items in enumerate(batch.media)]
    placed = [
        place(number, tokens[first:last], shown, reading)
        for number, (first, last, shown) in enumerate(zip(offsets[:-1], offsets[1:], rows, strict=True))
    ]
    found = different(rows, reading)
    pictures = _Shared([_picture_item(picture, reading) for picture in found.pictures.values()])
    sounds = _Shared([sound_item(sound, key[1], reading) for key, sound in found.sounds.items()])
    picture_number = {key: number for number, key in enumerate(found.pictures)}
    sound_number = {key: number for number, key in enumerate(found.sounds)}
    for offset, row, where in zip(offsets[:-1], rows, placed, strict=True):
        longest = longest_chunk(row, reading)
        for shown, at in zip(row, where.placed, strict=True):
            if shown.picture is not None:
                pictures.show(picture_number[shown.picture.key], torch.from_numpy(at.picture) + offset)
            if shown.sound is not None:
                sounds.show(sound_number[shown.sound.key, longest], torch.from_numpy(at.sound) + offset)
    streams = [
        shared.stream(encoder) for encoder, shared in ((VISION, pictures), (AUDIO, sounds)) if shared.items
    ]
    positions = torch.cat([torch.from_numpy(where.positions) for where in placed], dim=1)
    return Media(streams, positions)


class _Shared:
    """Items of one encoder, and the tokens that show them."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self._starts = torch.tensor([0, *(item.rows for item in items)]).cumsum(0).tolist()
        self._tokens: list[Tensor] = []
        self._sources: list[Tensor] = []

    def show(self, number: int, tokens: Tensor) -> None:
        self._tokens.append(tokens)
        self._sources.append(torch.arange(self._starts[number], self._starts[number + 1]))

    def stream(self, encoder: str) -> Stream:
        return Stream(encoder, self.items, torch.cat(self._tokens), torch.cat(self._sources))


def _picture_item(picture: Picture, reading: Reading) -> Item:
    return Item(
        {"pixels": torch.tensor(picture.pixels), "grid": torch.tensor(picture.grid)},
        rows=reading.picture_tokens(picture),
        cost=len(picture.pixels),
    )
