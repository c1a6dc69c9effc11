"""`torch_native` in one process; `rank` makes many of it.

What is trained is the `Policy` of a folder; what is stepped are its `Masters`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.models import named_weights
from relax.backends.train.adamw import ClippedAdamW, require_like
from relax.backends.train.admission import TRAINED, admission_of
from relax.backends.train.base import LossFn, Packed, StateTree, StepStats, felt, masked_out
from relax.backends.train.errors import (
    BatchError,
    NonFiniteError,
    SettingsError,
    StateMismatchError,
    StepOrderError,
)
from relax.backends.train.export import export_model
from relax.backends.train.freeze import freeze, require_parts
from relax.backends.train.padding import marked, required
from relax.backends.train.settings import TrainerSettings, learning_rate
from relax.backends.train.state_files import read_from, read_trainer_state, write_state
from relax.backends.train.torch_native.adapters import Adapters, own_name
from relax.backends.train.torch_native.checkpointing import recompute_layers
from relax.backends.train.torch_native.masters import FloatCopies, Masters, OwnParameters
from relax.backends.train.torch_native.policy import Policy, load_model
from relax.config.freeze import Part
from relax.config.lora import LoraSettings
from relax.config.roles import ActorSettings

NAME = "torch_native"
STATE_VERSION = 1
WEIGHT, POLICY, WARMUP, RNG = "weight", "optimizer", "warmup_optimizer", "rng"


@dataclasses.dataclass(frozen=True)
class NativeOptions:
    """What torch_native can do beside the plain thing; as `ActorSettings` explains.

    Attributes:
        master_weights: with half precision, float32 copies are stepped.
        gradient_checkpointing: activations are computed again in the backward pass.
        packing: rows lie end to end.
        lora: adapters, with a rank above 0.
        freeze: parts of the model that are left as they are.
    """

    master_weights: bool = True
    gradient_checkpointing: bool = False
    packing: bool = False
    lora: LoraSettings = dataclasses.field(default_factory=LoraSettings)
    freeze: tuple[Part, ...] = ()


def options_of(actor: ActorSettings) -> NativeOptions:
    """What the `actor` section asks for."""
    return NativeOptions(
        actor.master_weights, actor.gradient_checkpointing, actor.packing, actor.lora, actor.freeze
    )


class TorchNative:
    """A trainer on one device. One thread calls it at a time; it starts none of its own.

    The same calls on the same machine with the same number of threads give the same bits.

    Args:
        folder: a Hugging Face model folder; without weights they are drawn from `seed`.
        settings: optimizer, schedule, temperature.
        dtype: of parameters in forward and backward: float32, bfloat16 or float16, or float64 for reference
            results.
        device: a torch device.
        seed: of weights that the folder does not hold, and of torch's global generator.
        torch_threads: intra-op threads of the whole process; None leaves them as they are.
        options: see `NativeOptions`.

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
        options: NativeOptions | None = None,
    ) -> None:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise SettingsError(
                f"dtype {dtype} cannot be trained; use torch.float32, torch.bfloat16 or torch.float16 (or "
                f"float64 for references)"
            )
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise SettingsError(f"device {device!r} is not here: torch sees no GPU; use 'cpu'")
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self.folder = Path(folder)
        self.settings = settings
        self.options = options or NativeOptions()
        self._admission = admission_of(self.folder)
        self.model = self._loaded(dtype, seed)
        require_parts((name for name, _ in self.model.named_parameters()), self.options.freeze)
        freeze(self.model.named_parameters(), self.options.freeze)
        self._adapters = Adapters(self.model, self.options.lora, seed) if self.options.lora.rank > 0 else None
        if self.options.gradient_checkpointing:
            recompute_layers(self.model)
        # torch seeds every process differently, so that the states of equal runs would differ.
        torch.manual_seed(seed)
        policy = Policy(
            self.model, self.folder, settings.temperature, self.options.packing, device=self.device
        )
        self._policy = self._spread(policy)
        self._masters = self._make_masters()
        self._optimizer = self._make_optimizer()
        self._warmup: ClippedAdamW | None = None
        self._steps = 0
        self._accumulated = 0

    # What a rank of many does otherwise

    def _loaded(self, dtype: torch.dtype, seed: int) -> Any:
        """The model of the folder."""
        return load_model(self.folder, dtype, seed, self.device)

    def _spread(self, policy: Policy) -> nn.Module:
        policy.require_plain_head()
        return policy

    def _make_masters(self) -> Masters:
        trained = self._trained()
        halves = any(p.dtype.itemsize < 4 for p in trained.values())
        return FloatCopies(trained) if halves and self.options.master_weights else OwnParameters(trained)

    def _make_optimizer(self) -> ClippedAdamW:
        return ClippedAdamW(self._masters.named, self.settings)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def steps(self) -> int:
        """Optimizer steps done; skipped ones and warm-up steps do not count."""
        return self._steps

    @property
    def adapters(self) -> Adapters | None:
        """The adapters, where there are some."""
        return self._adapters

    @torch.no_grad()
    def forward(self, batch: Packed) -> Tensor:
        """float32 [total response]: the logprob of each response token, no gradient.

        It is 0 for a token that only stands for media, as in an image that a tool showed.

        Raises:
            BatchError: the batch contradicts itself or does not fit the model; with a `loss_mask`, also where
                that marks a token that stands for media.
        """
        return self._policy(self._admitted(batch)).float()

    def forward_backward(self, batch: Packed, loss: LossFn) -> LossOutputs:
        """Accumulate the gradient of the unscaled loss sum of one micro-batch.

        The batch carries `loss_mask`, `rollout_logprobs`, `advantages` and, where the loss wants it,
        `reference_logprobs`. A loss that is NaN or infinite comes back as it is, and `optim_step` will skip.
        The first call ends a warm-up: its optimizer is dropped, so that RL starts with clean moments.

        Raises:
            BatchError: the batch contradicts itself, does not fit the model, `loss_mask` marks a token that
                only stands for media, or the loss does not depend on `logprobs`.
        """
        batch = self._admitted(batch, TRAINED)
        mask, old, advantages = (required(batch, name) for name in TRAINED)
        logprobs = self._scored(batch)
        outputs = (masked_out if batch.dummy else loss)(
            LossInputs(
                logprobs=logprobs,
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
        felt(outputs.loss, logprobs).backward()
        self._accumulated += 1
        return dataclasses.replace(outputs, loss=outputs.loss.detach())

    def _scored(self, batch: Packed) -> Tensor:
        """Logprobs that a loss can be made of, also where all that they depend on is frozen, as with a frozen
        language model and a batch of text.
        """
        logprobs = self._policy(batch)
        return logprobs if logprobs.requires_grad else logprobs.detach().requires_grad_()

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
        norm = self._step(self._optimizer, scale, lr)
        self._accumulated = 0
        skipped = not math.isfinite(norm)
        self._steps += not skipped
        return StepStats(grad_norm=norm, lr=lr, skipped=skipped)

    def _step(self, optimizer: ClippedAdamW, scale: float, lr: float) -> float:
        """Step once; the norm of the scaled gradient, which is gone now."""
        self._masters.collect()
        norm = optimizer.step(scale, lr)
        if math.isfinite(norm):
            self._masters.stepped()
        self._masters.drop()
        return norm

    def discard_gradient(self) -> None:
        """Forget what `forward_backward` has accumulated since the last step, if anything."""
        self._masters.drop()
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
        self._require_no_gradient("supervised_step")
        self._admission.admit(batch, ("loss_mask",))
        count = marked(batch)
        loss = self.supervised_backward(batch)
        self.supervised_finish(lr, count, loss / count)
        return loss / count

    def supervised_backward(self, batch: Packed) -> float:
        """Accumulate the gradient of the summed cross-entropy of one micro-batch; the sum."""
        batch = self._admitted(batch, ("loss_mask",))
        if self._adapters is not None:
            self._adapters.dropout(True)
        logprobs = self._scored(batch)
        if self._adapters is not None:
            self._adapters.dropout(False)
        loss = -(logprobs * required(batch, "loss_mask")).sum()
        loss.backward()
        return float(loss.detach())

    def supervised_finish(self, lr: float, count: int, mean: float) -> None:
        """Step the warm-up's optimizer on what was accumulated."""
        if self._warmup is None:
            self._warmup = self._make_optimizer()
        norm = self._step(self._warmup, 1 / count, lr)
        if not math.isfinite(norm):
            raise NonFiniteError(f"warm-up gradient norm is {norm} (mean loss {mean}); lower its lr, {lr}")

    def _require_no_gradient(self, verb: str) -> None:
        if self._accumulated:
            raise StepOrderError(f"{verb} between {self._accumulated} forward_backward and their optim_step")

    # The weights as others see them

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by Hugging Face name, tied ones once; live memory that the next step changes, but for
        weights with an adapter, which are merged anew.
        """
        for name, weight in self.base_tensors():
            yield name, weight if self._adapters is None else self._adapters.merged(name, weight)

    def base_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by Hugging Face name, without adapters."""
        for name, weight in named_weights(self.model):
            if (own := own_name(name)) is not None:
                yield own, weight

    # State

    def state(self) -> StateTree:
        """A copy, on the CPU, of trained weights, optimizer moments, step counts and torch's random state.

        Raises:
            StepOrderError: a gradient waits for its `optim_step`; it is no part of a state.
        """
        self._require_no_gradient("state")
        tensors = {
            key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in self._saved().items()
        }
        tensors[f"{RNG}.torch"] = torch.get_rng_state()
        return StateTree(tensors, self._data())

    def _data(self) -> dict[str, Any]:
        return {"backend": NAME, "version": STATE_VERSION, "steps": self._steps}

    def _saved(self) -> dict[str, Tensor]:
        """What a state holds but for random states: weights and moments by part and name; live memory."""
        parts = {
            WEIGHT: self._weights(),
            POLICY: self._optimizer.moments(),
            WARMUP: self._warmup.moments() if self._warmup else {},
        }
        return {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    def _weights(self) -> dict[str, Tensor]:
        """The weights that a state holds, as they are stepped: all, or with adapters only those."""
        masters = {name: master.detach() for name, master in self._masters.named.items()}
        if self._adapters is not None:
            return masters
        return {name: masters.get(name, weight) for name, weight in named_weights(self.model)}

    def load_state(self, state: StateTree) -> None:
        """Continue from a state, bit for bit; a gradient that was accumulated is dropped.

        Raises:
            StateMismatchError: the state is of another backend, version or model; nothing was changed.
        """
        parts: dict[str, dict[str, Tensor]] = {WEIGHT: {}, POLICY: {}, WARMUP: {}, RNG: {}}
        for key, tensor in state.tensors.items():
            part, _, name = key.partition(".")
            if part not in parts:
                raise StateMismatchError(f"state tensor {key!r} belongs to none of {sorted(parts)}")
            parts[part][name] = tensor
        require_like("torch", parts[RNG].get("torch"), torch.get_rng_state())
        self._take(state.data, parts, parts[RNG]["torch"])

    def _take(
        self, data: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]], random: Tensor
    ) -> None:
        """Go on from weights and moments of this rank's own shapes; checks all before it changes any."""
        made_by = (data.get("backend"), data.get("version"))
        if made_by != (NAME, STATE_VERSION):
            raise StateMismatchError(f"state is of {made_by}, this backend reads {(NAME, STATE_VERSION)}")
        steps = data.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise StateMismatchError(f"state has done {steps!r} steps; that has to be a whole number >= 0")
        weights = self._weights()
        foreign = sorted(parts[WEIGHT].keys() - weights.keys())
        if foreign:
            raise StateMismatchError(f"state has weights {foreign[:3]}, which {self.folder} lacks")
        for name, tensor in weights.items():
            require_like(name, parts[WEIGHT].get(name), tensor)
        self._optimizer.require_fitting(parts[POLICY])
        warmup = self._make_optimizer() if parts[WARMUP] else None
        if warmup is not None:
            warmup.require_fitting(parts[WARMUP])
            warmup.load(parts[WARMUP])

        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(parts[WEIGHT][name])
        self._masters.stepped()
        self._optimizer.load(parts[POLICY])
        self._warmup = warmup
        self._masters.drop()
        torch.set_rng_state(random)
        self._steps = steps
        self._accumulated = 0

    def save(self, folder: Path) -> None:
        """Write the state into a folder, which is made."""
        write_state(folder, self.state())

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, here or on many ranks."""
        from relax.backends.train.torch_native.shard_files import is_sharded, read_whole

        with read_from(folder):
            self.load_state(read_whole(folder) if is_sharded(folder) else read_trainer_state(folder))

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder that transformers loads with the same logits; see `export_model`.
        Adapters are merged.
        """
        merged = None if self._adapters is None else dict(self.tensors())
        export_model(self.model, source=self.folder, target=Path(folder), tensors=merged)

    def _admitted(self, batch: Packed, columns: Sequence[str] = ()) -> Packed:
        batch = self._admission.admit(batch, columns)
        if self.device.type == "cpu":
            return batch
        return dataclasses.replace(
            batch,
            tokens=batch.tokens.to(self.device),
            offsets=batch.offsets.to(self.device),
            prompt_lengths=batch.prompt_lengths.to(self.device),
            fields={name: column.to(self.device) for name, column in batch.fields.items()},
            routes=None if batch.routes is None else batch.routes.to(self.device),
        )
