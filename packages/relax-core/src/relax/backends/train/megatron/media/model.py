"""GPTModel with encoders before its first stage, whose features also go to its first layers (DeepStack).

The embeddings of tokens that stand for media are replaced where a rank holds these tokens: after the cut over
context and tensor ranks, which comes to what cutting the merged embeddings comes to, without anyone holding
all of them. "DeepStack" (Meng et al., 2024) adds further features after the first layers. They travel as the
decoder's `context`, an explicit argument of every layer, so that a backward which computes layers again gives
them their gradients; and behind the hidden states to the next pipeline stage where the first has too few
layers for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from relax.backends.train.megatron.media.encoder import MediaSpec
from relax.backends.train.megatron.media.inputs import OwnMedia, OwnStream
from relax.backends.train.megatron.media.sharing import encode, mark_parts


class DeepstackLayer(TransformerLayer):
    """A layer that adds its share of `context` [layers, own shown, hidden] at the places in `context_mask`
    (int64 [own shown]).
    """

    own_index = 0
    """Which of this stage's layers it is."""

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        layer: Any = super().forward
        hidden, context = layer(*arguments, **named)
        if context is None or self.own_index >= len(context):
            return hidden, context
        return hidden.index_add(0, named["context_mask"], context[self.own_index][:, None]), context


class MediaModel(GPTModel):
    """One pipeline stage of a model that sees or hears.

    Args:
        spec: of its media.
        first_layer: of this stage, counted from 0 over the whole model.
        shared: whether ranks share the encoding; see `sharing.py`.
        recompute: encoders compute activations again in the backward.
        others: GPTModel's.
    """

    def __init__(
        self, spec: MediaSpec, *, first_layer: int, shared: bool, recompute: bool, **others: Any
    ) -> None:
        super().__init__(**others)
        self._spec = spec
        self._shared = shared
        self._deep = {encoder.name: encoder.deep for encoder in spec.encoders}
        self._arriving = max(0, spec.deep - first_layer)
        for index, layer in enumerate(self.decoder.layers):
            setattr(layer, "own_index", index)  # noqa: B010  # of a DeepstackLayer; a module list knows modules
        if not self.pre_process:
            return
        device = next(self.parameters()).device
        built = {
            encoder.name: encoder.build(self.config.params_dtype, recompute).to(device)
            for encoder in spec.encoders
        }
        self.encoders = nn.ModuleDict(built)
        for module in built.values():
            mark_parts(module, shared=shared, sequence_parallel=self.config.sequence_parallel)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the rest by name
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        *,
        media: OwnMedia | None = None,
        padding_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """GPTModel's, of a micro-batch that shows `media`.

        Position ids are int64 [3, own tokens] with media, [1, own tokens] without.
        """
        features: Tensor | None = None
        places: Tensor | None = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if media is not None:
                embedded, features, places = self._merged(embedded, media)
            if torch.is_grad_enabled() and not embedded.requires_grad:
                # All before the decoder is frozen, perhaps all of it: schedules want a graph all the same.
                embedded = embedded.detach().requires_grad_()
            others["decoder_input"] = embedded
            if padding_mask is not None and self.config.sequence_parallel:
                # GPTModel cuts the mask where it embeds tokens itself.
                padding_mask = scatter_to_sequence_parallel_region(
                    padding_mask.transpose(0, 1).contiguous()
                ).transpose(0, 1)
        elif media is not None and self._arriving:
            features, places = self._arrived(media)
        if features is not None:
            others["extra_block_kwargs"] = {"context": features, "context_mask": places}
        output = super().forward(input_ids, position_ids, attention_mask, padding_mask=padding_mask, **others)
        if features is None or self.post_process:
            return output
        further = features[len(self.decoder.layers) :]
        if not len(further):
            return output
        return torch.cat([output, further.flatten(0, 1)[:, None]])

    def _merged(self, embedded: Tensor, media: OwnMedia) -> tuple[Tensor, Tensor | None, Tensor]:
        """Embeddings [own tokens, 1, hidden] with media in their places, features [deep, own shown, hidden]
        for the first layers, and their places.
        """
        deep: list[Tensor] = []
        for stream in media.streams:
            shape = (1 + self._deep[stream.encoder], self._spec.width)
            rows = encode(self.encoders[stream.encoder], stream.items, shape, shared=self._shared)
            shown = rows.index_select(0, stream.sources)
            embedded = embedded.index_copy(0, stream.places, shown[:, :1].to(embedded.dtype))
            if shape[0] > 1:
                deep.append(shown[:, 1:].transpose(0, 1))
        return embedded, torch.cat(deep, dim=1).contiguous() if deep else None, self._places(media.streams)

    def _arrived(self, media: OwnMedia) -> tuple[Tensor | None, Tensor]:
        """What the stage before has sent behind its hidden states; those become the decoder's input alone."""
        places = self._places(media.streams)
        arrived: Any = self.decoder.input_tensor
        hidden, behind = arrived[: media.length], arrived[media.length :]
        self.decoder.set_input_tensor(hidden)
        if not any(self._deep[stream.encoder] for stream in media.streams):
            return None, places
        return behind[:, 0].view(self._arriving, len(places), -1), places

    def _places(self, streams: Sequence[OwnStream]) -> Tensor:
        found = [stream.places for stream in streams if self._deep[stream.encoder]]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
