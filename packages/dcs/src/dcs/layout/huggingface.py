"""The layout of an engine's rank: Hugging Face names, whole or cut and fused as vLLM and SGLang do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from dcs.layout.pieces import Piece, Shape, boxed, concatenated, own_shape, shard, stacked, whole
from dcs.layout.shape import MegatronShape
from dcs.layout.tensors import Layout, TensorSpec

if TYPE_CHECKING:
    import torch

# How the experts of a layer may be grouped into two tensors: names of both below `mlp.experts.`.
_GROUPED = {
    "w13": ("w13_weight", "w2_weight"),  # vLLM and SGLang
    "gate_up_proj": ("gate_up_proj", "down_proj"),  # transformers from 5 on
}


def huggingface_layout(
    shape: MegatronShape,
    dtype: torch.dtype | str,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    fused_qkv: bool = False,
    fused_gate_up: bool = False,
    experts: Literal["each", "w13", "gate_up_proj"] = "each",
    vocab_divisor: int = 1,
) -> Layout:
    """What a rank of an engine holds. By default, all of the model under its Hugging Face names.

    Args:
        shape: of the model.
        dtype: in which its tensors travel.
        tp_rank, tp_size: tensor parallelism. With more ranks than KV heads, several ranks have the same ones.
        ep_rank, ep_size: expert parallelism; experts are then not cut by tensor parallelism.
        fused_qkv: one `self_attn.qkv_proj` with this rank's q above its k above its v.
        fused_gate_up: one `mlp.gate_up_proj` (also of shared and of single experts), gate above up.
        experts: `each` expert on its own, or those of a layer stacked in two tensors: `w13` and `w2` as vLLM
            and SGLang name them, or `gate_up_proj` and `down_proj` as transformers does.
        vocab_divisor: the vocabulary is padded to a multiple of this (64 in vLLM and SGLang) before it is
            cut.

    Raises:
        ValueError: for what cannot be cut evenly, or a rank outside of its group.
    """
    for name, rank, size in (("tp", tp_rank, tp_size), ("ep", ep_rank, ep_size)):
        if not 0 <= rank < size:
            raise ValueError(f"{name}_rank {rank} of {name}_size {size}: expected 0 <= rank < size")
    padded = -(-shape.vocab // vocab_divisor) * vocab_divisor
    cuts = {
        "heads": shape.heads,
        "ffn": shape.ffn,
        "padded vocabulary": padded,
        "shared_ffn": shape.shared_ffn,
    }
    if shape.experts:
        cuts["moe_ffn"] = shape.moe_ffn if ep_size == 1 else 0
        if shape.experts % ep_size:
            raise ValueError(f"experts {shape.experts} is no multiple of ep_size {ep_size}")
    for name, length in cuts.items():
        if length % tp_size:
            raise ValueError(f"{name} {length} is no multiple of tp_size {tp_size}")
    if max(shape.kv_groups, tp_size) % min(shape.kv_groups, tp_size):
        raise ValueError(
            f"{shape.kv_groups} KV heads over {tp_size} ranks: one must be a multiple of the other"
        )

    rank = _Rank(shape, tp_rank, tp_size, ep_rank, ep_size, padded)
    specs = []
    for name, own, pieces in rank.tensors(fused_qkv, fused_gate_up, experts):
        # All of a tensor under its own name is written without pieces, as `dcs.layout.of` does.
        plain = len(pieces) == 1 and (name, own) == (pieces[0].source, pieces[0].shape) == (
            name,
            pieces[0].extent,
        )
        specs.append(TensorSpec(name, own, str(dtype).removeprefix("torch."), () if plain else pieces))
    return Layout(tuple(sorted(specs, key=lambda spec: spec.name)))


Own = tuple[str, Shape, tuple[Piece, ...]]  # a rank's tensor: name, shape, pieces


class _Rank:
    def __init__(
        self, shape: MegatronShape, tp_rank: int, tp_size: int, ep_rank: int, ep_size: int, padded: int
    ) -> None:
        self.shape = shape
        self.globals = shape.tensors()
        self.tp = (tp_rank, tp_size)
        self.expert_tp = self.tp if ep_size == 1 else (0, 1)
        each = shape.experts // ep_size
        self.experts = range(ep_rank * each, (ep_rank + 1) * each)
        self.vocabulary_rows = padded // tp_size

    def tensors(self, fused_qkv: bool, fused_gate_up: bool, experts: str) -> Iterator[Own]:
        yield self._vocabulary("model.embed_tokens.weight")
        if not self.shape.tied_embeddings:
            yield self._vocabulary("lm_head.weight")
        yield self._whole("model.norm.weight")
        for layer in range(self.shape.layers):
            yield from self._attention(f"model.layers.{layer}.", fused_qkv)
            yield from self._mlp(f"model.layers.{layer}.mlp.", layer, fused_gate_up, experts)

    def _attention(self, prefix: str, fused: bool) -> Iterator[Own]:
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield self._whole(f"{prefix}{name}.weight")
        for end in ("weight", "bias") if self.shape.qkv_bias else ("weight",):
            names = [f"{prefix}self_attn.{name}_proj.{end}" for name in "qkv"]
            parts = [shard(names[0], self.globals[names[0]], 0, *self.tp), *map(self._kv_heads, names[1:])]
            if fused:
                yield _own(f"{prefix}self_attn.qkv_proj.{end}", concatenated(parts))
            else:
                yield from (_own(name, part) for name, part in zip(names, parts, strict=True))
        output = f"{prefix}self_attn.o_proj.weight"
        yield _own(output, shard(output, self.globals[output], 1, *self.tp))
        if self.shape.qk_layernorm:
            yield self._whole(f"{prefix}self_attn.q_norm.weight")
            yield self._whole(f"{prefix}self_attn.k_norm.weight")

    def _mlp(self, prefix: str, layer: int, fused: bool, experts: str) -> Iterator[Own]:
        if not self.shape.is_moe(layer):
            yield from self._gated(prefix, self.tp, fused)
            return
        yield self._whole(prefix + "gate.weight")
        if self.shape.shared_ffn:
            yield from self._gated(prefix + "shared_expert.", self.tp, fused)
        if self.shape.shared_gate:
            yield self._whole(prefix + "shared_expert_gate.weight")
        sources = [f"{prefix}experts.{expert}." for expert in self.experts]
        if experts == "each":
            for source in sources:
                yield from self._gated(source, self.expert_tp, fused)
            return
        first, second = _GROUPED[experts]
        up = stacked(concatenated(self._gate_up(source, self.expert_tp)) for source in sources)
        down = stacked(self._down(source, self.expert_tp) for source in sources)
        yield _own(f"{prefix}experts.{first}", up)
        yield _own(f"{prefix}experts.{second}", down)

    def _gated(self, prefix: str, part: tuple[int, int], fused: bool) -> Iterator[Own]:
        pair = self._gate_up(prefix, part)
        if fused:
            yield _own(prefix + "gate_up_proj.weight", concatenated(pair))
        else:
            yield from (_own(half[0].source, half) for half in pair)
        down = self._down(prefix, part)
        yield _own(down[0].source, down)

    def _gate_up(self, prefix: str, part: tuple[int, int]) -> list[tuple[Piece, ...]]:
        names = (prefix + "gate_proj.weight", prefix + "up_proj.weight")
        return [shard(name, self.globals[name], 0, *part) for name in names]

    def _down(self, prefix: str, part: tuple[int, int]) -> tuple[Piece, ...]:
        name = prefix + "down_proj.weight"
        return shard(name, self.globals[name], 1, *part)

    def _whole(self, name: str) -> Own:
        return name, self.globals[name], whole(name, self.globals[name])

    def _kv_heads(self, name: str) -> tuple[Piece, ...]:
        rank, size = self.tp
        shared = max(size // self.shape.kv_groups, 1)  # ranks that have the same heads
        return shard(name, self.globals[name], 0, rank // shared, size // shared)

    def _vocabulary(self, name: str) -> Own:
        rows, first = self.vocabulary_rows, self.tp[0] * self.vocabulary_rows
        vocab, hidden = self.globals[name]
        start = min(first, vocab)
        length = min(rows, vocab - start)  # 0 where all of the rank's rows are padding
        return name, (rows, hidden), boxed(name, (vocab, hidden), (start, 0), (length, hidden))


def _own(name: str, pieces: tuple[Piece, ...]) -> Own:
    return name, own_shape(pieces), pieces
