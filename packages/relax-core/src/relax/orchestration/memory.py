"""What a GPU and a node have to hold, estimated from the model's config.json before anything is started.

Weights, gradients and optimizer state are counted exactly, as the backends hold them; activations by what a
layer keeps for its backward pass with an attention that keeps no scores ("Reducing Activation Recomputation
in Large Transformer Models", Korthikanti et al., 2022, section 4, without its quadratic term).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from relax.config import RunConfig
from relax.orchestration.model_shape import ModelShape

USABLE = 0.92
"""Share of a GPU's memory that an estimate may fill: the rest is for the CUDA context, NCCL's buffers and
what lies between blocks.
"""

SGLANG_FRACTION = 0.85
"""Taken for SGLang's own choice of a share for weights and cache, which depends on the GPU."""

ITEMSIZE = {"float32": 4, "bfloat16": 2}

LOGITS = 10
"""Bytes of a logit in training: as it comes in half precision, in float32, and the gradient of that."""


@dataclass(frozen=True)
class Term:
    """A part of an estimate: what it is, how it was reckoned, and its bytes."""

    what: str
    formula: str
    nbytes: int


@dataclass(frozen=True)
class Estimate:
    """What one GPU of a role holds."""

    role: str
    terms: tuple[Term, ...]

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)


def actor(config: RunConfig, shape: ModelShape) -> Estimate:
    """A GPU of the trainer; of a pipeline's stages the fullest."""
    split = _megatron_split if config.actor.backend == "megatron" else _native_split
    return Estimate("actor", (*split(config, shape), *_activations(config, shape)))


def reference(config: RunConfig, shape: ModelShape) -> Estimate:
    """A GPU of the reference: weights, and a forward pass that keeps nothing."""
    weights = _weights(config, shape)
    tokens, actor = _tokens(config, shape), config.actor
    width = ITEMSIZE[actor.dtype]
    layer = tokens * _kept(shape) * width // actor.tensor_parallel
    logits = tokens * shape.vocabulary * (width + 4) // actor.tensor_parallel
    return Estimate(
        "reference",
        (
            *weights,
            Term("one layer", f"{tokens:,} tokens x {_kept(shape):,} x {width} B", layer),
            Term("logits", f"{tokens:,} tokens x {shape.vocabulary:,} x {width + 4} B", logits),
        ),
    )


def engine(config: RunConfig, shape: ModelShape, gpu_memory: int) -> tuple[Estimate, int]:
    """A GPU of an engine, and the tokens of its cache.

    Args:
        gpu_memory: bytes of the GPU; SGLang fills what it is allowed to with its cache.
    """
    if config.rollout.engine == "sglang":
        return _sglang(config, shape, gpu_memory)
    width = ITEMSIZE[config.model.dtype]
    tokens = config.rollout.max_running * capacity(config, shape)
    each = shape.cache_bytes(width)
    terms = (
        Term("weights", f"{width} B x {shape.weights / 1e9:.2f} G", width * shape.weights),
        Term(
            "keys and values",
            f"{config.rollout.max_running} requests x {capacity(config, shape):,} tokens x {each:,} B",
            tokens * each,
        ),
        Term(
            "logits",
            f"{config.rollout.max_running} requests x {shape.vocabulary:,} x {width + 4} B",
            config.rollout.max_running * shape.vocabulary * (width + 4),
        ),
    )
    return Estimate("rollout", terms), tokens


def _sglang(config: RunConfig, shape: ModelShape, gpu_memory: int) -> tuple[Estimate, int]:
    settings, width = config.rollout.sglang, ITEMSIZE[config.model.dtype]
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    weights = width * shape.weights // ranks
    each = shape.cache_bytes(width, settings.tensor_parallel, settings.pipeline_parallel)
    share = settings.memory_fraction or SGLANG_FRACTION
    room = max(0, int(gpu_memory * share) - weights) // each
    tokens = room if settings.cache_tokens is None else settings.cache_tokens
    terms = (
        Term("weights", f"{width} B x {shape.weights / 1e9:.2f} G / {ranks} ranks", weights),
        Term("keys and values", f"{tokens:,} tokens x {each:,} B", tokens * each),
    )
    return Estimate("rollout", terms), tokens


