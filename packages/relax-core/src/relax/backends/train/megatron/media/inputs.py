"""What a micro-batch shows: data that every rank reads alike, and what of it a rank's tokens need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Item:
    """One input of an encoder: an image, a video, a clip of sound.

    Attributes:
        tensors: what the encoder is fed, by name, on the CPU.
        rows: output rows that it becomes, one for each of its placeholder tokens.
        cost: what encoding it costs, in any unit; ranks share the items of a micro-batch by it.
    """

    tensors: Mapping[str, Tensor]
    rows: int
    cost: int


@dataclass(frozen=True)
class Stream:
    """The work of one encoder for a micro-batch.

    Attributes:
        encoder: its name.
        items: the different ones; none comes twice.
        tokens: int64 [shown], tokens of the batch that stand for media, counted over all rows.
        sources: int64 [shown], which row of the items' outputs, laid end to end, each of them shows.
    """

    encoder: str
    items: Sequence[Item]
    tokens: Tensor
    sources: Tensor


@dataclass(frozen=True)
class Media:
    """What a micro-batch shows, the same on every rank of a replica.

    Attributes:
        streams: one for each encoder that has something to do, in the order of the model's encoders.
        positions: int64 [3, tokens of the batch], time, height and width of each token in its row.
    """

    streams: Sequence[Stream]
    positions: Tensor


@dataclass(frozen=True)
class OwnStream:
    """A stream, and which of it the tokens of this rank show.

    Attributes:
        encoder, items: those of the stream; all of them, as ranks encode for each other.
        places: int64 [own shown], places among this rank's tokens.
        sources: int64 [own shown], which row of the outputs each of them shows.
    """

    encoder: str
    items: Sequence[Item]
    places: Tensor
    sources: Tensor


@dataclass(frozen=True)
class OwnMedia:
    """What the tokens of this rank show.

    Attributes:
        streams: all of them, also those that none of this rank's tokens shows.
        length: tokens of this rank, padding included.
    """

    streams: Sequence[OwnStream]
    length: int


def own(media: Media, tokens: Tensor) -> OwnMedia:
    """The part of a rank whose places hold `tokens`: int64 [own], of the batch; -1 for padding."""
    home = torch.full((media.positions.shape[1],), -1, dtype=torch.int64, device=tokens.device)
    real = tokens >= 0
    home[tokens[real]] = real.nonzero().flatten()
    streams = []
    for stream in media.streams:
        places = home[stream.tokens.to(tokens.device)]
        here = places >= 0
        sources = stream.sources.to(tokens.device)[here]
        streams.append(OwnStream(stream.encoder, stream.items, places[here], sources))
    return OwnMedia(streams, len(tokens))
