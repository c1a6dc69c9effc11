"""SGLang's Qwen3-Omni, hearing each sound as the model's own forward of its row does.

Its audio tower pads all sounds that it is given to the longest, and its convolutions look over the edge, so
that what it makes of a sound shorter than a second depends on which others come in the same step. And sounds
of different lengths cannot be given to it together.
"""
# pyright: reportMissingImports=false

from types import MethodType
from typing import Any

import torch
from sglang.srt.models import qwen3_omni_moe


class Qwen3OmniMoeForConditionalGeneration(qwen3_omni_moe.Qwen3OmniMoeForConditionalGeneration):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.thinker.get_audio_feature = MethodType(_heard, self.thinker)


def _heard(thinker: Any, items: list[Any]) -> Any:
    """The features of each sound, padded as those of its own row would be (`relax_longest` mel frames)."""
    longest = [item.model_specific_data.get("relax_longest") for item in items]
    if None in longest:
        return type(thinker).get_audio_feature(thinker, items)
    tower, found = thinker.audio_tower, [torch.empty(0)] * len(items)
    device = next(tower.parameters()).device
    for width in sorted(set(longest)):
        members = [index for index, each in enumerate(longest) if each == width]
        mels = [items[index].feature[0].to(device=device, dtype=tower.dtype) for index in members]
        frames = [mel.shape[1] for mel in mels]
        if max(frames) < width:  # something to be padded to, whose features nobody hears
            mels.append(mels[0].new_zeros(mels[0].shape[0], width))
            frames.append(width)
        lengths = torch.tensor(frames, device=device)
        tokens = qwen3_omni_moe._get_feat_extract_output_lengths(lengths).tolist()
        heard = tower(torch.cat(mels, dim=1), feature_lens=lengths).last_hidden_state
        rows = heard.reshape(-1, heard.shape[-1]).split(tokens)
        for index, features in zip(members, rows, strict=False):
            found[index] = features
    return found


EntryClass = Qwen3OmniMoeForConditionalGeneration
