"""What a server serves, told by its model folder without loading it: weights, vocabulary, context, routes."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agentic import GenerationRequest
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax.backends.inference.errors import EngineError, InvalidRequest, InvalidUpdate
from relax.backends.inference.sglang.answers import Captured
from relax.backends.inference.sglang.experts import apart, together
from relax.backends.inference.sglang.pictures import FAMILIES, PictureRules
from relax.backends.model_files import ModelFolderError, read_config, weight_files
from relax.backends.models import build_model, has_weights, torch_dtype
from relax.backends.routes import routing_of

OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Not among the weights where the model ties it to its embedding."""

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")

LONGEST = 1 << 20


@dataclass(frozen=True)
class ServedModel:
    """A model as its folder describes it.

    Attributes:
        folder: with weights.
        weights: as a trainer names them (`experts`), on torch's meta device: shapes and dtypes.
        vocabulary: token ids are below it.
        context: tokens of prompt and response together.
        captured: what a server tells of its routes; None for a dense model.
        never: tokens that only stand for media, which no policy may say.
        tied: the output layer is the embedding.
        pictures: what becomes of pictures; None for a model that takes none here.
    """

    folder: Path
    weights: Mapping[str, Tensor]
    vocabulary: int
    context: int
    captured: Captured | None
    never: tuple[int, ...]
    tied: bool
    pictures: PictureRules | None = None

    @classmethod
    def read(cls, folder: Path, dtype: str, completed: Path, seed: int) -> "ServedModel":
        """Read a folder. One without weights, such as a tiny model's, is completed with weights drawn from
        `seed` in the folder `completed`, because a server starts with some; the first version replaces them.

        Args:
            folder: in Hugging Face layout.
            dtype: of the floating tensors of a version.
            completed: where to write the completed one.
            seed: of its weights.

        Raises:
            EngineError: a file is missing or damaged.
        """
        if not has_weights(folder):
            build_model(folder, dtype, weights=False, seed=seed).save_pretrained(completed)
            for other in folder.iterdir():  # its tokenizer, and how pictures are processed
                if other.is_file() and not (completed / other.name).exists():
                    shutil.copyfile(other, completed / other.name)
            folder = completed
        try:
            config = read_config(folder)
            weight_files(folder)
        except ModelFolderError as error:
            raise EngineError(str(error)) from error
        outer = config.get("thinker_config", config)
        text = outer.get("text_config") or outer
        routing = routing_of(config)
        return cls(
            folder,
            together(_weights(folder, torch_dtype(dtype), tied=_ties(config))),
            int(text["vocab_size"]),
            int(text.get("max_position_embeddings") or LONGEST),
            None if routing is None else Captured(routing, int(text["num_hidden_layers"])),
            tuple(int(outer[name]) for name in PLACEHOLDERS if outer.get(name) is not None),
            _ties(config),
            PictureRules.read(folder, config),
        )

    def for_server(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A version under the names that a server loads (`experts`). SGLang's mixtures of experts have an
        output layer of their own even where the model ties it, so there it is sent beside the embedding that
        it equals.
        """
        found = apart(tensors)
        if self.tied and self.captured is not None and EMBEDDING in found:
            found[OUTPUT] = found[EMBEDDING]
        return found

    def check_request(self, request: GenerationRequest, capacity: int) -> None:
        """Refuse what can never be served.

        Raises:
            InvalidRequest: naming the request and the limit.
        """
        tokens = request.tokens
        if len(tokens) >= capacity:
            raise InvalidRequest(
                f"request {request.id!r} has {len(tokens)} tokens, and the context of {capacity} must hold "
                f"at least one more; shorten the prompt or use a model with a longer context"
            )
        bad = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if len(bad):
            raise InvalidRequest(
                f"request {request.id!r} holds token {int(bad[0])}; the vocabulary is 0 to "
                f"{self.vocabulary - 1}: was it made by another model's tokenizer?"
            )
        stop = [token for token in request.sampling.stop_token_ids if token >= self.vocabulary]
        if stop:
            raise InvalidRequest(
                f"request {request.id!r} stops at token {stop[0]}, outside the vocabulary of "
                f"{self.vocabulary}"
            )
        if self.pictures is not None:
            self.pictures.check(request)
        elif request.media:
            raise InvalidRequest(
                f"request {request.id!r} carries {len(request.media)} media items, and to the model in "
                f"{self.folder} the sglang engine gives text only (pictures to {', '.join(FAMILIES)}); use "
                f"rollout.engine=transformers"
            )

    def check_version(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are not exactly the model's weights.

        Raises:
            InvalidUpdate: naming the first tensor that does not fit.
        """
        for name in sorted(self.weights.keys() | tensors.keys()):
            mine, given = self.weights.get(name), tensors.get(name)
            if mine is None:
                raise InvalidUpdate(
                    f"version {version} holds tensor {name!r}, which the model in {self.folder} has not "
                    f"(tied weights go by their first name); it has {len(self.weights)} tensors, such as "
                    f"{next(iter(self.weights))!r}"
                )
            if given is None:
                raise InvalidUpdate(f"version {version} lacks tensor {name!r}; a version is complete")
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise InvalidUpdate(
                    f"tensor {name!r} of version {version} is {given.dtype} {list(given.shape)}; the model's "
                    f"is {mine.dtype} {list(mine.shape)}"
                )


def _ties(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))


def _weights(folder: Path, dtype: torch.dtype, *, tied: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    place = tensors.get_slice(name)
                    floating = place.get_dtype().startswith(("F", "BF"))
                    kind = dtype if floating else _WHOLE[place.get_dtype()]
                    found[name] = torch.empty(place.get_shape(), dtype=kind, device="meta")
        except (OSError, SafetensorError, KeyError) as error:
            raise EngineError(f"{file} cannot be read as safetensors: {error!r}") from error
    if tied:
        found.pop(OUTPUT, None)
    return dict(sorted(found.items()))


_WHOLE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
