"""The text layers of Qwen3, Qwen3-MoE, Qwen3-VL and Qwen3-Omni thinkers as plain functions over a slot cache.

Around a small model the modules, wrappers and kernel launches of transformers' forward are most of a decode
step, and around any model its last layer computes every position of a prefill where one is asked for. Other
families go through their own forward.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from transformers import PreTrainedConfig, PreTrainedModel

from relax.backends.inference.media import Shown
from relax.backends.inference.mixture import Mixture
from relax.backends.inference.slots import SlotCache, attention

_MODEL_TYPES = {"qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text"}
_MOVING_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on how long the sequence is."""


def serves(text: PreTrainedConfig) -> bool:
    """Whether `TextTower` computes what a model with this text configuration does."""
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    return text.model_type in _MODEL_TYPES and text.hidden_act == "silu" and rope not in _MOVING_ROPES


class TextTower:
    """The weights stay the model's parameters. A layer's q, k and v projections are moved into one tensor, of
    which each is a view from then on: one matrix product, no copy, and what is updated in place is updated
    here.

    Args:
        model: a causal language model for which `serves` holds, on its device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        whole: Any = model
        tower = getattr(whole.model, "language_model", whole.model)
        self._embedding: nn.Module = tower.embed_tokens
        self._head: nn.Linear = whole.lm_head
        self._norm: nn.Module = tower.norm
        self._layers = [_Layer(layer) for layer in tower.layers]
        for place, layer in enumerate(layer for layer in self._layers if layer.mixture is not None):
            layer.place = place
        self._rotary: nn.Module = tower.rotary_emb
        self._turns = torch.empty(0, 2, 1, 0)
        """[positions, 2, 1, head_dim]: the cosines, and the sines with the sign of what they multiply."""

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: SlotCache,
        last: int,
        into: list[Tensor] | None = None,
    ) -> Tensor:
        """One token a row, after `cache.begin_decode`.

        Args:
            tokens: int64 [rows].
            positions: int64 [rows]; float32 where one is between two whole ones.
            mask: [rows, 1, 1, width], added to scores.
            cache: where keys and values are and go.
            last: the highest position.
            into: where the experts chosen are added, int64 [rows, top_k] for each routing layer.

        Returns:
            Logits [rows, vocabulary].
        """
        hidden, cos, sin = self._begin(tokens[:, None], positions, last)
        for layer, slots in zip(self._layers, cache.kv, strict=True):
            query, key, value = layer.project(hidden, cos, sin, 1)
            keys, values = slots.update(key, value)
            hidden = layer.attended(hidden, attention(query, keys, values, mask, layer.scaling))
            hidden = layer.finish(hidden, into)
        return self._logits(hidden)

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: SlotCache,
        *,
        logits: bool,
        into: list[Tensor] | None = None,
        follow: Tensor | None = None,
        shown: Shown | None = None,
    ) -> Tensor | None:
        """Whole left-padded sequences, after `cache.begin_prefill`.

        Args:
            tokens: int64 [rows, length].
            positions: int64 [rows, length].
            mask: [rows, 1, length, length], added to scores; None is plainly causal.
            cache: where keys and values go.
            logits: False when only keys and values are asked for.
            into: where the experts chosen are added, int64 [rows * length, top_k] for each routing layer.
            follow: int64 [routing layers, rows * length, top_k], experts that are taken instead of choosing
                any; with `logits=False` only.
            shown: what rows are shown; its positions count, then, instead of `positions`.

        Returns:
            Logits after each row's last token [rows, vocabulary], if asked for.
        """
        rows, length = tokens.shape
        if shown is None:
            hidden, cos, sin = self._begin(tokens, positions.flatten(), length)
        else:
            hidden, cos, sin = self._begin_shown(tokens, shown)
        for index, (layer, slots) in enumerate(zip(self._layers, cache.kv, strict=True)):
            query, key, value = layer.project(hidden, cos, sin, length)
            slots.update(key, value)
            if index < len(self._layers) - 1:
                hidden = layer.attended(hidden, attention(query, key, value, mask, layer.scaling))
                hidden = layer.finish(hidden, into, layer.part_of(follow))
                if shown is not None and index < len(shown.deep):
                    hidden = hidden.index_add(0, shown.seen, shown.deep[index].to(hidden.dtype))
                continue
            # Of the last layer one position a row is read, or none.
            if not logits:
                return None
            tells = into is not None and layer.mixture is not None
            if not tells:
                query, hidden = query[:, :, -1:], hidden.view(rows, length, -1)[:, -1]
                mask = cos.new_zeros(rows, 1, 1, length) if mask is None else mask[:, :, -1:]
            hidden = layer.attended(hidden, attention(query, key, value, mask, layer.scaling))
            chosen = None
            if tells:
                # Every position has a route, though only the last one goes on to the experts.
                assert into is not None
                into.append(layer.choose(hidden))
                hidden = hidden.view(rows, length, -1)[:, -1]
                chosen = into[-1].view(rows, length, -1)[:, -1]
            hidden = layer.finish(hidden, follow=chosen)
            if shown is not None and index < len(shown.deep):
                deep = hidden.new_zeros(rows * length, hidden.shape[1])
                deep[shown.seen] = shown.deep[index].to(hidden.dtype)
                hidden = hidden + deep.view(rows, length, -1)[:, -1]
        return self._logits(hidden)

    def _begin_shown(self, tokens: Tensor, shown: Shown) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self._embedding(tokens).flatten(0, 1)
        hidden = hidden.index_copy(0, shown.at, shown.features.to(hidden.dtype))
        turns = _signed(*self._rotary(hidden, shown.positions)).flatten(0, 1)
        return hidden, turns[:, 0], turns[:, 1]

    def _begin(self, tokens: Tensor, positions: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self._embedding(tokens).flatten(0, 1)
        if positions.is_floating_point():
            turns = _signed(*self._rotary(hidden, positions[None]))[0]
            return hidden, turns[:, 0], turns[:, 1]
        if last >= len(self._turns):
            self._turns = self._turns_to(1 << max(last, 255).bit_length(), hidden)
        turns = self._turns[positions]
        return hidden, turns[:, 0], turns[:, 1]

    def _turns_to(self, count: int, like: Tensor) -> Tensor:
        return _signed(*self._rotary(like, torch.arange(count, device=like.device)[None]))[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(_normed(hidden, self._norm), self._head.weight, self._head.bias)


class _Layer:
    """One decoder layer; hidden states are [rows * length, hidden].

    Attributes:
        mixture: its experts; None in a dense layer.
        place: which of the routing layers it is.
    """

    def __init__(self, layer: Any) -> None:
        attend, mlp = layer.self_attn, layer.mlp
        self.scaling: float = attend.scaling
        self._head_dim: int = attend.head_dim
        self._before: nn.Module = layer.input_layernorm
        self._after: nn.Module = layer.post_attention_layernorm
        projections: list[nn.Linear] = [attend.q_proj, attend.k_proj, attend.v_proj]
        self._heads, self._kv_heads, _ = (one.out_features // self._head_dim for one in projections)
        self._qkv = _joined(projections, "weight")
        self._qkv_bias = None if projections[0].bias is None else _joined(projections, "bias")
        self._q_norm, self._k_norm = attend.q_norm, attend.k_norm
        self._out: nn.Linear = attend.o_proj
        self.place = 0
        self.mixture = Mixture(mlp) if hasattr(mlp, "experts") else None
        if self.mixture is None:
            self._gate, self._up, self._down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def part_of(self, routes: Tensor | None) -> Tensor | None:
        """This layer's part of [routing layers, tokens, top_k]; None for a dense layer."""
        return None if routes is None or self.mixture is None else routes[self.place]

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [rows, its heads, length, head_dim]."""
        size, heads, rotated = self._head_dim, self._heads, self._heads + self._kv_heads
        both = linear(_normed(hidden, self._before), self._qkv, self._qkv_bias).view(len(hidden), -1, size)
        turning = rms_norm(both[:, :rotated], (size,), None, self._q_norm.variance_epsilon)
        turning[:, :heads] *= self._q_norm.weight
        turning[:, heads:] *= self._k_norm.weight
        turned = (turning * cos).addcmul_(turning.roll(size // 2, -1), sin)
        turned = turned.view(-1, length, rotated, size).transpose(1, 2)
        value = both.view(-1, length, both.shape[1], size)[:, :, rotated:].transpose(1, 2)
        return turned[:, :heads], turned[:, heads:], value

    def attended(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's input and what attention gave, [rows, length, heads, head_dim], together."""
        return _added(hidden, mixed.reshape(len(hidden), -1), self._out)

    def choose(self, hidden: Tensor) -> Tensor:
        """The experts that `finish` would choose, int64 [tokens, top_k], and nothing else."""
        assert self.mixture is not None
        return self.mixture.choose(_normed(hidden, self._after))

    def finish(
        self, hidden: Tensor, into: list[Tensor] | None = None, follow: Tensor | None = None
    ) -> Tensor:
        """The layer's output from what `attended` gave; for `into` and `follow` see `Mixture`."""
        normed = _normed(hidden, self._after)
        if self.mixture is not None:
            return hidden + self.mixture(normed, into, follow)
        inner = silu(linear(normed, self._gate.weight)).mul_(linear(normed, self._up.weight))
        return _added(hidden, inner, self._down)


def _signed(cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, length, 2, 1, head_dim] of [rows, length, head_dim] each: the sines with the sign of what they
    multiply.
    """
    half = cos.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return torch.stack((cos, signed), dim=2)[:, :, :, None]


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _added(hidden: Tensor, inner: Tensor, by: nn.Linear) -> Tensor:
    """hidden + by(inner), in one kernel."""
    hidden = torch.addmm(hidden, inner, by.weight.t())
    return hidden if by.bias is None else hidden.add_(by.bias)


def _joined(projections: list[nn.Linear], name: str) -> Tensor:
    """Move the projections' parameters into one tensor, and make each a view of its part."""
    parts = [getattr(one, name) for one in projections]
    joined = torch.cat([part.detach() for part in parts])
    for one, part in zip(projections, joined.split([len(part) for part in parts]), strict=True):
        setattr(one, name, nn.Parameter(part, requires_grad=False))
    return joined
