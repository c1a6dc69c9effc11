"""The KV cache of the running rows: one slot a row, slots dense, each row as long as it is.

A decode step reads slots [0, rows) up to the longest row's length and masks what lies beyond each row's own.
Rows leave by moving the last ones into the holes, so no dead row is ever computed. Storage grows with what
runs and is dropped when
nothing does: the bits of a batch then depend on that batch alone, not on what the engine served before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "relax_slots"
"""The attention implementation, in transformers' registry, that models over a SlotCache use."""

_WIDTH_STEP = 16
"""Attention widths are rounded up to this many positions, so that kernels see few shapes."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention where query heads that share a KV head become its query rows: for one new token a row this
    reads the cache in place, where repeating KV for each head would copy it (15 times slower at width 240 on
    a CPU).

    Args:
        query: [rows, heads, length, head_dim].
        key: [rows, kv_heads, width, head_dim].
        value: as key.
        mask: [rows, 1, length, width], added to scores; None is causal, with width = length.
        scaling: of scores; None is head_dim ** -0.5.

    Returns:
        [rows, length, heads, head_dim].
    """
    rows, heads, length, size = query.shape
    kv_heads = key.shape[1]
    if length > 1 or mask is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)
    if query.device.type != "cpu" or query.dtype != torch.float32:
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(rows, 1, heads, size)
    # Two matrix products and a softmax take two thirds of the time of the fused kernel, which is made for
    # many queries.
    width = key.shape[2]
    scores = torch.baddbmm(
        mask.expand(rows, kv_heads, 1, width).reshape(rows * kv_heads, 1, width),
        query.reshape(rows * kv_heads, heads // kv_heads, size),
        key.reshape(rows * kv_heads, width, size).transpose(1, 2),
        alpha=size**-0.5 if scaling is None else scaling,
    )
    out = torch.bmm(scores.softmax(-1), value.reshape(rows * kv_heads, width, size))
    return out.view(rows, 1, heads, size)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if query.shape[2] == 1 and attention_mask is not None:
        return attention(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(ATTENTION, _attention)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, kv_heads, width, head_dim] each."""

    is_sliding = False

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache
        self.fresh: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.fresh = (key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """In a prefill keep the states for `SlotCache.place`; in a decode write them at each row's end."""
        at = self._cache.decoding
        if at is None:
            self.fresh = (key_states, value_states)
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        rows, positions, width = at
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows), :, :width], self.values[: len(rows), :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity


class SlotCache(Cache):
    """See the module. `capacity` is the most positions a row may have, `slots` the most rows."""

    def __init__(
        self, layers: int, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv = [SlotLayer(self) for _ in range(layers)]
        """The layers, as what they are here."""
        super().__init__(layers=list(self.kv))
        self.capacity = capacity
        self.decoding: tuple[Tensor, Tensor, int] | None = None
        """In a decode step: rows int64 [rows], the position each writes int64 [rows], the width read."""
        self._slots = slots
        self._dtype, self._device = dtype, device
        self._masked = torch.finfo(dtype).min
        self._mask = torch.empty(0, 0, dtype=dtype, device=device)
        """[slots, width], added to attention scores: 0 where a row has a token."""

    def begin_decode(self, lengths: NDArray[np.int64]) -> Tensor:
        """Prepare a step in which row i writes position lengths[i]; returns the mask [rows, 1, 1, width]."""
        count = len(lengths)
        width = min(-(-(int(lengths.max()) + 1) // _WIDTH_STEP) * _WIDTH_STEP, self.capacity)
        self._grow(count, width)
        rows = torch.arange(count, device=self._device)
        positions = torch.from_numpy(lengths).to(self._device)
        self._mask[rows, positions] = 0.0
        self.decoding = (rows, positions, width)
        return self._mask[:count, None, None, :width]

    def begin_prefill(self) -> None:
        """The next forward computes whole left-padded sequences and touches no slot."""
        self.decoding = None

    def place(self, slots: Sequence[int], sources: Sequence[int], pads: Sequence[int]) -> None:
        """Copy the KV of the last prefill into slots.

        Args:
            slots: where to.
            sources: the row of the prefill for each slot; a row may be copied many times.
            pads: for each slot, the padding on the left of its source row.
        """
        first = self.kv[0].fresh
        assert first is not None
        length = first[0].shape[2]
        self._grow(max(slots) + 1, length)
        to = torch.tensor(slots, device=self._device)
        row = torch.tensor(sources, device=self._device)[:, None]
        pad = torch.tensor(pads, device=self._device)[:, None]
        # Shift each row to the left by its padding; what then lies beyond its end is a copy of its last
        # position, masked.
        steps = torch.arange(length, device=self._device)[None]
        column = (steps + pad).clamp(max=length - 1)
        for layer in self.kv:
            assert layer.keys is not None
            assert layer.values is not None
            assert layer.fresh is not None
            for stored, fresh in zip((layer.keys, layer.values), layer.fresh, strict=True):
                stored[to, :, :length] = fresh.transpose(1, 2)[row, column].transpose(1, 2)
            layer.fresh = None
        mask = torch.full(
            (len(slots), self._mask.shape[1]), self._masked, dtype=self._dtype, device=self._device
        )
        mask[:, :length][steps < length - pad] = 0.0
        self._mask[to] = mask

    def move(self, sources: Sequence[int], to: Sequence[int]) -> None:
        """Copy whole slots over others."""
        source, target = (torch.tensor(rows, device=self._device) for rows in (sources, to))
        for layer in self.kv:
            for stored in (layer.keys, layer.values):
                assert stored is not None
                stored[target] = stored[source]
        self._mask[target] = self._mask[source]

    def drop(self) -> None:
        """Give back all storage."""
        for layer in self.kv:
            layer.keys = layer.values = layer.fresh = None
        self._mask = self._mask.new_empty(0, 0)
        self.decoding = None

    def _grow(self, slots: int, width: int) -> None:
        """Make room for that many rows and positions, by doubling, so that growing is rare."""
        have_slots, have_width = self._mask.shape
        if slots <= have_slots and width <= have_width:
            return
        slots = have_slots if slots <= have_slots else min(_power_of_two(slots), self._slots)
        width = have_width if width <= have_width else min(_power_of_two(max(width, 64)), self.capacity)
        mask = torch.full((slots, width), self._masked, dtype=self._dtype, device=self._device)
        mask[:have_slots, :have_width] = self._mask
        self._mask = mask
        for layer in self.kv:
            layer.keys, layer.values = (
                self._resized(layer, index, slots, width, have_slots, have_width) for index in (0, 1)
            )

    def _resized(
        self, layer: SlotLayer, index: int, slots: int, width: int, have_slots: int, have_width: int
    ) -> Tensor:
        old = (layer.keys, layer.values)[index]
        shape = old if old is not None else (layer.fresh or (None, None))[index]
        assert shape is not None, "the first forward over an empty cache is a prefill"
        # Zeros, as masked positions are multiplied by weights of 0 and must be finite.
        new = torch.zeros(
            slots, shape.shape[1], width, shape.shape[3], dtype=self._dtype, device=self._device
        )
        if old is not None:
            new[:have_slots, :, :have_width] = old
        return new


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