def capacity(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest sequence of a run."""
    return min(config.model.context_length or shape.context, shape.context)


def published(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of one version of the weights as it travels."""
    return ITEMSIZE[config.model.dtype] * shape.weights


def _weights(config: RunConfig, shape: ModelShape) -> tuple[Term, ...]:
    actor, width = config.actor, ITEMSIZE[config.actor.dtype]
    if actor.backend == "megatron":
        held = sum(_held(config, shape))
        return (Term("weights", f"{width} B x {held / 1e9:.2f} G held", width * held),)
    if _sharded(config):
        return (
            Term(
                "shards of weights",
                f"{width} B x {shape.weights / 1e9:.2f} G / {actor.data_parallel}",
                width * shape.weights // actor.data_parallel,
            ),
            _gathered(config, shape),
        )
    return (Term("weights", f"{width} B x {shape.weights / 1e9:.2f} G", width * shape.weights),)


def _held(config: RunConfig, shape: ModelShape) -> tuple[int, int]:
    """Weights on one Megatron rank: without experts, and of experts. The first stage also has the embedding,
    the last the output layer; without pipeline both are on every rank.
    """
    actor = config.actor
    stages = actor.pipeline_parallel
    outside = shape.outside if stages == 1 else shape.embedding
    dense = (shape.in_layers // stages + outside) // actor.tensor_parallel
    experts = shape.in_experts // (stages * actor.expert_parallel * actor.expert_tensor_parallel)
    return dense, experts


def _megatron_split(config: RunConfig, shape: ModelShape) -> Sequence[Term]:
    actor = config.actor
    width = ITEMSIZE[actor.dtype]
    state = 12 if actor.dtype == "bfloat16" else 8
    dense, experts = _held(config, shape)
    replicas = expert_replicas = 1
    if actor.megatron.distributed_optimizer:
        replicas = actor.data_parallel * actor.context_parallel
        around = replicas * actor.tensor_parallel
        expert_replicas = around // (actor.expert_parallel * actor.expert_tensor_parallel)
    held = f"({dense / 1e9:.2f} G + {experts / 1e9:.2f} G of experts)"
    return (
        Term("weights", f"{width} B x {held}", width * (dense + experts)),
        Term("gradients", f"4 B x {held}", 4 * (dense + experts)),
        Term(
            "masters and moments" if state == 12 else "moments",
            f"{state} B x ({dense / 1e9:.2f} G / {replicas} + {experts / 1e9:.2f} G / {expert_replicas})",
            state * (dense // replicas + experts // expert_replicas),
        ),
    )


def _sharded(config: RunConfig) -> bool:
    return config.actor.fsdp and config.actor.ranks > 1


def _gathered(config: RunConfig, shape: ModelShape) -> Term:
    width = ITEMSIZE[config.actor.dtype]
    gathered = 2 * shape.largest_layer + shape.outside + shape.encoders
    return Term(
        "gathered",
        f"{width} B x (2 layers of {shape.largest_layer / 1e9:.2f} G + {_beside(shape):.2f} G outside)",
        width * gathered,
    )


def _beside(shape: ModelShape) -> float:
    return (shape.outside + shape.encoders) / 1e9


def _native_split(config: RunConfig, shape: ModelShape) -> Sequence[Term]:
    actor, width, total = config.actor, ITEMSIZE[config.actor.dtype], shape.weights
    masters = actor.dtype != "float32" and actor.master_weights
    trained = total if not actor.lora.rank else _adapters(config, shape)
    billions, count = f"{trained / 1e9:.2f} G", actor.data_parallel
    if not _sharded(config):
        kept = 4 + 4 + 8 if masters else 3 * width
        return (
            Term("weights", f"{width} B x {total / 1e9:.2f} G", width * total),
            Term(
                "masters, gradients and moments" if masters else "gradients and moments",
                f"{kept} B x {billions}",
                kept * trained,
            ),
        )
    # Sharded weights are held in float32 where there are masters, and gathered in the dtype computed in.
    held = 4 if actor.master_weights else width
    return (
        Term("shards of weights", f"{held} B x {total / 1e9:.2f} G / {count}", held * total // count),
        Term(
            "shards of gradients and moments",
            f"{3 * held} B x {billions} / {count}",
            3 * held * trained // count,
        ),
        _gathered(config, shape),
        Term(
            "gradients before they are spread",
            f"{width} B x ({shape.largest_layer / 1e9:.2f} G + {_beside(shape):.2f} G outside)",
            width * (shape.largest_layer + shape.outside + shape.encoders),
        ),
    )


def _adapters(config: RunConfig, shape: ModelShape) -> int:
    """Weights of adapters on all linear layers of the decoder, which are at least those that have one."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.ffn)
    return shape.layers * config.actor.lora.rank * sides


def _tokens(config: RunConfig, shape: ModelShape) -> int:
    """Most tokens of a rank in one forward and backward."""
    actor = config.actor
    most = actor.micro_batch_tokens or actor.micro_batch_size * capacity(config, shape)
    most = -(-most // actor.data_parallel)
    # However few are asked for, a row is not cut.
    longest = capacity(config, shape)
    most = max(longest, most if actor.rank_tokens is None else min(actor.rank_tokens, most))
    return -(-most // actor.context_parallel)


def _kept(shape: ModelShape) -> int:
    """Numbers that a layer keeps of a token for its backward pass: norms and residuals, queries and what
    attention made of them, keys and values, and the four of a gated MLP.
    """
    width = shape.top_k * shape.moe_ffn if shape.moe_layers else shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 4 * shape.hidden + 2 * queries + 2 * keys + 4 * width


def _activations(config: RunConfig, shape: ModelShape) -> Sequence[Term]:
    actor, width = config.actor, ITEMSIZE[config.actor.dtype]
    tokens, split = _tokens(config, shape), actor.tensor_parallel
    kept = _kept(shape)
    whole = (
        actor.gradient_checkpointing if actor.backend != "megatron" else actor.megatron.recompute == "full"
    )
    # One forward, one backward in turn: the first stage keeps as many micro-batches as there are stages.
    layers = f"{shape.layers} layers"
    if whole:
        spread = split if actor.megatron.sequence_parallel else 1
        terms = [
            Term(
                "inputs of layers",
                f"{tokens:,} tokens x {shape.hidden:,} x {layers} x {width} B / {spread}",
                tokens * shape.hidden * shape.layers * width // spread,
            ),
            Term(
                "one layer computed again",
                f"{tokens:,} tokens x {kept:,} x {width} B / {split}",
                tokens * kept * width // split,
            ),
        ]
    else:
        terms = [
            Term(
                "activations",
                f"{tokens:,} tokens x {kept:,} x {layers} x {width} B / {split}",
                tokens * kept * shape.layers * width // split,
            )
        ]
    terms.append(
        Term(
            "logits",
            f"{tokens:,} tokens x {shape.vocabulary:,} x {LOGITS} B / {split}",
            tokens * shape.vocabulary * LOGITS // split,
        )
    )
    return terms
