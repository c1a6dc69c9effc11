"""Write a tiny model folder: config, tokenizer and chat template, no weights (they come from a seed).

Everything is written as plain JSON, without importing torch or transformers, so that a command can make the
model of a quick start in a fraction of a second. About 105k parameters; the tokenizer is character level over
printable ASCII and newline, and reads any other character as "?".
"""

import json
import string
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from relax.backends import tiny_omni

Kind = Literal["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_omni"]
_SEEING = ("qwen3_vl", "qwen3_omni")
_MIXTURES = ("qwen3_moe", "qwen3_omni")

PAD = "<|endoftext|>"
EOS = "<|im_end|>"
SPECIALS = (PAD, "<|im_start|>", EOS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ALPHABET = "\n" + string.digits + string.ascii_letters + string.punctuation + " "

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- raise_exception("content part type '" + part['type'] + "' is neither text nor image") -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML: system, user, assistant and tool alike; content a string or a list of text and image parts."""

# One image of the digits task costs 1 to 4 tokens: a token is two by two patches of 16 x 16 pixels.
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 4},
}


def write_tiny(
    folder: str | Path,
    kind: Kind = "qwen3",
    *,
    max_position_embeddings: int = 2048,
    hidden_size: int = 64,
    intermediate_size: int = 192,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    num_experts: int | None = None,
    num_experts_per_tok: int | None = None,
    moe_intermediate_size: int | None = None,
) -> Path:
    """Write the folder of a tiny Qwen3, Qwen3-MoE, Qwen3-VL or thinker of a Qwen3-Omni; existing files of the
    same names are replaced.

    Args:
        folder: made if missing.
        kind: "qwen3" (text), "qwen3_moe" (text; experts in every layer, about 190k parameters), "qwen3_vl"
            (text and images; adds a vision tower of about 50k parameters) or "qwen3_omni" (text, images,
            video and sound; experts, a vision tower and an audio tower).
        max_position_embeddings: the context, in tokens.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim:
            of the language model. For qwen3_vl and qwen3_omni head_dim is a multiple of 16, which mRoPE's
            three sections share.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown kind, or dimensions that do not fit each other.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind {kind!r} is no tiny model; use one of {', '.join(get_args(Kind))}")
    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {num_attention_heads} is no multiple of "
            f"num_key_value_heads {num_key_value_heads}"
        )
    if head_dim % (multiple := 16 if kind in _SEEING else 2):
        raise ValueError(f"head_dim {head_dim} is no multiple of {multiple}")
    mixture = _mixture(kind, num_experts, num_experts_per_tok, moe_intermediate_size)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    omni = kind == "qwen3_omni"
    further = tiny_omni.AUDIO_SPECIALS if omni else ()
    tokenizer = character_tokenizer(further)
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "num_attention_heads": num_attention_heads,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": num_key_value_heads,
        "rms_norm_eps": 1e-6,
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    config = _config(kind, text, mixture, tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": EOS,
            "model_max_length": max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            "chat_template": _chat_template(kind),
            **(tiny_omni.tokenizer_config() if omni else {}),
        },
    )
    _write(
        folder / "special_tokens_map.json",
        {
            "pad_token": PAD,
            "eos_token": EOS,
            "additional_special_tokens": [s for s in (*SPECIALS, *further) if s not in (PAD, EOS)],
        },
    )
    _write(
        folder / "generation_config.json",
        {"eos_token_id": text["eos_token_id"], "pad_token_id": text["pad_token_id"], "do_sample": True},
    )
    if kind in _SEEING:
        _write(
            folder / "preprocessor_config.json", tiny_omni.preprocessor_config(_IMAGES) if omni else _IMAGES
        )
        _write(folder / "video_preprocessor_config.json", _videos(omni))
    return folder


def character_tokenizer(further: tuple[str, ...] = ()) -> Tokenizer:
    """One token a character of printable ASCII and newline; the specials first, pad is token 0; `further`
    specials last.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *ALPHABET, *further))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIALS, *further])
    return tokenizer


def _videos(omni: bool) -> dict[str, Any]:
    """video_preprocessor_config.json: frames are cut into patches as images are, two by two in time."""
    videos = {name: value for name, value in _IMAGES.items() if name != "image_processor_type"}
    videos |= {"min_frames": 2, "max_frames": 16, "fps": 2}
    if omni:
        return videos | {"video_processor_type": "Qwen2VLVideoProcessor"}
    # Qwen3-VL bounds the pixels of all frames together, Qwen3-Omni those of each.
    bounds = {name: 16 * pixels for name, pixels in _IMAGES["size"].items()}
    return videos | {"size": bounds, "video_processor_type": "Qwen3VLVideoProcessor"}


def _chat_template(kind: Kind) -> str:
    before, text_part, behind = CHAT_TEMPLATE.partition("{%- elif part['type'] == 'text' -%}")
    parts = tiny_omni.VIDEO_PART if kind in _SEEING else ""
    if kind == "qwen3_omni":
        parts += tiny_omni.AUDIO_PART
    return before + parts + text_part + behind


def _mixture(kind: Kind, experts: int | None, top_k: int | None, inner: int | None) -> dict[str, Any]:
    """What makes a Qwen3's config.json that of a Qwen3-MoE; nothing for the other kinds."""
    if kind not in _MIXTURES:
        if any(given is not None for given in (experts, top_k, inner)):
            raise ValueError(
                f"num_experts and what belongs to it are for {' and '.join(_MIXTURES)}; {kind} has no experts"
            )
        return {}
    experts, top_k, inner = experts or 8, top_k or 2, inner or 48
    if not 1 <= top_k <= experts:
        raise ValueError(f"num_experts_per_tok is {top_k}; {experts} experts take 1 to {experts}")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _config(
    kind: Kind, text: dict[str, Any], mixture: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    if kind not in _SEEING:
        return {**_text_config(text), **mixture}
    seeing = _vision_config(text, tokenizer)
    if kind == "qwen3_vl":
        return seeing
    experts = {name: value for name, value in mixture.items() if name != "architectures"}
    return tiny_omni.thinker_config(
        {**seeing["text_config"], **experts}, seeing["vision_config"], tokenizer.token_to_id
    )


def _text_config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        **text,
    }


def _vision_config(text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    # Half of head_dim are rotary frequencies, shared by time, height and width as 2 : 1 : 1.
    eighth = text["head_dim"] // 8
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2 * eighth, eighth, eighth],
        "mrope_interleaved": True,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 1],
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
