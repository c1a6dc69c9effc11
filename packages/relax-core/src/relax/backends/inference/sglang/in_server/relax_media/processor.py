"""Requests whose media are tensors: no file is decoded, nothing resized, no token put in.

What a request's `video_data` holds is written by `relax.backends.inference.sglang.tensors`, which says what
it is. Requests with files are left to SGLang's own processor.
"""
# pyright: reportMissingImports=false

import asyncio
import hashlib
import json
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from relax_media.wire import PREFIX, read

_KINDS = {"image": Modality.IMAGE, "video": Modality.VIDEO, "audio": Modality.AUDIO}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}


class TensorProcessor(QwenVLImageProcessor):
    """SGLang's processor of Qwen3-VL and Qwen3-Omni, and requests whose media are tensors."""

    models = [  # noqa: RUF012 - so SGLang declares it
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeForConditionalGeneration,
        Qwen3OmniMoeForConditionalGeneration,
    ]

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> MultimodalProcessorOutput:
        given = request_obj.video_data
        if not (given and isinstance(given[0], str) and given[0].startswith(PREFIX)):
            return await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.io_executor, self._unpacked, list(input_text), given)

    def _unpacked(self, tokens: list[int], given: list[str]) -> MultimodalProcessorOutput:
        head, first = read(given[0])
        items = [read(one) for one in given[1:]]
        found = [self._item(part, items, head["version"]) for part in head["parts"]]
        found.sort(key=lambda item: item.offsets[0])
        return MultimodalProcessorOutput(
            input_ids=tokens,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(tokens, found),
            mm_items=found,
            im_start_id=self.vision_start_token_id,
            im_end_id=self.vision_end_token_id,
            im_token_id=self.mm_tokens.image_token_id,
            video_token_id=self.mm_tokens.video_token_id,
            audio_token_id=self.mm_tokens.audio_token_id,
            mrope_positions=torch.from_numpy(first["positions"].astype(np.int64)),
            mrope_position_delta=torch.tensor([[head["following"] - len(tokens)]]),
        )

    def _item(self, part: dict[str, Any], items: list[Any], version: int) -> MultimodalDataItem:
        """One image, one step in time of a video (which a tower looks at alone), or one sound."""
        head, arrays = items[part["item"]]
        kind, start, end = part["kind"], part["start"], part["end"]
        told = {"version": version, **{name: part[name] for name in part if name not in ("item", "spans")}}
        if kind == "audio":
            feature = torch.from_numpy(arrays["input_features"][start : start + 1, :, :end].copy())
            data = {
                "feature_attention_mask": torch.ones(1, end, dtype=torch.int64),
                "relax_longest": part["longest"],
            }
        else:
            feature = torch.from_numpy(arrays["pixels"][start:end].copy())
            data = {_GRIDS[kind]: torch.tensor([part["grid"]])}
        item = MultimodalDataItem(
            modality=_KINDS[kind],
            feature=feature,
            offsets=[(first, last - 1) for first, last in part["spans"]],
            model_specific_data=data,
        )
        name = hashlib.blake2b((head["digest"] + json.dumps(told, sort_keys=True)).encode(), digest_size=8)
        item.set_hash(int.from_bytes(name.digest(), "big"))
        return item
