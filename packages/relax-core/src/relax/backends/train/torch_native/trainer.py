"""The `torch_native` backend: a Hugging Face model trained by plain PyTorch in one process.

The model stays in evaluation mode: an importance ratio compares two distributions, and dropout would change
one of them.
"""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.models import ModelFolderError, build_model, named_weights, text_config, unsampled_tokens
from relax.backends.train import shared_prompts, vision
from relax.backends.train.adamw import ClippedAdamW, require_like
from relax.backends.train.base import LossFn, Packed, StateTree, StepStats
from relax.backends.train.errors import (
    BatchError,
    NonFiniteError,
    SettingsError,
    StateMismatchError,
    StepOrderError,
    UntrainableModelError,
)
from relax.backends.train.export import export_model
from relax.backends.train.padding import UNSCORED, Padded, check, pad, required, scored_targets
from relax.backends.train.rms_norm import use_fused_norms
from relax.backends.train.settings import TrainerSettings, learning_rate
from relax.backends.train.shared_prompts import Folded

NAME = "torch_native"
STATE_VERSION = 1
_WEIGHT, _POLICY, _WARMUP, _RNG = "weight", "optimizer", "warmup_optimizer", "rng"


class TorchNative:
    """A trainer on one device. One thread calls it at a time; it starts none of its own.

    The same calls on the same machine with the same number of threads give the same bits.

    Args:
        folder: a Hugging Face model folder; without weights they are drawn from `seed`.
        settings: optimizer, schedule, temperature.
        dtype: float32, or float64 for reference results. Half precision would lose small updates without
            master weights.
        device: a torch device.
        seed: of weights that the folder does not hold, and of torch's global generator.
        torch_threads: intra-op threads of the whole process; None leaves them as they are.

    Raises:
        UntrainableModelError: the folder holds no model that this backend can train.
        SettingsError: a dtype or device that is not there.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        settings: TrainerSettings,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
        torch_threads: int | None = 1,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise SettingsError(
                f"dtype {dtype} cannot be trained; use torch.float32 (or float64 for references)"
            )
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise SettingsError(f"device {device!r} is not here: torch sees no GPU; use 'cpu'")
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self.folder = Path(folder)
        self.settings = settings
        try:
            self.model = build_model(self.folder, dtype, seed=seed, attention=shared_prompts.ATTENTION)
        except ModelFolderError as error:
            raise UntrainableModelError(str(error)) from error
        nn.Module.to(self.model, self.device)
        # Loaded weights are a mapping of the file: a trainer must not feel it when the folder goes.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()
        use_fused_norms(self.model)
        # torch seeds every process differently, so that the states of equal runs would differ.
        torch.manual_seed(seed)
        config = text_config(self.model.config)
        self._vocabulary = int(config.vocab_size)
        self._context = int(config.max_position_embeddings)
        self._head = self._plain_head()
        self._can_fold = shared_prompts.can_fold(self.model)
        never = unsampled_tokens(self.model.config)
        self._unsampled = torch.tensor(never, device=self.device) if never else None
        self._parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = ClippedAdamW(self._parameters, settings)
        self._warmup: ClippedAdamW | None = None
        self._steps = 0
        self._accumulated = 0

    @property
    def _kind(self) -> str:
        return f"{self.folder} (a {self.model.config.model_type})"

    @property
    def steps(self) -> int:
        """Optimizer steps done; skipped ones and warm-up steps do not count."""
        return self._steps

    @torch.no_grad()
    def forward(self, batch: Packed) -> Tensor:
        """float32 [total response]: the logprob of each response token, no gradient.

        It is 0 for a token that only stands for media, as in an image that a tool showed.

        Raises:
            BatchError: the batch contradicts itself or does not fit the model; with a `loss_mask`, also where
                that marks a token that stands for media.
        """
        return self._logprobs(self._on_device(batch)).float()

    def forward_backward(self, batch: Packed, loss: LossFn) -> LossOutputs:
        """Accumulate the gradient of the unscaled loss sum of one micro-batch.

        The batch carries `loss_mask`, `rollout_logprobs`, `advantages` and, where the loss wants it,
        `reference_logprobs`. A loss that is NaN or infinite comes back as it is, and `optim_step` will skip.
        The first call ends a warm-up: its optimizer is dropped, so that RL starts with clean moments.

        Raises:
            BatchError: the batch contradicts itself, does not fit the model, `loss_mask` marks a token that
                only stands for media, or the loss does not depend on `logprobs`.
        """
        batch = self._on_device(batch)
        mask, old, advantages = (required(batch, n) for n in ("loss_mask", "rollout_logprobs", "advantages"))
        outputs = loss(
            LossInputs(
                logprobs=self._logprobs(batch),
                old_logprobs=old,
                advantages=advantages,
                mask=mask,
                offsets=batch.response_offsets,
                reference_logprobs=batch.fields.get("reference_logprobs"),
            )
        )
        if outputs.loss.numel() != 1 or not outputs.loss.requires_grad:
            raise BatchError(
                "a loss has to be one number that depends on logprobs; this one has shape "
                f"{tuple(outputs.loss.shape)} and requires_grad={outputs.loss.requires_grad}"
            )
        self._warmup = None
        outputs.loss.backward()
        self._accumulated += 1
        return dataclasses.replace(outputs, loss=outputs.loss.detach())

    def optim_step(self, scale: float) -> StepStats:
        """Scale the accumulated gradient once, clip it by its global norm, step AdamW, zero the gradient.

        If the norm is not finite the step is skipped: weights, moments and the schedule stay as they were,
        the gradient is dropped, and `skipped` says so.

        Args:
            scale: 1 / the global count that the loss sums are divided by.

        Returns:
            The norm after scaling and before clipping, the learning rate of this step, and whether it was
            skipped.

        Raises:
            StepOrderError: no gradient was accumulated.
            BatchError: the scale is not a finite number above 0, as when the global count was 0.
        """
        if not self._accumulated:
            raise StepOrderError(
                "optim_step without a gradient: call forward_backward at least once before it"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise BatchError(f"scale is {scale}; it has to be 1 / a global count above 0")
        lr = learning_rate(self.settings, self._steps)
        norm = self._optimizer.step(scale, lr)
        self._accumulated = 0
        skipped = not math.isfinite(norm)
        self._steps += not skipped
        return StepStats(grad_norm=norm, lr=lr, skipped=skipped)

    def discard_gradient(self) -> None:
        """Forget what `forward_backward` has accumulated since the last step, if anything."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._accumulated = 0

    def supervised_step(self, batch: Packed, lr: float) -> float:
        """One AdamW step at `lr` on cross-entropy of the tokens `loss_mask` marks; returns the mean.

        The temperature applies, as what is trained is the distribution that will be sampled. The warm-up has
        an optimizer of its own, which ends with the first `forward_backward`.

        Raises:
            StepOrderError: an RL gradient waits for its `optim_step`.
            BatchError: no token is marked, or the batch does not fit.
            NonFiniteError: the gradient is NaN or infinite; nothing was changed.
        """
        if self._accumulated:
            raise StepOrderError(
                f"supervised_step between {self._accumulated} forward_backward and their optim_step"
            )
        batch = self._on_device(batch)
        mask = required(batch, "loss_mask")
        count = int(mask.count_nonzero())
        if count == 0:
            raise BatchError(
                f"loss_mask marks none of {len(mask)} response tokens, so there is nothing to learn"
            )
        loss = -(self._logprobs(batch) * mask).sum()
        loss.backward()
        if self._warmup is None:
            self._warmup = ClippedAdamW(self._parameters, self.settings)
        norm = self._warmup.step(1 / count, lr)
        mean = float(loss.detach()) / count
        if not math.isfinite(norm):
            raise NonFiniteError(f"warm-up gradient norm is {norm} (mean loss {mean}); lower its lr, {lr}")
        return mean

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by Hugging Face name, tied ones once; live memory that the next step changes."""
        return named_weights(self.model)

    def state(self) -> StateTree:
        """A copy, on the CPU, of weights, optimizer moments, step counts and torch's random state.

        Raises:
            StepOrderError: a gradient waits for its `optim_step`; it is no part of a state.
        """
        if self._accumulated:
            raise StepOrderError(f"state between {self._accumulated} forward_backward and their optim_step")
        parts = {
            _WEIGHT: dict(named_weights(self.model)),
            _POLICY: self._optimizer.moments(),
            _WARMUP: self._warmup.moments() if self._warmup else {},
            _RNG: {"torch": torch.get_rng_state()},
        }
        tensors = {
            f"{part}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
            for part, named in parts.items()
            for name, tensor in named.items()
        }
        return StateTree(tensors, {"backend": NAME, "version": STATE_VERSION, "steps": self._steps})

    @torch.no_grad()
    def load_state(self, state: StateTree) -> None:
        """Go on from a state, bit for bit, under the settings of this object. `tensors()` keep their memory.

        Raises:
            StateMismatchError: the state is of another backend, version or model; nothing was changed.
        """
        made_by = (state.data.get("backend"), state.data.get("version"))
        if made_by != (NAME, STATE_VERSION):
            raise StateMismatchError(f"state is of {made_by}, this backend reads {(NAME, STATE_VERSION)}")
        steps = state.data.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise StateMismatchError(f"state has done {steps!r} steps; that has to be a whole number >= 0")
        parts: dict[str, dict[str, Tensor]] = {_WEIGHT: {}, _POLICY: {}, _WARMUP: {}, _RNG: {}}
        for key, tensor in state.tensors.items():
            part, _, name = key.partition(".")
            if part not in parts:
                raise StateMismatchError(f"state tensor {key!r} belongs to none of {sorted(parts)}")
            parts[part][name] = tensor
        weights = dict(named_weights(self.model))
        foreign = sorted(parts[_WEIGHT].keys() - weights.keys())
        if foreign:
            raise StateMismatchError(f"state has weights {foreign[:3]}, which {self.folder} lacks")
        for name, tensor in weights.items():
            require_like(name, parts[_WEIGHT].get(name), tensor)
        require_like("torch", parts[_RNG].get("torch"), torch.get_rng_state())
        self._optimizer.require_fitting(parts[_POLICY])
        warmup = ClippedAdamW(self._parameters, self.settings) if parts[_WARMUP] else None
        if warmup is not None:
            warmup.require_fitting(parts[_WARMUP])
            warmup.load(parts[_WARMUP])

        for name, tensor in weights.items():
            tensor.copy_(parts[_WEIGHT][name])
        self._optimizer.load(parts[_POLICY])
        self._warmup = warmup
        self.model.zero_grad(set_to_none=True)
        torch.set_rng_state(parts[_RNG]["torch"])
        self._steps = steps
        self._accumulated = 0

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder that transformers loads with the same logits; see `export_model`."""
        export_model(self.model, source=self.folder, target=Path(folder))

    # How logprobs come about

    def _logprobs(self, batch: Packed) -> Tensor:
        check(batch, vocabulary=self._vocabulary, context=self._context)
        folds = self._can_fold and not any(batch.media)
        layout = (shared_prompts.fold(batch) if folds else None) or pad(batch)
        targets = layout.targets
        if self._unsampled is not None:
            targets = scored_targets(batch, targets, self._unsampled)
        hidden = self._hidden(layout, batch)
        # Only positions that predict a response token meet the head: vocabularies are large.
        logits = self._head(hidden.flatten(0, 1).index_select(0, layout.predictors))
        if self.settings.temperature != 1.0:
            logits = logits / self.settings.temperature
        if self._unsampled is not None:
            # In place: logits are the largest tensor of a step, and the backward of the head does not read
            # them.
            logits.index_fill_(1, self._unsampled, -torch.inf)
        # An ignored target gives 0 with gradient 0, where its logprob of -inf would make the loss NaN.
        return -functional.cross_entropy(logits, targets, reduction="none", ignore_index=UNSCORED)

    def _hidden(self, layout: Folded | Padded, batch: Packed) -> Tensor:
        if isinstance(layout, Folded):
            return layout.hidden_states(self.model.get_decoder())
        if any(batch.media):
            if self.model.config.model_type != vision.MODEL_TYPE:
                raise BatchError(
                    f"the batch has media, which {self._kind} cannot see; use a {vision.MODEL_TYPE}"
                )
            return vision.hidden_states(self.model, layout.input_ids, batch.media)
        return self.model.get_decoder()(input_ids=layout.input_ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _plain_head(self) -> nn.Module:
        """The output layer, shown to be all there is between the last hidden state and the logits."""
        head: nn.Module | None = self.model.get_output_embeddings()
        if head is None:
            raise UntrainableModelError(f"{self._kind} has no output layer to read logprobs from")
        # Some families cap or rescale logits after it: better to find out than to keep a list of them.
        tokens = torch.arange(min(4, self._vocabulary), device=self.device)[None]
        whole = self.model(input_ids=tokens, use_cache=False).logits
        ours = head(self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state)
        if not torch.allclose(whole, ours, rtol=1e-4, atol=1e-5):
            raise UntrainableModelError(
                f"the logits of {self._kind} are not just its output layer (they differ by "
                f"{float((whole - ours).abs().max()):.3g}); torch_native "
                f"cannot train it"
            )
        return head

    def _on_device(self, batch: Packed) -> Packed:
        if self.device.type == "cpu":
            return batch
        return dataclasses.replace(
            batch,
            tokens=batch.tokens.to(self.device),
            offsets=batch.offsets.to(self.device),
            prompt_lengths=batch.prompt_lengths.to(self.device),
            fields={name: column.to(self.device) for name, column in batch.fields.items()},
        )
