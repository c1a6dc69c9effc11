"""A Hugging Face model over a slot cache: prefill prompts into slots, decode one token for every running row.

Text layers of Qwen3, Qwen3-MoE, Qwen3-VL and Qwen3-Omni thinkers are `TextTower`'s, also where something is
shown (`media`); other families go through the model's own forward, with explicit masks and positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from agentic import GenerationRequest
from numpy.typing import NDArray
from torch import Tensor, nn

from relax.backends.inference.contexts import Context, pieces
from relax.backends.inference.errors import EngineError, InvalidRequest, InvalidUpdate
from relax.backends.inference.media import senses_of
from relax.backends.inference.reading import reader_of
from relax.backends.inference.slots import ATTENTION, SlotCache
from relax.backends.inference.tower import TextTower, serves
from relax.backends.models import build_model, named_weights, text_config, torch_dtype, unsampled_tokens
from relax.backends.routes import Routes, Routing, routing_of


@dataclass(frozen=True)
class Prefilled:
    """What a prefill gave, one entry a context.

    Attributes:
        logits: of the next token, [contexts, vocabulary].
        offsets: what to add to a later token's index to get its position (not 0 only after media; between
            two whole numbers only after video of a Qwen3-Omni).
        routes: [tokens, layers, top_k] of each; empty unless routes are captured.
    """

    logits: Tensor
    offsets: list[float]
    routes: list[Routes]


class Network:
    """The model of a folder and its KV. Not thread-safe; computes under the caller's torch settings.

    Args:
        capture: tell which experts every token goes to.

    Attributes:
        routing: how the model routes; None unless that is told.

    Raises:
        EngineError: the model has layers that a slot cache cannot serve (sliding windows, recurrent states),
            or routes are to be captured that it has not or that cannot be read here.
        relax.backends.models.ModelFolderError: the folder cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str,
        device: str,
        slots: int,
        capacity: int | None,
        weights: bool,
        seed: int,
        capture: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._dtype = torch_dtype(dtype)
        self._model = build_model(folder, self._dtype, weights=weights, seed=seed, attention=ATTENTION)
        self._model.requires_grad_(False)
        nn.Module.to(self._model, self.device)
        text = text_config(self._model.config)
        kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            raise EngineError(
                f"model type {text.model_type!r} in {str(folder)!r} has {sorted(kinds)} layers; the "
                "transformers engine serves models whose every layer is full attention"
            )
        context = int(text.max_position_embeddings)
        if capacity is not None and not 2 <= capacity <= context:
            raise EngineError(f"capacity_tokens is {capacity}; expected 2 to {context}, the model's context")
        self.capacity = context if capacity is None else capacity
        self.vocabulary = int(text.vocab_size)
        self._tower = TextTower(self._model) if serves(text) else None
        self._senses = None if self._tower is None else senses_of(self._model)
        self._reader = None if self._senses is None else reader_of(self._model.config)
        self.routing = self._captured_routing(folder) if capture else None
        self.layout = {name: tensor for name, tensor in named_weights(self._model)}
        self._cache = SlotCache(text.num_hidden_layers, slots, self.capacity, self._dtype, self.device)
        self._placeholders: dict[int, int] = {}
        if hasattr(self._model.config, "vision_config"):
            # Token id -> the type that get_rope_index calls it.
            self._placeholders = {self._model.config.image_token_id: 1, self._model.config.video_token_id: 2}
            self._merge = self._model.config.vision_config.spatial_merge_size**2
        self.placeholders = unsampled_tokens(self._model.config)
        """Tokens that stand for media: a response never holds one, as there would be no media behind it."""
        pad = getattr(text, "pad_token_id", None)
        self._pad = 0 if pad is None or pad in self._placeholders else int(pad)

    def _captured_routing(self, folder: str | Path) -> Routing:
        kind = self._model.config.model_type
        routing = routing_of(self._model.config.to_dict())
        if routing is None:
            raise EngineError(
                f"routes are to be captured, but model type {kind!r} in {str(folder)!r} is dense: it has no "
                f"experts to choose from; set actor.routing_replay=false"
            )
        if self._tower is None or (hasattr(self._model.config, "vision_config") and self._senses is None):
            raise EngineError(
                f"routes are to be captured, but of model type {kind!r} in {str(folder)!r} the transformers "
                f"engine cannot tell them (it can of Qwen3's mixtures of experts); set "
                f"actor.routing_replay=false or take rollout.engine=sglang"
            )
        return routing

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served.

        Raises:
            InvalidRequest: naming the request and the limit.
        """
        tokens = request.tokens
        if len(tokens) >= self.capacity:
            raise InvalidRequest(
                f"request {request.id!r} has {len(tokens)} tokens, and the context of {self.capacity} must "
                "hold at least one more; shorten the prompt or use a model with a longer context"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary:
            bad = int(tokens[(tokens < 0) | (tokens >= self.vocabulary)][0])
            raise InvalidRequest(
                f"request {request.id!r} holds token {bad}; the vocabulary is 0 to {self.vocabulary - 1}: "
                "was it made by another model's tokenizer?"
            )
        stop = [token for token in request.sampling.stop_token_ids if token >= self.vocabulary]
        if stop:
            raise InvalidRequest(
                f"request {request.id!r} stops at token {stop[0]}, outside the vocabulary of "
                f"{self.vocabulary}"
            )
        self._check_media(request)

    def _check_media(self, request: GenerationRequest) -> None:
        if self._reader is not None:
            self._reader.check(request)
            return
        if request.media and not self._placeholders:
            raise InvalidRequest(
                f"request {request.id!r} carries {len(request.media)} media items; "
                f"model type {self._model.config.model_type!r} takes text only"
            )
        if not self._placeholders:
            return
        image, video = self._placeholders
        if (request.tokens == video).any():
            raise InvalidRequest(
                f"request {request.id!r} holds video placeholders; of model type "
                f"{self._model.config.model_type!r} this engine takes images only"
            )
        have = int((request.tokens == image).sum())
        need = 0
        for index, item in enumerate(request.media):
            if item.get("kind") != "image" or not {"pixel_values", "image_grid_thw"} <= item.keys():
                raise InvalidRequest(
                    f"media item {index} of request {request.id!r} has kind {item.get('kind')!r} and "
                    f"{sorted(item)}; expected an image with pixel_values and image_grid_thw"
                )
            need += int(np.prod(item["image_grid_thw"], axis=-1).sum()) // self._merge
        if have != need:
            raise InvalidRequest(
                f"request {request.id!r} has {have} image placeholder tokens, its {len(request.media)} media "
                f"items stand for {need}; tokens and media must come from one processor call"
            )

    def prefill(self, contexts: Sequence[Context], slots: Sequence[Sequence[int]]) -> Prefilled:
        """Compute the KV of each context once and copy it into each of its slots."""
        offsets = [0.0] * len(contexts)
        rows: list[Tensor] = [torch.empty(0)] * len(contexts)
        routes: dict[int, Routes] = {}
        for piece in pieces([len(context.tokens) for context in contexts]):
            chosen: list[Tensor] | None = None if self.routing is None else []
            logits, found = self._prefill(contexts, slots, piece, logits=True, into=chosen)
            assert logits is not None
            for index, row, offset in zip(piece, logits, found, strict=True):
                rows[index], offsets[index] = row, offset
            if chosen:
                routes.update(zip(piece, self._unpadded(chosen, contexts, piece), strict=True))
        return Prefilled(torch.stack(rows), offsets, [routes[index] for index in sorted(routes)])

    def recompute(
        self, contexts: Sequence[Context], slots: Sequence[Sequence[int]], routes: Sequence[Routes] = ()
    ) -> None:
        """Compute the KV of each context once and copy it into each of its slots, and nothing else.

        Args:
            contexts, slots: as in `prefill`.
            routes: of each context, as captured, which are followed: what is recomputed then differs by the
                weights alone, as it does in a trainer that follows them.
        """
        for piece in pieces([len(context.tokens) for context in contexts]):
            sheet = None
            if self.routing is not None:
                sheet = self._sheet(contexts, piece, self.routing)
                width = sheet.shape[1] // len(piece)
                for row, index in enumerate(piece):
                    own = torch.from_numpy(routes[index]).to(self.device).transpose(0, 1)
                    sheet[:, (row + 1) * width - own.shape[1] : (row + 1) * width] = own
            self._prefill(contexts, slots, piece, logits=False, follow=sheet)

    def _sheet(self, contexts: Sequence[Context], piece: Sequence[int], routing: Routing) -> Tensor:
        """int64 [layers, rows * width, top_k], with distinct experts everywhere (padding has to go
        somewhere).
        """
        width = max(len(contexts[index].tokens) for index in piece)
        filler = torch.arange(routing.top_k, device=self.device)
        return filler.repeat(len(routing.layers), len(piece) * width, 1)

    def _unpadded(
        self, chosen: list[Tensor], contexts: Sequence[Context], piece: Sequence[int]
    ) -> list[Routes]:
        assert self.routing is not None
        layers, (places, top_k) = len(chosen), chosen[0].shape
        narrow = torch.stack(chosen).to(getattr(torch, self.routing.dtype.name)).cpu().numpy()
        rows = narrow.reshape(layers, len(piece), places // len(piece), top_k).transpose(1, 2, 0, 3)
        return [rows[row, -len(contexts[index].tokens) :].copy() for row, index in enumerate(piece)]

    def _prefill(
        self,
        contexts: Sequence[Context],
        slots: Sequence[Sequence[int]],
        piece: Sequence[int],
        *,
        logits: bool,
        into: list[Tensor] | None = None,
        follow: Tensor | None = None,
    ) -> tuple[Tensor | None, Sequence[float]]:
        contexts, slots = [contexts[index] for index in piece], [slots[index] for index in piece]
        lengths = [len(context.tokens) for context in contexts]
        width = max(lengths)
        pads = [width - length for length in lengths]
        tokens = np.full((len(contexts), width), self._pad, np.int64)
        for row, context in enumerate(contexts):
            tokens[row, pads[row] :] = context.tokens
        ids = torch.from_numpy(tokens).to(self.device)
        mask = self._prefill_mask(pads, width)
        self._cache.begin_prefill()
        shows = any(context.media for context in contexts)
        if self._tower is not None and (self._senses is not None or not shows):
            steps = torch.arange(width)[None] - torch.tensor(pads)[:, None]
            places = steps.clamp_(min=0).to(self.device)
            shown = self._senses.show(contexts, pads, width) if self._senses is not None and shows else None
            found = self._tower.prefill(
                ids, places, mask, self._cache, logits=logits, into=into, follow=follow, shown=shown
            )
            offsets = [0.0] * len(contexts) if shown is None else shown.offsets
        else:
            positions, offsets = self._positions(contexts, pads, width)
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
                **self._pixels(contexts),
            )
            found = output.logits[:, -1]
        pairs = [(slot, row) for row, targets in enumerate(slots) for slot in targets]
        self._cache.place(
            [slot for slot, _ in pairs], [row for _, row in pairs], [pads[row] for _, row in pairs]
        )
        return found, offsets

    def decode(
        self,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        offsets: NDArray[np.float64],
        into: list[Tensor] | None = None,
    ) -> Tensor:
        """Feed one token to each of the slots 0 to rows-1; returns the next's logits [rows, vocabulary].

        Args:
            tokens: int64 [rows].
            lengths: int64 [rows], tokens each row already has in its slot; the new one is written there.
            offsets: float64 [rows], see `Prefilled`.
            into: where the experts chosen are added, int64 [rows, top_k] for each routing layer.
        """
        mask = self._cache.begin_decode(lengths)
        places = lengths + offsets
        whole = places.astype(np.int64)
        positions = torch.from_numpy(whole if (whole == places).all() else places.astype(np.float32)).to(
            self.device
        )
        ids = torch.from_numpy(tokens).to(self.device)
        if self._tower is not None:
            return self._tower.decode(ids, positions, mask, self._cache, int(whole.max()), into)
        positions = positions[:, None]
        output = self._model(
            input_ids=ids[:, None],
            attention_mask=mask,
            position_ids=positions.expand(3, -1, -1) if self._placeholders else positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, 0]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots over others."""
        self._cache.move(sources, targets)

    def drop_cache(self) -> None:
        """Nothing runs: give the KV's memory back."""
        self._cache.drop()

    def check_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are not exactly the model's weights.

        Raises:
            InvalidUpdate: naming the tensor.
        """
        for name, tensor in tensors.items():
            mine = self.layout.get(name)
            if mine is None:
                raise InvalidUpdate(
                    f"version {version} holds tensor {name!r}, which the model has not; it has "
                    f"{len(self.layout)} "
                    f"tensors like {next(iter(self.layout))!r} (tied weights go by their first name)"
                )
            if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
                raise InvalidUpdate(
                    f"tensor {name!r} of version {version} is {tensor.dtype} {list(tensor.shape)}; "
                    f"the model's is {mine.dtype} {list(mine.shape)}"
                )
        missing = [name for name in self.layout if name not in tensors]
        if missing:
            raise InvalidUpdate(
                f"version {version} lacks tensor {missing[0]!r} ({len(missing)} missing in all); a version "
                f"is complete"
            )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy checked weights in place."""
        for name, tensor in tensors.items():
            self.layout[name].copy_(tensor)

    def _positions(
        self, contexts: Sequence[Context], pads: Sequence[int], width: int
    ) -> tuple[Tensor, list[float]]:
        steps = torch.arange(width)[None] - torch.tensor(pads)[:, None]
        positions = steps.clamp(min=0)
        offsets = [0.0] * len(contexts)
        if self._placeholders:
            positions = positions.expand(3, -1, -1).clone()
            for row, context in enumerate(contexts):
                if context.media:
                    positions[:, row, pads[row] :], offsets[row] = self._rope_index(context)
        return positions.to(self.device), offsets

    def _rope_index(self, context: Context) -> tuple[Tensor, float]:
        kinds = np.zeros(len(context.tokens), np.int64)
        for token, kind in self._placeholders.items():
            kinds[context.tokens == token] = kind
        grids = np.concatenate([item["image_grid_thw"] for item in context.media])
        positions, offset = self._model.model.get_rope_index(
            torch.from_numpy(context.tokens)[None],
            torch.from_numpy(kinds)[None],
            image_grid_thw=torch.from_numpy(grids),
        )
        return positions[:, 0], float(offset)

    def _prefill_mask(self, pads: Sequence[int], width: int) -> Tensor | None:
        if not any(pads):
            return None  # the attention is then plainly causal
        steps = torch.arange(width, device=self.device)
        causal = steps[None, :] <= steps[:, None]
        real = steps[None, :] >= torch.tensor(pads, device=self.device)[:, None]
        allowed = causal[None] & real[:, None]
        mask = torch.full(allowed.shape, torch.finfo(self._dtype).min, dtype=self._dtype, device=self.device)
        return mask.masked_fill_(allowed, 0.0)[:, None]

    def _pixels(self, contexts: Sequence[Context]) -> dict[str, Tensor]:
        items = [item for context in contexts for item in context.media]
        if not items:
            return {}
        return {
            name: torch.from_numpy(np.concatenate([item[name] for item in items])).to(self.device)
            for name in ("pixel_values", "image_grid_thw")
        }
