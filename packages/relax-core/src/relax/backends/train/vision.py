"""The forward pass of Qwen3-VL up to its last hidden state, for rows with and without images and videos.

It calls the model's own parts rather than its `forward` for two reasons. The model takes every image token
for a picture and fails on one too many, such as a tool may print; here only the places that belong to a row's
items are pictures, any other image token is text. And the samples of a group show the same pictures: each
different one goes through the vision tower once.
"""

from typing import Any

import torch
from torch import Tensor

from relax.backends.train import visuals
from relax.backends.train.visuals import Marks, Media

MODEL_TYPE = "qwen3_vl"


def hidden_states(model: Any, input_ids: Tensor, media: Media) -> Tensor:
    """Last hidden state [rows, width, hidden] of rows with images.

    Args:
        model: Qwen3VLForConditionalGeneration.
        input_ids: int64 [rows, width], placeholders expanded.
        media: the items of each row in the order of their placeholders; see `visuals.read`.

    Raises:
        BatchError: an item is no image or video, or a row's placeholders do not hold its items.
    """
    tower, device = model.model, input_ids.device
    marks = Marks.of(model.config)
    rows, width = input_ids.shape
    different, shown = visuals.read(list(input_ids.cpu()), media, marks)

    is_visual = torch.zeros(input_ids.shape, dtype=torch.bool)
    runs: list[list[tuple[int, visuals.Grid]]] = [[] for _ in range(rows)]
    where: list[tuple[int, int]] = []  # of each shown visual's tokens: row, place
    sources: list[Tensor] = []
    starts = [0]
    for visual in different:
        starts.append(starts[-1] + marks.tokens(visual.grid))
    for one in shown:
        visual = different[one.visual]
        places = visuals.places(one, visual, marks)
        is_visual[one.row, places] = True
        runs[one.row] += zip(one.runs, visual.frames, strict=True)
        where += [(one.row, place) for place in places.tolist()]
        sources.append(torch.arange(starts[one.visual], starts[one.visual + 1]))
    # An image may stand behind a video that came before it, so that tokens are not in the order of items.
    order = sorted(range(len(where)), key=where.__getitem__)
    taken = torch.cat(sources)[order].to(device)
    positions = torch.stack(
        [visuals.rope_positions(width, sorted(found), marks.merge) for found in runs], dim=1
    )

    features = tower.get_image_features(
        torch.cat([visual.pixels for visual in different]).to(device),
        torch.tensor([visual.grid for visual in different], device=device),
        return_dict=True,
    )
    embeddings = tower.get_input_embeddings()(input_ids)
    placed = torch.cat(features.pooler_output).index_select(0, taken).to(embeddings.dtype)
    is_visual = is_visual.to(device)
    return tower.language_model(
        inputs_embeds=embeddings.masked_scatter(is_visual[..., None], placed),
        position_ids=positions.to(device),
        visual_pos_masks=is_visual,
        deepstack_visual_embeds=[
            torch.cat(layer).index_select(0, taken) for layer in features.deepstack_features
        ],
        use_cache=False,
    ).last_hidden_state
