"""A model folder becomes a module: the one place where trainer and engine build the same network.

A folder holds `config.json`, usually a tokenizer, and either safetensors or nothing, in which case the
weights are drawn from a seed. Trainer and engine agree on names, so a tensor published under its Hugging Face
name finds its place.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from relax.backends.model_files import ModelFolderError, weight_files

_SHOWN = 6
_UNREADABLE = (StrictDataclassError, ValueError, LookupError, OSError, TypeError, AttributeError)
"""What transformers raises for a config.json that says what it should not."""

ATTENTION = "sdpa"
"""On a CPU as fast as `eager` for 50 tokens, and 2 to 4 times as fast for 400, backward included."""


WHOLE_OMNI = frozenset({"qwen3_omni_moe"})
"""`model_type` of folders that hold a thinker and what speaks for it."""

THINKER = "thinker."
"""What those folders put before the names of the thinker's tensors."""


def load_config(folder: str | Path) -> PreTrainedConfig:
    """Read `config.json` of a local folder; nothing is looked up on a hub. Of a whole Qwen3-Omni it is the
    thinker's: what speaks is no part of a policy.

    Raises:
        ModelFolderError: there is no such folder, no config.json in it, or a model type transformers does not
            know.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            f"model folder {str(folder)!r} has no config.json; give a folder in Hugging Face layout, "
            "or write a tiny one with relax.backends.tiny.write_tiny"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except _UNREADABLE as error:
        raise ModelFolderError(
            f"{folder / 'config.json'} cannot be read by transformers: {error or repr(error)}"
        ) from error
    return config.thinker_config if config.model_type in WHOLE_OMNI else config


def weights_prefix(folder: str | Path) -> str:
    """What a folder's safetensors put before the names of the model's own tensors: `thinker.` in a whole
    Qwen3-Omni, nothing elsewhere.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    return THINKER if config.get("model_type") in WHOLE_OMNI else ""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language tower; the configuration itself for a text-only model."""
    return config.get_text_config(decoder=True)


def has_weights(folder: str | Path) -> bool:
    """Whether the folder holds safetensors, in one file or indexed."""
    return any(
        (Path(folder) / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")
    )


def build_model(
    folder: str | Path,
    dtype: torch.dtype | str = torch.float32,
    *,
    weights: bool = True,
    seed: int = 0,
    attention: str = ATTENTION,
) -> PreTrainedModel:
    """Build the network of a folder, in evaluation mode, on the CPU.

    Args:
        folder: a folder in Hugging Face layout.
        dtype: of parameters and activations; a torch dtype or its name ("float32", "bfloat16").
        weights: load the folder's safetensors. False, or a folder without any, draws the weights from `seed`:
            the same folder, dtype and seed give the same bits, and torch's global generator is left as it
            was.
        seed: see `weights`.
        attention: transformers' attention implementation.

    Raises:
        ModelFolderError: the folder cannot be read, its type is no causal language model, or its safetensors
            lack tensors of the model or hold foreign ones.
    """
    config = load_config(folder)
    dtype = torch_dtype(dtype)
    if dtype == torch.float64:  # the grouped matrix product of experts has no float64
        config._experts_implementation = "eager"
    model_class = _model_class(config)
    if weights and weight_files(Path(folder)):
        with _named(folder):
            model, info = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        # Of a whole Qwen3-Omni, transformers finds the thinker's by itself; the others are what speaks.
        prefix = weights_prefix(folder)
        foreign = {key for key in info["unexpected_keys"] if not prefix or key.startswith(prefix)}
        found = {"missing_keys": info["missing_keys"], "unexpected_keys": foreign}
        wrong: dict[str, list[str]] = {kind: sorted(keys) for kind, keys in found.items() if keys}
        if info["mismatched_keys"]:
            wrong["mismatched_sizes"] = [
                f"{name} is {list(here)}, expected {list(own)}" for name, here, own in info["mismatched_keys"]
            ]
        if wrong:
            told = {kind: keys[:_SHOWN] + ["..."] * (len(keys) > _SHOWN) for kind, keys in wrong.items()}
            raise ModelFolderError(
                f"safetensors in {str(folder)!r} do not fit {type(model).__name__}, which its config.json "
                f"describes: {told}"
            )
    else:
        with torch.random.fork_rng(devices=[]), _named(folder):
            torch.manual_seed(seed)
            model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


@contextlib.contextmanager
def _named(folder: str | Path) -> Iterator[None]:
    """A model cannot be made of what its config.json says: the error says of which."""
    try:
        yield
    except (*_UNREADABLE, RuntimeError) as error:
        raise ModelFolderError(
            f"no model can be made of {Path(folder) / 'config.json'}: {type(error).__name__}: {error}"
        ) from error


def named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights by Hugging Face name, detached, sharing the model's memory; tied ones by first name."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor.detach()))
    return list(named.values())


def unsampled_tokens(config: PreTrainedConfig) -> tuple[int, ...]:
    """Tokens that only stand for media in a prompt and that no policy may say.

    Engine and trainer give them probability 0 before the softmax, so that they speak of one distribution.
    """
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return tuple(token for name in names if (token := getattr(config, name, None)) is not None)


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelFolderError(
            f"dtype {dtype!r} is no floating dtype of torch; use float32, bfloat16 or float16"
        )
    return found


def _model_class(config: PreTrainedConfig) -> Any:
    found = _CLASSES.get(config.model_type)
    if found is not None:
        return found()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelFolderError(f"model type {config.model_type!r} is no causal language model of transformers")


def _qwen3() -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    return Qwen3ForCausalLM


def _qwen3_moe() -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM


def _qwen3_vl() -> Any:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration


def _qwen3_omni() -> Any:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    return Qwen3OmniMoeThinkerForConditionalGeneration


# The families this project tests, imported directly: the auto classes answer for the others, at the cost of a
# wider import.
_CLASSES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_omni_moe_thinker": _qwen3_omni,
}
