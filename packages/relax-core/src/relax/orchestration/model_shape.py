"""How large a model is, told by its config.json alone: weights by kind, and what a token costs in a cache."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.config import ConfigError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Their number, in published files and as transformers 5 saves it."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with or without experts, and of the encoders beside it.

    Attributes:
        kind: `model_type` of the config.json.
        sees: has a tower for pictures.
        hears: has a tower for sound.
        layers, hidden, heads, kv_heads, head_dim: of the decoder.
        ffn: width of a dense layer's MLP.
        vocabulary: rows of the embedding.
        context: tokens of the longest sequence.
        tied: the output layer is the embedding.
        experts, top_k, moe_ffn, moe_layers: experts of a layer that has some, how many of them a token
            visits, their width, and how many layers do.
        layer_weights: of one layer without its MLP: attention and norms.
        dense_mlp, router, expert: weights of one dense MLP, one router, one expert.
        encoders: weights of all towers beside the decoder.
    """

    kind: str
    sees: bool
    hears: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    tied: bool
    experts: int
    top_k: int
    moe_ffn: int
    moe_layers: int
    layer_weights: int
    dense_mlp: int
    router: int
    expert: int
    encoders: int

    @property
    def embedding(self) -> int:
        """Weights of the embedding; the output layer has as many, or none of its own."""
        return self.vocabulary * self.hidden

    @property
    def in_experts(self) -> int:
        """Weights of all experts."""
        return self.moe_layers * self.experts * self.expert

    @property
    def in_layers(self) -> int:
        """Weights of all layers but their experts."""
        return (
            self.layers * self.layer_weights
            + (self.layers - self.moe_layers) * self.dense_mlp
            + self.moe_layers * self.router
        )

    @property
    def outside(self) -> int:
        """Weights of the decoder outside its layers."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def weights(self) -> int:
        """All of them."""
        return self.outside + self.in_layers + self.in_experts + self.encoders

    @property
    def largest_layer(self) -> int:
        """Weights of the largest layer, its experts included."""
        experts = self.router + self.experts * self.expert
        return self.layer_weights + (max(experts, self.dense_mlp) if self.moe_layers else self.dense_mlp)

    def cache_bytes(self, itemsize: int, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Keys and values of one token on one GPU; fewer heads than ranks are held by several."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * -(-self.layers // pipeline_parallel) * heads * self.head_dim * itemsize


def read_shape(folder: Path) -> ModelShape:
    """The shape that a folder's config.json describes.

    Raises:
        ConfigError: there is none, or it lacks a size.
    """
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    try:
        return shape_of(content)
    except KeyError as error:
        raise ConfigError(
            f"{file} names no {error.args[0]}, so the size of this model cannot be told; a decoder in "
            f"Hugging Face's layout has one"
        ) from error


def shape_of(content: Mapping[str, Any]) -> ModelShape:
    """The shape that the content of a config.json describes. Raises KeyError for a size that it lacks."""
    outer = content.get("thinker_config", content)
    text = outer.get("text_config") or outer
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    experts = next((text[name] for name in EXPERTS if text.get(name)), 0)
    # `mlp_only_layers` are dense; of the others every `decoder_sparse_step`-th has experts.
    only, every = text.get("mlp_only_layers") or (), text.get("decoder_sparse_step") or 1
    sparse = [n for n in range(text["num_hidden_layers"]) if n not in only and (n + 1) % every == 0]
    moe_ffn = text.get("moe_intermediate_size") or 0
    kind = str(content["model_type"])
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = hidden * (2 * queries + 2 * keys)
    attention += 2 * head_dim if kind.startswith("qwen3") else 0  # a norm on every head of q and k
    attention += queries + 2 * keys if kind.startswith("qwen2") or text.get("attention_bias") else 0
    vision, audio = outer.get("vision_config"), outer.get("audio_config")
    return ModelShape(
        kind=kind,
        sees=vision is not None,
        hears=audio is not None,
        layers=text["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=text["intermediate_size"],
        vocabulary=text["vocab_size"],
        context=text["max_position_embeddings"],
        tied=bool(content.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        experts=experts,
        top_k=text.get("num_experts_per_tok") or 0,
        moe_ffn=moe_ffn,
        moe_layers=len(sparse) if experts else 0,
        layer_weights=attention + 2 * hidden,
        dense_mlp=3 * hidden * text["intermediate_size"],
        router=hidden * experts,
        expert=3 * hidden * moe_ffn,
        encoders=(_vision(vision) if vision else 0) + (_audio(audio) if audio else 0),
    )


def _vision(config: Mapping[str, Any]) -> int:
    """Weights of the vision tower of Qwen3-VL and Qwen3-Omni: patches, positions, blocks, and a merger at the
    end and at each layer of `deepstack_visual_indexes`.
    """
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    patch = config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2
    block = 4 * hidden * hidden + 2 * hidden * ffn + 4 * hidden + ffn + hidden + 4 * hidden
    merged = hidden * config["spatial_merge_size"] ** 2
    merger = merged * merged + merged + merged * config["out_hidden_size"] + config["out_hidden_size"]
    deep = len(config.get("deepstack_visual_indexes") or ())
    return (
        patch * hidden
        + hidden
        + config["num_position_embeddings"] * hidden
        + config["depth"] * block
        + merger
        + 2 * hidden
        + deep * (merger + 2 * merged)
    )


def _audio(config: Mapping[str, Any]) -> int:
    """Weights of the audio tower of Qwen3-Omni: three convolutions, layers, two projections."""
    hidden, ffn, channels = config["d_model"], config["encoder_ffn_dim"], config["downsample_hidden_size"]
    bins = config["num_mel_bins"]
    for _ in range(3):  # each convolution halves them
        bins = (bins + 1) // 2
    convolutions = 9 * channels + channels + 2 * (9 * channels * channels + channels)
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return (
        convolutions
        + channels * bins * hidden
        + config["encoder_layers"] * layer
        + 2 * hidden
        + hidden * hidden
        + hidden
        + hidden * config["output_dim"]
        + config["output_dim"]
    )
