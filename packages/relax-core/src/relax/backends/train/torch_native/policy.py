"""The network of a folder as a function from a micro-batch to logprobs.

The model stays in evaluation mode: an importance ratio compares two distributions, and dropout would change
one of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from relax.backends.model_files import ModelFolderError
from relax.backends.models import build_model, text_config, unsampled_tokens
from relax.backends.train import omni, shared_prompts, vision
from relax.backends.train.base import Packed
from relax.backends.train.errors import BatchError, UntrainableModelError
from relax.backends.train.padding import UNSCORED, Padded, pad, scored_targets
from relax.backends.train.rms_norm import use_fused_norms
from relax.backends.train.routing_replay import follow_routes, followed, routing_led
from relax.backends.train.shared_prompts import Folded
from relax.backends.train.torch_native.packing import Blocks, can_pack, lay_end_to_end

_SHOWN: dict[str, Callable[..., Tensor]] = {
    vision.MODEL_TYPE: vision.hidden_states,
    omni.MODEL_TYPE: omni.hidden_states,
}
"""Forward passes, up to the last hidden state, of rows that are shown something."""

_TOWERS = ("visual", "audio_tower")


class Policy(nn.Module):
    """Logprobs of the distribution that the engine samples.

    Args:
        model: as `load_model` gives it.
        folder: it came from, for messages.
        temperature: logits are divided by it.
        packing: lay rows end to end where the family allows it and prompts are not worth folding.
        device: where it computes; the model may be without its weights still.
    """

    _can_fold: bool

    def __init__(
        self, model: PreTrainedModel, folder: Path, temperature: float, packing: bool, *, device: torch.device
    ) -> None:
        super().__init__()
        self.model = model
        self._folder = folder
        self._temperature = temperature
        config = text_config(model.config)
        self._vocabulary = int(config.vocab_size)
        self._can_fold = shared_prompts.can_fold(model)
        self._routing = routing_led(model)
        self._packs = packing and can_pack(model)
        never = unsampled_tokens(model.config)
        self._unsampled = torch.tensor(never, device=device) if never else None
        self.touch_everything = False
        """Give parameters that a batch does not need a gradient of 0: sharded ones are reduced together."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def kind(self) -> str:
        return f"{self._folder} (a {self.model.config.model_type})"

    def forward(self, batch: Packed) -> Tensor:
        """[total response], float32 at least: the logprob of each response token; 0 where it only stands for
        media. Routes that the batch has are replayed. It is a batch that `Admission.admit` gave.
        """
        folds = self._can_fold and not any(batch.media)
        layout = (shared_prompts.fold(batch) if folds else None) or self._rows(batch)
        targets = layout.targets
        if self._unsampled is not None:
            targets = scored_targets(batch, targets, self._unsampled)
        hidden = self._hidden(layout, batch)
        # Only positions that predict a response token meet the head: vocabularies are large.
        logits = self._head(hidden.flatten(0, 1).index_select(0, layout.predictors))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._temperature != 1.0:
            logits = logits / self._temperature
        if self._unsampled is not None:
            # In place: logits are the largest tensor of a step, and the backward of the head does not read
            # them.
            logits.index_fill_(1, self._unsampled, -torch.inf)
        # An ignored target gives 0 with gradient 0, where its logprob of -inf would make the loss NaN.
        logprobs = -functional.cross_entropy(logits, targets, reduction="none", ignore_index=UNSCORED)
        return self._touched(logprobs) if self.touch_everything else logprobs

    def _touched(self, logprobs: Tensor) -> Tensor:
        # Also where there are media: a batch with sound alone runs one tower of two.
        towers = (getattr(owner, name, None) for owner in (self.model, self.model.model) for name in _TOWERS)
        unused = [p for tower in towers if tower is not None for p in tower.parameters() if p.requires_grad]
        return logprobs + sum((p.sum() * 0.0).to(logprobs.dtype) for p in unused) if unused else logprobs

    @property
    def _head(self) -> nn.Module:
        head: nn.Module | None = self.model.get_output_embeddings()
        if head is None:
            raise UntrainableModelError(f"{self.kind} has no output layer to read logprobs from")
        return head

    def _rows(self, batch: Packed) -> Padded | Blocks:
        if self._packs and not any(batch.media) and batch.rows > 1:
            return lay_end_to_end(batch)
        return pad(batch)

    def _hidden(self, layout: Folded | Padded | Blocks, batch: Packed) -> Tensor:
        decoder = self.model.get_decoder()
        arguments: dict[str, Any] = {}
        if batch.routes is not None:
            sources = None if isinstance(layout, Blocks) else layout.sources(batch)
            arguments["routes"] = followed(batch, sources, self._routing)
        if isinstance(layout, Folded | Blocks):
            return layout.hidden_states(decoder, **arguments)
        if any(batch.media):
            hidden_states = _SHOWN.get(self.model.config.model_type)
            if hidden_states is None:
                raise BatchError(
                    f"the batch has media, which {self.kind} cannot see; use a {' or '.join(_SHOWN)}"
                )
            return hidden_states(self.model, layout.input_ids, batch.media, **arguments)
        return decoder(input_ids=layout.input_ids, use_cache=False, **arguments).last_hidden_state

    @torch.no_grad()
    def require_plain_head(self) -> None:
        """Show that the output layer is all there is between the last hidden state and the logits.

        Raises:
            UntrainableModelError: there is more.
        """
        head = self._head
        # Some families cap or rescale logits after it: better to find out than to keep a list of them.
        tokens = torch.arange(min(4, self._vocabulary), device=self.device)[None]
        whole = self.model(input_ids=tokens, use_cache=False).logits
        ours = head(self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state)
        if not torch.allclose(whole, ours, rtol=1e-4, atol=1e-5):
            raise UntrainableModelError(
                f"the logits of {self.kind} are not just its output layer (they differ by "
                f"{float((whole - ours).abs().max()):.3g}); torch_native "
                f"cannot train it"
            )


def load_model(folder: Path, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """The model of a folder on a device, with memory of its own.

    Raises:
        UntrainableModelError: the folder holds no model that this backend can train.
    """
    try:
        model = build_model(folder, dtype, seed=seed, attention=shared_prompts.ATTENTION)
    except ModelFolderError as error:
        raise UntrainableModelError(str(error)) from error
    nn.Module.to(model, device)
    # Loaded weights are a mapping of the file: a trainer must not feel it when the folder goes.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    use_fused_norms(model)
    follow_routes(model)
    return model
