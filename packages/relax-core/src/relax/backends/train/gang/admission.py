"""What a gang's model takes, seen by its leader: a bad batch is refused before any rank is told of it.

What a rank raises ends the gang, as the others are in a collective by then. So all that can be said of a
batch without running the model is said here, of the whole of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from relax.backends.models import ModelFolderError, load_config, text_config, unsampled_tokens
from relax.backends.routes import UNROUTED, Routing, routing_of
from relax.backends.train.base import Packed
from relax.backends.train.errors import BatchError, UntrainableModelError
from relax.backends.train.padding import check, required, scored_targets

TRAINED = ("loss_mask", "rollout_logprobs", "advantages")
"""Columns that every loss reads."""


@dataclass(frozen=True)
class Admission:
    """What a model takes.

    Attributes:
        folder: it came from, for messages.
        vocabulary: token ids.
        context: tokens of the longest row.
        unsampled: tokens that only stand for media.
        routing: of its experts; None for a dense one.
    """

    folder: Path
    vocabulary: int
    context: int
    unsampled: tuple[int, ...]
    routing: Routing | None

    def require(self, batch: Packed, columns: Sequence[str] = ()) -> None:
        """See that a micro-batch fits itself and the model.

        Args:
            batch: the whole of it.
            columns: that the verb reads.

        Raises:
            BatchError: it does not.
        """
        check(batch, vocabulary=self.vocabulary, context=self.context)
        for name in columns:
            required(batch, name)
        if self.unsampled:
            scored_targets(batch, _responses(batch), torch.tensor(self.unsampled))
        if batch.routes is not None:
            self._require_routes(batch.routes)
        if any(batch.media) and not self.unsampled:
            raise BatchError(
                f"the batch has media, which {self.folder} cannot see: no token of it stands for any"
            )

    def _require_routes(self, routes: Tensor) -> None:
        if self.routing is None:
            raise BatchError(f"the batch has routes, but {self.folder} has no experts to route to")
        layers, top_k, experts = len(self.routing.layers), self.routing.top_k, self.routing.experts
        if routes.shape[1:] != (layers, top_k):
            raise BatchError(
                f"routes have shape {list(routes.shape)}; this model has {layers} routing layers and top_k "
                f"{top_k}: were they captured from another model?"
            )
        if not routes.numel():
            return
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
    return Admission(
        folder=folder,
        vocabulary=int(text.vocab_size),
        context=int(text.max_position_embeddings),
        unsampled=unsampled_tokens(config),
        routing=routing_of(config.to_dict()),
    )


def _responses(batch: Packed) -> Tensor:
    """int64 [total response]: the response tokens."""
    lengths = batch.offsets.diff()
    rows = torch.repeat_interleave(torch.arange(batch.rows), lengths)
    places = torch.arange(len(batch.tokens)) - batch.offsets[rows]
    return batch.tokens[places >= batch.prompt_lengths[rows]]
