"""Tiny local models: a byte-level tokenizer with Qwen's special tokens, and folders for from_pretrained."""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
from omni_processor import OmniProcessor, families
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- elif message.content -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

PREPROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64},
}


def _make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL),
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    """A factory: chat template -> tokenizer."""
    return _make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return _make_tokenizer()


@pytest.fixture(scope="session")
def special(tokenizer):
    """Special token -> its id."""
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}


@pytest.fixture(scope="session")
def text_processor(tokenizer) -> OmniProcessor:
    return OmniProcessor(tokenizer)


@pytest.fixture(scope="session")
def preprocessor() -> dict:
    """An image preprocessor config with small bounds: 4 to 64 tokens an image."""
    return dict(PREPROCESSOR)


@pytest.fixture(scope="session")
def make_processor(tokenizer):
    """A factory: options of OmniProcessor -> qwen3_vl processor with small bounds."""

    def make(**options) -> OmniProcessor:
        family = families.create("qwen3_vl", tokenizer, preprocessor=PREPROCESSOR)
        return OmniProcessor(tokenizer, family=family, **options)

    return make


@pytest.fixture(scope="session")
def processor(make_processor) -> OmniProcessor:
    return make_processor()


@pytest.fixture
def vl_folder(tmp_path, tokenizer) -> Path:
    """A qwen3_vl model folder as the hub has them, without weights."""
    folder = tmp_path / "tiny-vl"
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture
def text_folder(tmp_path, tokenizer) -> Path:
    """A text-only model folder, without weights."""
    folder = tmp_path / "tiny-text"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.fixture(scope="session")
def picture() -> Image.Image:
    """A 128 x 96 picture with smooth and noisy parts."""
    rows, columns = np.mgrid[0:96, 0:128]
    smooth = np.stack([rows * 2, columns * 2 - rows, 255 - columns], axis=-1).clip(0, 255)
    noise = np.random.default_rng(0).integers(0, 60, smooth.shape)
    return Image.fromarray((smooth * 0.75 + noise).astype(np.uint8))
