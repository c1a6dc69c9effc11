"""What makes a tiny model folder that of a Qwen3-Omni thinker: ears and eyes beside the experts' text model.

The thinker is what reads, sees and hears; it is the part of a Qwen3-Omni that is trained and asked. Sizes are
tiny, rates are the published ones: 100 mel frames a second, of which 8 make a token (13 for a whole second).
"""

from collections.abc import Callable
from typing import Any

AUDIO_SPECIALS = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
"""Behind all other tokens, so that those have the numbers they have in other tiny models."""

VIDEO_PART = """\
{%- elif part['type'] in ('video', 'video_url') -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
"""
"""Content part that the chat templates of tiny models that see know beside text and images."""

AUDIO_PART = """\
{%- elif part['type'] in ('audio', 'audio_url', 'input_audio') -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
"""
"""Content part that the chat template of a tiny Omni knows beside those."""

_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def thinker_config(
    text: dict[str, Any], vision: dict[str, Any], tokens: Callable[[str], int | None]
) -> dict[str, Any]:
    """config.json of a thinker.

    Args:
        text: its text_config, but for the model type.
        vision: its vision_config, but for the model type.
        tokens: the number of a special token.
    """
    return {
        "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
        "model_type": "qwen3_omni_moe_thinker",
        "audio_start_token_id": tokens("<|audio_start|>"),
        "audio_end_token_id": tokens("<|audio_end|>"),
        "audio_token_id": tokens("<|audio_pad|>"),
        "image_token_id": tokens("<|image_pad|>"),
        "video_token_id": tokens("<|video_pad|>"),
        "vision_start_token_id": tokens("<|vision_start|>"),
        "vision_end_token_id": tokens("<|vision_end|>"),
        "position_id_per_seconds": 13,
        "tie_word_embeddings": False,
        "text_config": {**text, "model_type": "qwen3_omni_moe_text", "tie_word_embeddings": False},
        "vision_config": {**vision, "model_type": "qwen3_omni_moe_vision_encoder"},
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "activation_function": "gelu",
            "conv_chunksize": 500,
            "d_model": 32,
            "downsample_hidden_size": 8,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "encoder_layers": 2,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 800,
            "num_mel_bins": 128,
            "output_dim": text["hidden_size"],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """What tokenizer_config.json says more, for transformers' own Omni processor."""
    return {"extra_special_tokens": _NAMED, "processor_class": "Qwen3OmniMoeProcessor"}


def preprocessor_config(image: dict[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json: the images' and, as in the published folder, the sounds' in one file."""
    return {
        **image,
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "chunk_length": 300,
        "dither": 0.0,
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16000,
    }
