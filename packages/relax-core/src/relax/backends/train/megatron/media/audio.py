"""The audio tower of a Qwen3-Omni thinker: Hugging Face's own module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from relax.backends.models import ATTENTION
from relax.backends.train.megatron.media.encoder import EncoderSpec
from relax.backends.train.megatron.media.inputs import Item
from relax.backends.train.omni.items import Sound
from relax.backends.train.omni.placing import Reading
from relax.backends.train.omni.towers import heard

AUDIO = "audio"


class AudioEncoder(nn.Module):
    """Sounds as rows of the language model's width.

    Args:
        tower: a Qwen3OmniMoeAudioEncoder.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, items: Sequence[Item]) -> Tensor:
        """[rows, 1, hidden]. Sounds that are padded to one length go through the tower together."""
        weight = next(self.parameters())
        alike: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            alike.setdefault(int(item.tensors["longest"]), []).append(index)
        found: dict[int, Tensor] = {}
        for longest, members in alike.items():
            rows = heard(self.tower, [items[index].tensors["mel"].to(weight) for index in members], longest)
            parts = rows.split([items[index].rows for index in members])
            found |= dict(zip(members, parts, strict=True))
        return torch.cat([found[index] for index in range(len(items))])[:, None]


def sound_item(sound: Sound, longest: int, reading: Reading) -> Item:
    """A sound for the encoder; `longest` is the longest chunk beside it, see `omni.towers`."""
    tensors = {"mel": torch.tensor(sound.mel), "longest": torch.tensor(longest)}
    return Item(tensors, rows=reading.sound_tokens(sound), cost=sound.frames)


def audio_spec(config: Any) -> EncoderSpec:
    """The encoder of an `audio_config`; none of its features go to further layers of the decoder."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    def build(dtype: torch.dtype, recompute: bool) -> nn.Module:
        with no_init_weights():
            tower = Qwen3OmniMoeAudioEncoder._from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        if recompute:
            tower.gradient_checkpointing_enable({"use_reentrant": False})
        # The tower has no dropout; transformers recomputes in training mode only.
        return AudioEncoder(tower.train())

    return EncoderSpec(AUDIO, deep=0, build=build)
