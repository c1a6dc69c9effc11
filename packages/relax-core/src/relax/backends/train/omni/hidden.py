"""The forward pass of a Qwen3-Omni thinker up to its last hidden state, for rows that are shown something.

It calls the model's own parts rather than its `forward`, which takes every placeholder token for a picture or
a sound, and runs a tower on the same ones again for every sample of a group.
"""

from typing import Any

import torch
from torch import Tensor

from relax.backends.train.omni.items import Media, shown_in
from relax.backends.train.omni.placing import Reading, place
from relax.backends.train.omni.towers import different, features_of, longest_chunk

MODEL_TYPE = "qwen3_omni_moe_thinker"


def hidden_states(model: Any, input_ids: Tensor, media: Media, **arguments: Any) -> Tensor:
    """Last hidden state [rows, width, hidden].

    Args:
        model: Qwen3OmniMoeThinkerForConditionalGeneration.
        input_ids: int64 [rows, width], placeholders expanded, padded on the right.
        media: the items of each row in the order of their placeholders; see `items`.
        arguments: for the decoder, such as routes.

    Raises:
        BatchError: an item is none that a thinker is shown, or a row's placeholders do not hold its items.
    """
    reading = Reading.of(model.config)
    device, width = input_ids.device, input_ids.shape[1]
    rows = [shown_in(number, items) for number, items in enumerate(media)]
    tokens = input_ids.cpu().numpy()
    places = [place(number, tokens[number], shown, reading) for number, shown in enumerate(rows)]
    features = features_of(model, different(rows, reading), reading, device)

    seen, seen_at, heard, heard_at = [], [], [], []
    for number, (row, placed) in enumerate(zip(rows, places, strict=True)):
        longest = longest_chunk(row, reading)
        for shown, at in zip(row, placed.placed, strict=True):
            if shown.picture is not None:
                seen.append(shown.picture.key)
                seen_at.append(torch.from_numpy(at.picture + number * width))
            if shown.sound is not None:
                heard.append((shown.sound.key, longest))
                heard_at.append(torch.from_numpy(at.sound + number * width))

    embeddings = model.get_input_embeddings()(input_ids)
    flat = embeddings.flatten(0, 1)
    if heard:
        sounds = torch.cat([features.sounds[key] for key in heard]).to(flat.dtype)
        flat = flat.index_copy(0, torch.cat(heard_at).to(device), sounds)
    if seen:
        at = torch.cat(seen_at).to(device)
        pictures = torch.cat([features.pictures[key] for key in seen]).to(flat.dtype)
        flat = flat.index_copy(0, at, pictures)
        is_seen = torch.zeros(input_ids.numel(), dtype=torch.bool, device=device)
        is_seen[at] = True
        arguments["visual_pos_masks"] = is_seen.view_as(input_ids)
        arguments["deepstack_visual_embeds"] = [
            torch.cat([layer[key] for key in seen]) for layer in features.deep
        ]
    positions = torch.stack([torch.from_numpy(row.positions) for row in places], dim=1)
    return model.get_decoder()(
        inputs_embeds=flat.view_as(embeddings),
        position_ids=positions.to(device),
        use_cache=False,
        **arguments,
    ).last_hidden_state
