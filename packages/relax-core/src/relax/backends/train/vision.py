"""The forward pass of Qwen3-VL up to its last hidden state, for rows with and without images.

It calls the model's own parts rather than its `forward` for two reasons. The model takes every image token
for a picture and fails on one too many, such as a tool may print; here only the places that belong to a row's
items are pictures, any other image token is text. And the samples of a group show the same pictures: each
different one goes through the vision tower once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.backends.train.errors import BatchError

MODEL_TYPE = "qwen3_vl"
_TENSORS = {"pixel_values", "image_grid_thw"}

Media = Sequence[Sequence[Mapping[str, Any]]]


def hidden_states(model: Any, input_ids: Tensor, media: Media) -> Tensor:
    """Last hidden state [rows, width, hidden] of rows with images.

    Args:
        model: Qwen3VLForConditionalGeneration.
        input_ids: int64 [rows, width], image placeholders expanded.
        media: the items of each row in the order of their placeholders; `pixel_values` [patches, values] and
            `image_grid_thw` [3] or [images, 3] each.

    Raises:
        BatchError: an item is no image, or a row's placeholders do not hold its images.
    """
    tower = model.model
    merge = int(tower.visual.spatial_merge_size) ** 2
    pictures: list[Tensor] = []
    picture_grids: list[Tensor] = []
    seen: dict[tuple[bytes, bytes], int] = {}
    shown: list[int] = []
    grids: list[Tensor] = []
    is_image = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, items in enumerate(media):
        images = [image for item in items for image in _images(row, item)]
        sizes = [int(grid.prod()) // merge for _, grid in images]
        is_image[row, _placeholders(row, input_ids[row], int(model.config.image_token_id), sizes)] = True
        for pixels, grid in images:
            key = (pixels.tobytes(), grid.tobytes())
            if key not in seen:
                seen[key] = len(pictures)
                pictures.append(torch.tensor(pixels))
                picture_grids.append(torch.tensor(grid))
            shown.append(seen[key])
            grids.append(picture_grids[seen[key]])

    device = input_ids.device
    features = tower.get_image_features(
        torch.cat(pictures).to(device), torch.stack(picture_grids).to(device), return_dict=True
    )
    embeddings = tower.get_input_embeddings()(input_ids)
    placed = torch.cat([features.pooler_output[picture] for picture in shown]).to(embeddings.dtype)
    positions, _ = tower.get_rope_index(
        input_ids, mm_token_type_ids=is_image.int(), image_grid_thw=torch.stack(grids).to(device)
    )
    return tower.language_model(
        inputs_embeds=embeddings.masked_scatter(is_image[..., None], placed),
        position_ids=positions,
        visual_pos_masks=is_image,
        deepstack_visual_embeds=[
            torch.cat([layer[picture] for picture in shown]) for layer in features.deepstack_features
        ],
        use_cache=False,
    ).last_hidden_state


def _images(row: int, item: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The images of one item, each (pixels [patches, values], grid int64 [3])."""
    arrays = {name: np.asarray(value) for name, value in item.items() if name != "kind"}
    if set(arrays) != _TENSORS:
        raise BatchError(
            f"a media item of row {row} holds {sorted(arrays)}; this backend trains on images, "
            f"{sorted(_TENSORS)}"
        )
    grids = arrays["image_grid_thw"].astype(np.int64).reshape(-1, 3)
    pixels = arrays["pixel_values"]
    patches = grids.prod(1)
    if pixels.ndim != 2 or len(pixels) != patches.sum():
        raise BatchError(
            f"pixel_values of row {row} has shape {pixels.shape}; image_grid_thw {grids.tolist()} means "
            f"{patches.sum()} patches"
        )
    return list(zip(np.split(pixels, patches.cumsum()[:-1]), grids, strict=True))


def _placeholders(row: int, tokens: Tensor, image_token: int, sizes: Sequence[int]) -> list[int]:
    """Where a row's images stand: each takes the next run of image tokens that is long enough for it."""
    places: list[int] = []
    candidates = (tokens == image_token).nonzero().flatten().tolist()
    start = 0
    for image, size in enumerate(sizes):
        while (
            start + size <= len(candidates) and candidates[start + size - 1] - candidates[start] != size - 1
        ):
            start += 1
        if start + size > len(candidates):
            raise BatchError(
                f"image {image} of row {row} needs a run of {size} image tokens (id {image_token}), but the "
                f"row has {len(candidates)} for images of {list(sizes)}; expand the prompt with its "
                "processor"
            )
        places += candidates[start : start + size]
        start += size
    return places
