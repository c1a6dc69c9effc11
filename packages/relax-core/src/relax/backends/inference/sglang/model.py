"""What a server serves, told by its model folder without loading it: weights, vocabulary, context, routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agentic import GenerationRequest
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax.backends.inference.errors import EngineError, InvalidRequest, InvalidUpdate
from relax.backends.inference.reading import reader_of
from relax.backends.inference.sglang.answers import Captured
from relax.backends.inference.sglang.experts import apart, input_by_output, together, turned
from relax.backends.inference.sglang.pictures import PictureRules, normalisation
from relax.backends.inference.sglang.tensors import Tensors
from relax.backends.inference.sglang.whole import copy_around, whole_folder
from relax.backends.model_files import ModelFolderError, read_config, weight_files
from relax.backends.models import (
    THINKER,
    build_model,
    has_weights,
    load_config,
    torch_dtype,
    weights_prefix,
)
from relax.backends.routes import routing_of

OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Not among the weights where the model ties it to its embedding."""

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")

THINKER_TYPE = "qwen3_omni_moe_thinker"

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
        pictures: what becomes of pictures; None for a model that takes no files of them here.
        tensors: what becomes of all that is shown; None for a model that is shown nothing.
        prefix: what a server puts before a weight's name.
        hollow: the folder says which weights there are and holds none, so that a server starts with some of
            its own.
        backwards: weights that the folder, and so a server, has input by output (`experts`).
    """

    folder: Path
    weights: Mapping[str, Tensor]
    vocabulary: int
    context: int
    captured: Captured | None
    never: tuple[int, ...]
    tied: bool
    pictures: PictureRules | None = None
    tensors: Tensors | None = None
    prefix: str = ""
    hollow: bool = False
    backwards: frozenset[str] = frozenset()

    @property
    def shows(self) -> bool:
        """Whether it is shown anything."""
        return self.tensors is not None

    def shows_pictures(self, request: GenerationRequest) -> bool:
        """Whether all that a request shows are pictures that go as files."""
        kinds = {item.get("kind", "image") for item in request.media}
        return self.pictures is not None and kinds == {"image"}

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
            copy_around(folder, completed)  # its tokenizer, and how pictures are processed
            folder = completed
        try:
            config = read_config(folder)
            weight_files(folder)
            prefix = weights_prefix(folder)
            reader = reader_of(load_config(folder))
        except ModelFolderError as error:
            raise EngineError(str(error)) from error
        outer = config.get("thinker_config", config)
        text = outer.get("text_config") or outer
        routing = routing_of(config)
        weights, backwards = stored_weights(folder, dtype)
        rules = PictureRules.read(folder, config)
        tensors = None if reader is None else Tensors(reader, *normalisation(folder))
        hollow = outer.get("model_type") == THINKER_TYPE and not prefix
        if hollow:
            folder, prefix = whole_folder(folder, config, completed / "whole", weights), THINKER
        return cls(
            folder,
            weights,
            int(text["vocab_size"]),
            int(text.get("max_position_embeddings") or LONGEST),
            None if routing is None else Captured(routing, int(text["num_hidden_layers"])),
            tuple(int(outer[name]) for name in PLACEHOLDERS if outer.get(name) is not None),
            _ties(outer),
            rules,
            tensors,
            prefix,
            hollow,
            backwards,
        )

    def for_server(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A version under the names that a server loads (`experts`). SGLang's mixtures of experts have an
        output layer of their own even where the model ties it, so there it is sent beside the embedding that
        it equals.
        """
        found = apart(turned(tensors, self.backwards), self.backwards)
        if self.tied and self.captured is not None and EMBEDDING in found:
            found[OUTPUT] = found[EMBEDDING]
        return {self.prefix + name: tensor for name, tensor in found.items()} if self.prefix else found

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
        if self.tensors is not None:
            self.tensors.check(request)
            if self.pictures is not None and self.shows_pictures(request):
                self.pictures.check(request)
        elif request.media:
            raise InvalidRequest(
                f"request {request.id!r} carries {len(request.media)} media items, and to the model in "
                f"{self.folder} the sglang engine gives text only (media to Qwen3-VL and Qwen3-Omni); use "
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


def stored_weights(folder: Path, dtype: str) -> tuple[dict[str, Tensor], frozenset[str]]:
    """What the files of a folder hold: the weights as a trainer names them (`experts`), on torch's meta
    device, and the names of those that the files have input by output.

    Raises:
        EngineError: a file cannot be read.
    """
    config = read_config(folder)
    outer = config.get("thinker_config", config)
    stored = together(_weights(folder, weights_prefix(folder), torch_dtype(dtype), tied=_ties(outer)))
    backwards = input_by_output(stored)
    return turned(stored, backwards), backwards


def _ties(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))


def _weights(folder: Path, prefix: str, dtype: torch.dtype, *, tied: bool) -> dict[str, Tensor]:
    """Those of the files that begin with `prefix`, without it."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    if not name.startswith(prefix):
                        continue
                    place = tensors.get_slice(name)
                    floating = place.get_dtype().startswith(("F", "BF"))
                    kind = dtype if floating else _WHOLE[place.get_dtype()]
                    found[name.removeprefix(prefix)] = torch.empty(
                        place.get_shape(), dtype=kind, device="meta"
                    )
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
