"""What a prefill is shown, through the model's towers: images, video and sound as features at their places.

Items are read with the trainer's own code, as `reading` does; each different one goes through a tower once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax.backends.inference.contexts import Context
from relax.backends.train import omni, visuals
from relax.backends.train.omni.items import shown_in
from relax.backends.train.omni.placing import Reading, place
from relax.backends.train.omni.towers import SoundKey, different, features_of, longest_chunk
from relax.backends.train.visuals import Marks


@dataclass(frozen=True, eq=False)
class Shown:
    """What a prefill of [rows, width] tokens is given beside them.

    Attributes:
        at: int64 [shown tokens], their places among all rows * width.
        features: [shown tokens, hidden], what is there instead of the tokens' embeddings.
        seen: int64 [seen tokens], the places of images and video.
        deep: for each of the first layers, [seen tokens, hidden], added to what it gives.
        positions: [3, rows, width]: time, height and width of every token.
        offsets: of each row, what to add to a later token's index to get its position.
    """

    at: Tensor
    features: Tensor
    seen: Tensor
    deep: Sequence[Tensor]
    positions: Tensor
    offsets: Sequence[float]


class Senses(Protocol):
    """How a model sees and hears."""

    def show(self, contexts: Sequence[Context], pads: Sequence[int], width: int) -> Shown:
        """What contexts are shown that lie behind `pads` tokens of padding each, in rows of `width`."""
        ...


def senses_of(model: PreTrainedModel) -> Senses | None:
    """How the model sees and hears; None for one of another family, or one that does neither."""
    kind = model.config.model_type
    if kind == omni.MODEL_TYPE:
        return OmniSenses(model)
    return VisionSenses(model) if kind in ("qwen3_vl", "qwen3_vl_moe") else None


class VisionSenses:
    """Images and video of Qwen3-VL, where a video takes a run of placeholders for each of its frames."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._marks = Marks.of(model.config)

    def show(self, contexts: Sequence[Context], pads: Sequence[int], width: int) -> Shown:
        marks, tower = self._marks, self._model.model
        device = next(self._model.parameters()).device
        rows = [torch.from_numpy(context.tokens) for context in contexts]
        found, shown = visuals.read(rows, [context.media for context in contexts], marks)
        starts = np.cumsum([0, *(marks.tokens(visual.grid) for visual in found)])
        at: list[Tensor] = []
        sources: list[Tensor] = []
        runs: list[list[tuple[int, visuals.Grid]]] = [[] for _ in rows]
        for one in shown:
            visual = found[one.visual]
            at.append(visuals.places(one, visual, marks) + one.row * width + pads[one.row])
            sources.append(torch.arange(int(starts[one.visual]), int(starts[one.visual + 1])))
            runs[one.row] += zip(one.runs, visual.frames, strict=True)
        positions = torch.zeros(3, len(rows), width, dtype=torch.int64)
        offsets: list[float] = []
        for row, tokens in enumerate(rows):
            # One more than there are: the position of the token that comes next.
            places = visuals.rope_positions(len(tokens) + 1, sorted(runs[row]), marks.merge)
            positions[:, row, pads[row] :] = places[:, :-1]
            offsets.append(float(places[0, -1]) - len(tokens))
        features = tower.get_image_features(
            torch.cat([visual.pixels for visual in found]).to(device),
            torch.tensor([visual.grid for visual in found], device=device),
            return_dict=True,
        )
        seen, taken = torch.cat(at).to(device), torch.cat(sources).to(device)
        return Shown(
            at=seen,
            features=torch.cat(features.pooler_output).index_select(0, taken),
            seen=seen,
            deep=[torch.cat(layer).index_select(0, taken) for layer in features.deepstack_features],
            positions=positions.to(device),
            offsets=offsets,
        )


class OmniSenses:
    """Images, video and sound of a Qwen3-Omni thinker."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._reading = Reading.of(model.config)

    def show(self, contexts: Sequence[Context], pads: Sequence[int], width: int) -> Shown:
        reading, device = self._reading, next(self._model.parameters()).device
        rows = [shown_in(number, context.media) for number, context in enumerate(contexts)]
        features = features_of(self._model, different(rows, reading), reading, device)
        positions = torch.zeros(3, len(rows), width)
        offsets: list[float] = []
        seen: list[bytes] = []
        heard: list[SoundKey] = []
        seen_at: list[Tensor] = []
        heard_at: list[Tensor] = []
        for number, (context, row) in enumerate(zip(contexts, rows, strict=True)):
            # One more than there are: the position of the token that comes next. It is no placeholder.
            found = place(number, np.append(context.tokens, -1), row, reading)
            positions[:, number, pads[number] :] = torch.from_numpy(found.positions[:, :-1])
            offsets.append(float(found.positions[0, -1]) - len(context.tokens))
            longest, start = longest_chunk(row, reading), number * width + pads[number]
            for one, placed in zip(row, found.placed, strict=True):
                if one.picture is not None:
                    seen.append(one.picture.key)
                    seen_at.append(torch.from_numpy(placed.picture) + start)
                if one.sound is not None:
                    heard.append((one.sound.key, longest))
                    heard_at.append(torch.from_numpy(placed.sound) + start)
        return Shown(
            at=torch.cat(seen_at + heard_at).to(device),
            features=torch.cat(
                [features.pictures[key] for key in seen] + [features.sounds[key] for key in heard]
            ),
            seen=torch.cat(seen_at).to(device) if seen else torch.empty(0, dtype=torch.int64, device=device),
            deep=[torch.cat([layer[key] for key in seen]) for layer in features.deep],
            positions=positions.to(device),
            offsets=offsets,
        )
