"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: put into a model, and merged into what travels.

The base weights keep their Hugging Face names to everybody outside; peft calls them `X.base_layer.weight` and
the adapter's matrices `X.lora_A.default.weight` [rank, in] and `X.lora_B.default.weight` [out, rank].
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relax.backends.train.errors import SettingsError
from relax.backends.train.torch_native.masters import local
from relax.config.lora import LoraSettings
from relax.distributed.adapters import merge

_BASE, _NAME = ".base_layer", "default"


class Adapters:
    """The adapters of a model. Only they are trained once they are there.

    Raises:
        SettingsError: peft is not installed, or no linear layer has a name of `targets`.
    """

    def __init__(self, model: nn.Module, settings: LoraSettings, seed: int) -> None:
        check_adapters(model, settings)
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
            lora_dropout=settings.dropout,
            target_modules=list(settings.targets),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, _NAME)
        self.scale = settings.alpha / settings.rank
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if hasattr(module, "lora_A")
        }
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        model.eval()

    def dropout(self, on: bool) -> None:
        """Drop the adapters' inputs, or not."""
        for layer in self._layers.values():
            layer.lora_dropout.train(on)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """A weight by its Hugging Face name with the adapter's update on it; of shards, this rank's."""
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is None or not name.endswith(".weight"):
            return local(weight)
        first, second = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach()
        whole = getattr(first, "full_tensor", None)
        return merge(local(weight), first if whole is None else whole(), local(second), self.scale)

    def merged_whole(self, name: str, weight: Tensor) -> Tensor:
        """`merged` of all shards: every rank calls it, and has all of the tensor afterwards."""
        whole = getattr(weight, "full_tensor", None)
        weight = weight if whole is None else whole()
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is None or not name.endswith(".weight"):
            return weight
        matrices = (layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach())
        first, second = (getattr(m, "full_tensor", lambda m=m: m)() for m in matrices)
        return merge(weight, first, second, self.scale)

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """`X.lora_A.weight` and `X.lora_B.weight` of every adapter; live memory."""
        for name, layer in self._layers.items():
            yield f"{name}.lora_A.weight", layer.lora_A[_NAME].weight.detach()
            yield f"{name}.lora_B.weight", layer.lora_B[_NAME].weight.detach()


def check_adapters(model: nn.Module, settings: LoraSettings) -> None:
    """See whether a model, which may be without weights, can be given adapters.

    Raises:
        SettingsError: peft is not installed, no linear layer has a name of `targets`, or one has its weight
            in common with the embedding.
    """
    if importlib.util.find_spec("peft") is None:
        raise SettingsError(
            f"actor.lora.rank = {settings.rank} needs peft, which is not installed: pip install "
            f"'relax-core[lora]', or set actor.lora.rank=0"
        )
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tied = _tied(model, linear)
    last = {name.rpartition(".")[2] for name in linear}
    missing = sorted(set(settings.targets) - last)
    if missing:
        raise SettingsError(
            f"actor.lora.targets names {missing}, and the model has no linear layers of that name; it "
            f"has {', '.join(sorted(last - tied))}"
        )
    both = sorted(tied & set(settings.targets))
    if both:
        raise SettingsError(
            f"actor.lora.targets names {both}, whose weight is the embedding's, too (tie_word_embeddings): "
            f"an adapter would be of one of the two, and engines have one weight for both; leave it out, or "
            f"untie the model"
        )


def _tied(model: nn.Module, linear: Mapping[str, nn.Module]) -> set[str]:
    """The last parts of the names of linear layers whose weight an embedding has, too."""
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {name.rpartition(".")[2] for name, module in linear.items() if id(module.weight) in shared}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(model.config, "tie_word_embeddings", False) and head is not None:  # tied when it is loaded
        found |= {name.rpartition(".")[2] for name, module in linear.items() if module is head}
    return found


def own_name(name: str) -> str | None:
    """The Hugging Face name of a parameter; None for an adapter's."""
    return None if ".lora_" in name else name.replace(_BASE, "")
