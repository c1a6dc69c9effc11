"""What a model family has to say before Megatron can build it and its tensors can be found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcs.layout import MegatronShape

from relax.backends.train.errors import UntrainableModelError

if TYPE_CHECKING:  # which imports Megatron; families are also read where it is not installed
    from relax.backends.train.megatron.media import MediaSpec


@dataclass(frozen=True)
class Family:
    """One family of Hugging Face models that the backend maps itself, sharded, both ways.

    Attributes:
        model_types: `model_type` of the config.json files it reads, and of text configs within them.
        fields: the fields of Megatron's TransformerConfig that a text config (as a mapping) asks for, beyond
            what all families share.
        shape: sizes, and with them the name and shape of every Hugging Face tensor.
        decoder: what stands for `model.` in the Hugging Face names of the decoder's tensors.
        media: how it takes media, from its whole config; None for a family of text alone.
        encoders: what the Hugging Face names of each encoder's tensors begin with, by the encoder's name.
        fused_experts: its folders hold the experts of a layer in two tensors, input by output, instead of
            three tensors an expert; see `experts.py`.
    """

    model_types: tuple[str, ...]
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    shape: Callable[[Mapping[str, Any]], MegatronShape]
    decoder: str = "model."
    media: "Callable[[Any], MediaSpec] | None" = None
    encoders: Mapping[str, str] = field(default_factory=dict)
    fused_experts: bool = False

    def named(self, name: str) -> str:
        """The Hugging Face name of a decoder's tensor that `MegatronShape` names."""
        return self.decoder + name.removeprefix("model.") if name.startswith("model.") else name

    def encoder_named(self, name: str) -> str | None:
        """The Hugging Face name of an encoder's tensor, by its local one; None for another's."""
        _, found, rest = name.partition("encoders.")
        encoder, tower, inside = rest.partition(".tower.")
        return self.encoders[encoder] + inside if found and tower and encoder in self.encoders else None


def shape_of(config: Mapping[str, Any]) -> MegatronShape:
    """The shape of a decoder-only model as the Llama and Qwen families write it down.

    Raises:
        UntrainableModelError: the config asks for tensors that these families have no names for.
    """
    try:
        return MegatronShape.from_huggingface(config)
    except (ValueError, KeyError) as error:
        raise UntrainableModelError(f"the megatron backend cannot map this model: {error}") from error


def require(config: Mapping[str, Any], name: str, *allowed: object) -> None:
    """Refuse a config whose field has another value than the family is built for.

    Raises:
        UntrainableModelError: it has.
    """
    value = config.get(name, allowed[0])
    if value not in allowed:
        raise UntrainableModelError(
            f"config.json has {name} = {value!r}; the megatron backend builds {config.get('model_type')} "
            f"with {' or '.join(map(repr, allowed))} only: use actor.backend=torch_native for this model"
        )
