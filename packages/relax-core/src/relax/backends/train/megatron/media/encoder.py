"""What an encoder is: a module that makes rows of the language model's width of images or sound.

Encoders are Hugging Face's own towers, so that their weights keep names and shapes. Every rank of the first
pipeline stage has all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from relax.backends.train.base import Packed
from relax.backends.train.megatron.media.inputs import Item, Media


class Encoder(Protocol):
    """An `nn.Module` whose forward takes items, at least one; all its parameters are those of its `tower`."""

    tower: nn.Module

    def __call__(self, items: Sequence[Item]) -> Tensor:
        """[rows of all items, 1 + deep, hidden]: what stands in the place of the items' tokens, and behind it
        what is added to those tokens after each of the first `deep` layers of the decoder.
        """
        ...


@dataclass(frozen=True)
class EncoderSpec:
    """One encoder of a model.

    Attributes:
        name: local names of its parameters begin with `encoders.NAME.tower.`, which stands for what
            `Family.encoders` says.
        deep: layers of the decoder behind which its features are added once more (DeepStack).
        build: makes it, with weights yet to be filled, in a dtype on the CPU; with True for a backward that
            computes activations again.
    """

    name: str
    deep: int
    build: Callable[[torch.dtype, bool], nn.Module]


@dataclass(frozen=True)
class MediaSpec:
    """How a model takes media.

    Attributes:
        encoders: in the order in which they work.
        width: of the language model.
        section: channels of half a head that turn with time, height and width; interleaved, as Qwen3-VL has
            them.
        read: what a micro-batch shows; raises BatchError where media and tokens do not fit. It looks at no
            weights, so that every rank, and a leader before all of them, reads the same.
    """

    encoders: tuple[EncoderSpec, ...]
    width: int
    section: tuple[int, int, int]
    read: Callable[[Packed], Media]

    @property
    def deep(self) -> int:
        """Layers that are given features again."""
        return max((encoder.deep for encoder in self.encoders), default=0)
