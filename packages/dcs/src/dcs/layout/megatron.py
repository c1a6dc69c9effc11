"""The layout of one rank of a Megatron-Core GPT: Megatron's parameter names, made of Hugging Face tensors.

Nothing of Megatron is imported. Rows of `linear_qkv` are, for each KV group, its query heads, its key head
and its value head; `linear_fc1` is the rank's part of gate above its part of up; the embedding and the
output layer are cut by vocabulary and padded with rows that belong to no global tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from dcs.layout.pieces import Piece, Shape, concatenated, shard, whole
from dcs.layout.shape import MegatronShape
from dcs.layout.tensors import Layout, TensorSpec

if TYPE_CHECKING:
    import torch

Own = tuple[str, Shape, tuple[Piece, ...]]  # a rank's tensor: name, shape, pieces


def megatron_layout(
    shape: MegatronShape,
    dtype: torch.dtype | str,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    etp_rank: int | None = None,
    etp_size: int | None = None,
    vpp_size: int = 1,
    pp_layers: Sequence[int] | None = None,
    vocab_divisor: int = 128,
    experts: Literal["grouped", "sequential"] = "grouped",
    transformer_engine: bool = True,
) -> Layout:
    """What a rank of a `GPTModel` holds, so that engines can plan against it.

    Names are those of the model's own `named_parameters()`: layers count from 0 on each pipeline stage. With
    virtual pipeline stages (`vpp_size` above 1) the model is a list of chunks, and names begin with
    `model0.`, `model1.`, ... as in Megatron's checkpoints. Publish with the same names.

    Args:
        shape: of the model.
        dtype: in which its tensors travel.
        tp_rank, tp_size: tensor parallelism. With more ranks than KV groups, a rank has a part of a group.
        pp_rank, pp_size: pipeline parallelism.
        ep_rank, ep_size: expert parallelism; a rank has `experts / ep_size` experts, in order.
        etp_rank, etp_size: tensor parallelism of the experts; that of the rest when it is not given.
        vpp_size: virtual stages of each pipeline stage (interleaved schedule).
        pp_layers: layers of each pipeline stage, when they are not equally many.
        vocab_divisor: Megatron's `make_vocab_size_divisible_by`: the vocabulary is padded to a multiple of
            this times `tp_size`.
        experts: `grouped` (TEGroupedMLP: `linear_fc1.weight0`, ...) or `sequential` (`local_experts.0`,
            ...). The older GroupedMLP keeps its weights transposed, what no boxes can describe.
        transformer_engine: norms before a column-parallel linear layer are part of it
            (`linear_qkv.layer_norm_weight`), as in the Transformer Engine spec; False for the local spec.

    Raises:
        ValueError: for sizes that Megatron would not build: what is not divisible, a rank outside of its
            group.
    """
    etp_size = tp_size if etp_size is None else etp_size
    etp_rank = tp_rank if etp_rank is None else etp_rank
    for name, rank, size in (
        ("tp", tp_rank, tp_size),
        ("pp", pp_rank, pp_size),
        ("ep", ep_rank, ep_size),
        ("etp", etp_rank, etp_size),
    ):
        if not 0 <= rank < size:
            raise ValueError(f"{name}_rank {rank} of {name}_size {size}: expected 0 <= rank < size")
    _divides("heads", shape.heads, "tp_size", tp_size)
    _divides("KV groups", max(shape.kv_groups, tp_size), "tp_size", min(shape.kv_groups, tp_size))
    _divides("ffn", shape.ffn, "tp_size", tp_size)
    if shape.experts:
        _divides("experts", shape.experts, "ep_size", ep_size)
        _divides("moe_ffn", shape.moe_ffn, "etp_size", etp_size)
        _divides("shared_ffn", shape.shared_ffn, "tp_size", tp_size)

    rank = _Rank(shape, tp_rank, tp_size, ep_rank, ep_size, etp_rank, etp_size, experts, transformer_engine)
    chunks = _stages(shape.layers, pp_size, vpp_size, pp_layers)
    specs: list[TensorSpec] = []
    for chunk in range(vpp_size):
        stage = chunk * pp_size + pp_rank
        prefix = f"model{chunk}." if vpp_size > 1 else ""
        first, last = stage == 0, stage == len(chunks) - 1
        for name, own, pieces in rank.tensors(chunks[stage], first, last, vocab_divisor):
            specs.append(TensorSpec(prefix + name, own, str(dtype).removeprefix("torch."), pieces))
    return Layout(tuple(sorted(specs, key=lambda spec: spec.name)))


class _Rank:
    def __init__(
        self,
        shape: MegatronShape,
        tp_rank: int,
        tp_size: int,
        ep_rank: int,
        ep_size: int,
        etp_rank: int,
        etp_size: int,
        experts: str,
        transformer_engine: bool,
    ) -> None:
        self.shape = shape
        self.globals = shape.tensors()
        self.tp = (tp_rank, tp_size)
        self.etp = (etp_rank, etp_size)
        each = shape.experts // ep_size
        self.experts = range(ep_rank * each, (ep_rank + 1) * each)
        self.sequential = experts == "sequential"
        self.transformer_engine = transformer_engine

    def tensors(self, layers: range, first: bool, last: bool, vocab_divisor: int) -> Iterator[Own]:
        """All tensors of one chunk of the model."""
        tied = self.shape.tied_embeddings
        if first:
            yield self._vocabulary(
                "embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab_divisor
            )
        for index, layer in enumerate(layers):
            for name, own, pieces in (*self._attention(layer), *self._mlp(layer)):
                yield f"decoder.layers.{index}.{name}", own, pieces
        if last:
            yield self._whole("decoder.final_layernorm.weight", "model.norm.weight")
            if not (tied and first):  # a tied output layer on a stage of its own has a copy of the embedding
                yield self._vocabulary("output_layer.weight", self.shape.output_name, vocab_divisor)

    def _attention(self, layer: int) -> Iterator[Own]:
        hf = f"model.layers.{layer}."
        yield self._whole(
            "self_attention.linear_qkv.layer_norm_weight"
            if self.transformer_engine
            else "input_layernorm.weight",
            hf + "input_layernorm.weight",
        )
        yield self._qkv(hf, "weight")
        if self.shape.qkv_bias:
            yield self._qkv(hf, "bias")
        yield self._cut("self_attention.linear_proj.weight", hf + "self_attn.o_proj.weight", 1, self.tp)
        if self.shape.qk_layernorm:
            yield self._whole("self_attention.q_layernorm.weight", hf + "self_attn.q_norm.weight")
            yield self._whole("self_attention.k_layernorm.weight", hf + "self_attn.k_norm.weight")

    def _mlp(self, layer: int) -> Iterator[Own]:
        hf = f"model.layers.{layer}."
        moe = self.shape.is_moe(layer)
        fused = self.transformer_engine and not moe
        yield self._whole(
            "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight",
            hf + "post_attention_layernorm.weight",
        )
        if not moe:
            yield self._fc1("mlp.linear_fc1.weight", hf + "mlp.", self.tp)
            yield self._cut("mlp.linear_fc2.weight", hf + "mlp.down_proj.weight", 1, self.tp)
            return
        yield self._whole("mlp.router.weight", hf + "mlp.gate.weight")
        for index, expert in enumerate(self.experts):
            names = [
                f"local_experts.{index}.linear_fc{n}.weight"
                if self.sequential
                else f"linear_fc{n}.weight{index}"
                for n in (1, 2)
            ]
            source = f"{hf}mlp.experts.{expert}."
            yield self._fc1(f"mlp.experts.{names[0]}", source, self.etp)
            yield self._cut(f"mlp.experts.{names[1]}", source + "down_proj.weight", 1, self.etp)
        if self.shape.shared_ffn:
            yield self._fc1("mlp.shared_experts.linear_fc1.weight", hf + "mlp.shared_expert.", self.tp)
            down = hf + "mlp.shared_expert.down_proj.weight"
            yield self._cut("mlp.shared_experts.linear_fc2.weight", down, 1, self.tp)
        if self.shape.shared_gate:
            yield self._whole("mlp.shared_experts.gate_weight", hf + "mlp.shared_expert_gate.weight")

    def _whole(self, name: str, source: str) -> Own:
        return name, self.globals[source], whole(source, self.globals[source])

    def _cut(self, name: str, source: str, dim: int, part: tuple[int, int]) -> Own:
        pieces = shard(source, self.globals[source], dim, *part)
        return name, pieces[0].extent, pieces

    def _fc1(self, name: str, source: str, part: tuple[int, int]) -> Own:
        names = (source + "gate_proj.weight", source + "up_proj.weight")
        halves = [shard(half, self.globals[half], 0, *part) for half in names]
        rows, width = halves[0][0].extent
        return name, (2 * rows, width), concatenated(halves)

    def _vocabulary(self, name: str, source: str, divisor: int) -> Own:
        rank, size = self.tp
        multiple = divisor * size
        rows = -(-self.shape.vocab // multiple) * multiple // size
        pieces = _rows([(source, 0, self.shape.vocab)], rank * rows, rows, self.globals)
        return name, (rows, self.shape.hidden), pieces

    def _qkv(self, hf: str, end: str) -> Own:
        shape, (rank, size) = self.shape, self.tp
        width = shape.head_dim
        heads = shape.heads // shape.kv_groups
        segments: list[tuple[str, int, int]] = []
        for group in range(shape.kv_groups):
            segments.append((f"{hf}self_attn.q_proj.{end}", group * heads * width, heads * width))
            segments.append((f"{hf}self_attn.k_proj.{end}", group * width, width))
            segments.append((f"{hf}self_attn.v_proj.{end}", group * width, width))
        rows = shape.kv_groups * (heads + 2) * width // size
        own = (rows, shape.hidden) if end == "weight" else (rows,)
        return f"self_attention.linear_qkv.{end}", own, _rows(segments, rank * rows, rows, self.globals)


def _rows(
    segments: list[tuple[str, int, int]], start: int, length: int, shapes: dict[str, Shape]
) -> tuple[Piece, ...]:
    """A window of rows of the tensor that `segments` (source, first row of it, rows) make up one below the
    other.

    What lies wholly behind them (padding) is one empty piece, as no pieces would mean a whole tensor.
    """
    found: list[Piece] = []
    position = 0
    for source, first, rows in segments:
        low, high = max(start, position), min(start + length, position + rows)
        if low < high:
            rest = shapes[source][1:]
            zero = (0,) * len(rest)
            begin = (first + low - position, *zero)
            found.append(Piece(source, shapes[source], begin, (low - start, *zero), (high - low, *rest)))
        position += rows
    if found:
        return tuple(found)
    source, shape = segments[0][0], shapes[segments[0][0]]
    return (Piece(source, shape, (0,) * len(shape), (0,) * len(shape), (0, *shape[1:])),)


def _stages(layers: int, pp_size: int, vpp_size: int, pp_layers: Sequence[int] | None) -> list[range]:
    """The layers of each stage, in the order in which a token passes them: chunk after chunk of all ranks."""
    stages = pp_size * vpp_size
    if pp_layers is None:
        _divides("layers", layers, "pp_size * vpp_size", stages)
        counts = [layers // stages] * stages
    elif vpp_size > 1:
        raise ValueError("pp_layers with virtual stages; give one of them")
    elif len(pp_layers) != pp_size or sum(pp_layers) != layers:
        raise ValueError(f"pp_layers {list(pp_layers)}: expected {pp_size} numbers that sum up to {layers}")
    else:
        counts = list(pp_layers)
    ends = [sum(counts[: index + 1]) for index in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _divides(what: str, number: int, by: str, divisor: int) -> None:
    if number % divisor:
        raise ValueError(f"{what} {number} is no multiple of {by} {divisor}")
