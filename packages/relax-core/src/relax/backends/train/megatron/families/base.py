"""What a model family has to say before Megatron can build it and its tensors can be found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcs.layout import MegatronShape

from relax.backends.train.errors import UntrainableModelError


@dataclass(frozen=True)
class Family:
    """One family of Hugging Face models that the backend maps itself, sharded, both ways.

    Attributes:
        model_types: `model_type` of the config.json files it reads.
        fields: the fields of Megatron's TransformerConfig that a text config (as a mapping) asks for, beyond
            what all families share.
        shape: sizes, and with them the name and shape of every Hugging Face tensor.
    """

    model_types: tuple[str, ...]
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    shape: Callable[[Mapping[str, Any]], MegatronShape]


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
