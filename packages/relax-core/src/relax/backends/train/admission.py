"""What a model takes: a bad batch is refused before any of it is run, by one process as by a gang's leader.

What a rank raises ends its gang, as the others are in a collective by then; and half of a step that was run
is a gradient that nobody can take back. So all that can be said of a batch without running the model is said
here, of the whole of it, from config.json alone. A number that is not finite is no fault of a batch: its step
is skipped (`TrainBackend.optim_step`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax.backends.model_files import ModelFolderError
from relax.backends.models import load_config, text_config, unsampled_tokens
from relax.backends.routes import UNROUTED, Routing, routing_of
from relax.backends.train import omni, visuals
from relax.backends.train.base import Packed
from relax.backends.train.errors import BatchError, UntrainableModelError
from relax.backends.train.padding import check, required, scored_targets

TRAINED = ("loss_mask", "rollout_logprobs", "advantages")
"""Columns that every loss reads."""

ENCODED = "file"
"""What an item may carry for engines that take files: its encoded original, which no trainer looks at."""

_ROUTE_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Admission:
    """What a model takes.

    Attributes:
        folder, kind: where it came from and its model type, for messages.
        vocabulary: token ids.
        context: tokens of the longest row.
        unsampled: tokens that only stand for media.
        routing: of its experts; None for a dense one.
        require_shown: see that a batch's items are such as the model is shown, and that its rows hold them;
            None where only the backend knows.
    """

    folder: Path
    kind: str
    vocabulary: int
    context: int
    unsampled: tuple[int, ...]
    routing: Routing | None
    require_shown: Callable[[Packed], None] | None = None

    def admit(self, batch: Packed, columns: Sequence[str] = ()) -> Packed:
        """A micro-batch that fits itself and the model, without what trainers do not look at.

        Args:
            batch: the whole of it.
            columns: that the verb reads.

        Raises:
            BatchError: it does not fit.
        """
        check(batch, vocabulary=self.vocabulary, context=self.context)
        for name in columns:
            required(batch, name)
        _require_numbers(batch)
        if self.unsampled:
            scored_targets(batch, _responses(batch), torch.tensor(self.unsampled))
        if batch.routes is not None:
            self._require_routes(batch.routes)
        if not any(batch.media):
            return batch
        if not self.unsampled:
            raise BatchError(
                f"the batch has media, which {self.folder} (a {self.kind}) cannot see: no token of it stands "
                "for any"
            )
        batch = _without_files(batch)
        if self.require_shown is not None:
            self.require_shown(batch)
        return batch

    def _require_routes(self, routes: Tensor) -> None:
        if self.routing is None:
            raise BatchError(f"the batch has routes, but {self.folder} has no experts to route to")
        layers, top_k, experts = len(self.routing.layers), self.routing.top_k, self.routing.experts
        if routes.dtype not in _ROUTE_DTYPES:
            raise BatchError(
                f"routes are {routes.dtype}; they have to be signed integers, of which -1 stands for no route"
            )
        if routes.shape[1:] != (layers, top_k):
            raise BatchError(
                f"routes have shape {list(routes.shape)}; this model has {layers} routing layers and top_k "
                f"{top_k}: were they captured from another model?"
            )
        lowest, highest = int(routes.min()), int(routes.max())
        if lowest < UNROUTED or highest >= experts:
            raise BatchError(
                f"routes name experts {lowest} to {highest}; this model has 0 to {experts - 1}, and -1 "
                "stands for no route"
            )
        missing = routes == UNROUTED
        partly = missing.any(-1) & ~missing.all(-1)
        ordered = routes.sort(-1).values
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNROUTED)).any(-1)
        for found, what in ((partly, "only a part of its experts"), (twice, "an expert twice")):
            if found.any():
                token, layer = (int(place) for place in found.nonzero()[0])
                raise BatchError(
                    f"routes give token {token} {what} in layer {self.routing.layers[layer]}: "
                    f"{routes[token, layer].tolist()}; all {top_k} of a token are different, or all are -1"
                )


def admission_of(folder: Path) -> Admission:
    """What the model of a folder takes, from its config.json.

    Raises:
        UntrainableModelError: it cannot be read.
    """
    try:
        config = load_config(folder)
    except ModelFolderError as error:
        raise UntrainableModelError(str(error)) from error
    text = text_config(config)
    shown = _SHOWN.get(config.model_type)
    return Admission(
        folder=folder,
        kind=config.model_type,
        vocabulary=int(text.vocab_size),
        context=int(text.max_position_embeddings),
        unsampled=unsampled_tokens(config),
        routing=routing_of(config.to_dict()),
        require_shown=None if shown is None else shown(config),
    )


def _pictures(config: Any) -> Callable[[Packed], None]:
    marks = visuals.Marks.of(config)
    return lambda batch: visuals.require(_rows(batch), batch.media, marks)


def _pictures_and_sounds(config: Any) -> Callable[[Packed], None]:
    reading = omni.Reading.of(config)
    return lambda batch: omni.require([row.numpy() for row in _rows(batch)], batch.media, reading)


_SHOWN: dict[str, Callable[[Any], Callable[[Packed], None]]] = {
    "qwen3_vl": _pictures,
    "qwen3_vl_moe": _pictures,
    omni.MODEL_TYPE: _pictures_and_sounds,
}
"""What reads the items of a family, by its model type."""


def _require_numbers(batch: Packed) -> None:
    for name, column in batch.fields.items():
        if name == "loss_mask":
            wrong = (column != 0) & (column != 1)
            if wrong.any():
                raise BatchError(
                    f"loss_mask of response token {int(wrong.nonzero()[0])} is {column[wrong][0].item()}; it "
                    "is 1 for what the policy said, and 0 for all else"
                )
        elif not column.is_floating_point():
            raise BatchError(f"column {name!r} is {column.dtype}; it has to be floating")


def _without_files(batch: Packed) -> Packed:
    for number, row in enumerate(batch.media):
        for item in row:
            if not isinstance(item, Mapping):
                raise BatchError(
                    f"a media item of row {number} is a {type(item).__name__}; it has to map names to arrays"
                )
    media = [[{k: v for k, v in item.items() if k != ENCODED} for item in row] for row in batch.media]
    return replace(batch, media=media)


def _rows(batch: Packed) -> list[Tensor]:
    return list(batch.tokens.split(batch.offsets.diff().tolist()))


def _responses(batch: Packed) -> Tensor:
    """int64 [total response]: the response tokens."""
    lengths = batch.offsets.diff()
    rows = torch.repeat_interleave(torch.arange(batch.rows), lengths)
    places = torch.arange(len(batch.tokens)) - batch.offsets[rows]
    return batch.tokens[places >= batch.prompt_lengths[rows]]
