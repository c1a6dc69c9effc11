"""`MegatronRank`: a `RankBackend` over megatron-core."""

import dataclasses
import gc
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dcs
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, distributed

from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.model_files import ModelFolderError
from relax.backends.models import (
    load_config,
    text_config,
    torch_dtype,
    unsampled_tokens,
)
from relax.backends.routes import routing_of
from relax.backends.train import freeze, padding
from relax.backends.train.base import LossFn, Packed, StepStats, felt, masked_out
from relax.backends.train.errors import BatchError, NonFiniteError, StepOrderError, UntrainableModelError
from relax.backends.train.megatron import (
    balance,
    build,
    checkpoint,
    export,
    media,
    packing,
    replay,
    topology,
    weights,
)
from relax.backends.train.megatron.optimizer import Optimizer, with_gradient_buffers
from relax.backends.train.megatron.outputs import Scoring, columns_never_said
from relax.backends.train.megatron.schedule import Schedules, Work
from relax.backends.train.ranks import Coordinates, RankSpec
from relax.backends.train.settings import learning_rate


class MegatronRank:
    """One rank. torch.distributed is up before it is made; one thread calls it at a time.

    Megatron's groups belong to the process: `close` one rank before making another. The same calls under the
    same split give the same bits.

    Args:
        spec: what to build and where; the split is `spec.actor.parallel`, further settings are
            `spec.actor.megatron`.
        critic: give one value a token instead of a logprob; the head starts at 0 or from `score.weight`.

    Raises:
        UntrainableModelError: the folder holds no model that this backend can build.
        SettingsError: a split or setting that does not fit the model or this machine.
        StepOrderError: torch.distributed is not up, or another rank of this process is not closed.
    """

    def __init__(self, spec: RankSpec, *, critic: bool = False) -> None:
        if spec.torch_threads is not None:
            torch.set_num_threads(spec.torch_threads)
        self.folder = Path(spec.folder)
        self.settings = spec.settings
        self.device = topology.device_of(spec.device)
        try:
            whole = load_config(self.folder)
        except ModelFolderError as error:
            raise UntrainableModelError(str(error)) from error
        hf = text_config(whole)
        options, dtype = spec.actor.megatron, torch_dtype(spec.actor.dtype)
        self._routing = routing_of(hf.to_dict())
        self._plan = self._planned(
            hf,
            whole=whole,
            parallel=spec.actor.parallel,
            settings=options,
            dtype=dtype,
            device=self.device,
            critic=critic,
            replay=self._routing is not None,
        )
        self._plan = dataclasses.replace(self._plan, freeze=spec.actor.freeze)
        self._closed = False
        self._coordinates = topology.join(spec.actor.parallel, spec.timeout)
        try:
            model_parallel_cuda_manual_seed(spec.seed)
            torch.manual_seed(spec.seed)
            balance.correct(self._plan.config, self.device)
            models = self._built(spec.seed)
            self._parameters = weights.local_names(models)
            self._freeze()
            self._replay = (
                replay.Replay(models, self._routing, keep=options.recompute == "full")
                if self._routing
                else None
            )
            self._models = models
            chunks = with_gradient_buffers(models, options) if spec.trains else models
            self._optimizer = Optimizer(chunks, spec.settings, options, dtype) if spec.trains else None
        except BaseException:
            topology.leave()
            raise
        self._unsampled = unsampled_tokens(whole)
        self._scoring = Scoring(
            temperature=spec.settings.temperature,
            sequence_parallel=self._plan.config.sequence_parallel,
            never=columns_never_said(
                hf.vocab_size, self._plan.padded_vocabulary, self._unsampled, self.device
            ),
        )
        self._schedules = Schedules(chunks, self._plan.config, self._scoring, self._replay)
        self._steps = 0
        self._accumulated = 0
        self._warming = False

    # What a rank of a model that megatron-bridge maps does otherwise

    def _planned(self, hf: Any, **settled: Any) -> build.Blueprint:
        """What this rank's part is built from; arguments of `build.blueprint`."""
        return build.blueprint(hf, **settled)

    def _built(self, seed: int) -> list[GPTModel]:
        """This rank's part of the model with its weights."""
        models = build.chunks(self._plan)
        named = weights.local_names(models)
        self._layout = weights.rank_layout(self._plan, named)
        weights.fill(named, self._layout, weights.open_source(self.folder, seed=seed))
        return models

    @property
    def coordinates(self) -> Coordinates:
        return self._coordinates

    @property
    def steps(self) -> int:
        """Optimizer steps done; skipped ones and warm-up steps do not count."""
        return self._steps

    def forward(self, batches: Sequence[Packed]) -> list[Tensor] | None:
        """For each micro-batch float32 [total response] on the rank that speaks: logprobs, or values of a
        critic.

        Raises:
            BatchError: a batch contradicts itself or does not fit the model; on every rank alike.
        """
        found = self._schedules.forward(self._work(batches))
        return found if self._coordinates.speaks else None

    def forward_backward(self, batches: Sequence[Packed], loss: LossFn) -> LossOutputs | None:
        """Accumulate the gradient of the unscaled loss sum; the rank that speaks returns sums and counts.

        Batches carry what `torch_native.TorchNative.forward_backward` asks for, and may carry `routes`. The
        first call ends a warm-up.

        Raises:
            BatchError: a batch contradicts itself or does not fit the model; on every rank alike.
        """
        self._trained  # noqa: B018  # one that only scores has no gradients to add to
        work = self._work(batches)
        for batch in batches:
            for name in ("loss_mask", "rollout_logprobs", "advantages"):
                padding.required(batch, name)
        self._end_warm_up()
        found: list[LossOutputs] = []

        def of(index: int, scores: Tensor) -> Tensor:
            batch = batches[index]
            # What only keeps ranks in step has a gradient of 0, and no part in sums and counts.
            outputs = (masked_out if batch.dummy else loss)(_loss_inputs(batch, scores))
            if outputs.loss.numel() != 1 or not outputs.loss.requires_grad:
                raise BatchError(
                    "a loss has to be one number that depends on logprobs; this one has shape "
                    f"{tuple(outputs.loss.shape)} and requires_grad={outputs.loss.requires_grad}"
                )
            if not batch.dummy:
                # A copy: a schedule may take the memory of what a stage gave, on the last one that loss.
                found.append(dataclasses.replace(outputs, loss=outputs.loss.detach().clone()))
            return felt(outputs.loss, scores)

        self._schedules.forward_backward(work, of)
        self._accumulated += 1
        return _added(found) if self._coordinates.speaks else None

    def optim_step(self, scale: float) -> StepStats:
        """Finish, scale and clip the gradient, step, drop it; the same answer on every rank.

        If the norm is not finite the step is skipped: weights, moments and the schedule stay as they were.

        Raises:
            StepOrderError: no gradient was accumulated.
            BatchError: the scale is not a finite number above 0.
        """
        if not self._accumulated:
            raise StepOrderError(
                "optim_step without a gradient: call forward_backward at least once before it"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise BatchError(f"scale is {scale}; it has to be 1 / a global count above 0")
        lr = learning_rate(self.settings, self._steps)
        norm = self._trained.step(scale, lr)
        self._accumulated = 0
        skipped = not math.isfinite(norm)
        self._steps += not skipped
        return StepStats(grad_norm=norm, lr=lr, skipped=skipped)

    def discard_gradient(self) -> None:
        """Forget what `forward_backward` has accumulated since the last step, if anything."""
        self._trained.discard()
        self._accumulated = 0

    def supervised_step(self, batches: Sequence[Packed], lr: float, count: int) -> float | None:
        """One AdamW step at `lr` on cross-entropy of the marked tokens; the rank that speaks returns the sum.

        Raises:
            StepOrderError: an RL gradient waits for its `optim_step`.
            BatchError: `count` is not above 0, or a batch does not fit.
            NonFiniteError: the gradient is NaN or infinite; nothing was changed.
        """
        if self._accumulated:
            raise StepOrderError(
                f"supervised_step between {self._accumulated} forward_backward and their optim_step"
            )
        if count < 1:
            raise BatchError(f"{count} tokens are marked over all replicas, so there is nothing to learn")
        masks = [padding.required(batch, "loss_mask").to(self.device) for batch in batches]
        sums: list[float] = []

        def of(index: int, scores: Tensor) -> Tensor:
            loss = -(scores * masks[index]).sum()
            sums.append(float(loss.detach()))
            return loss

        self._schedules.forward_backward(self._work(batches), of)
        self._warming = True
        norm = self._trained.step(1 / count, lr)
        if not math.isfinite(norm):
            raise NonFiniteError(f"warm-up gradient norm is {norm}; lower its lr, {lr}")
        return math.fsum(sums) if self._coordinates.speaks else None

    def require_seen(self, batch: Packed) -> None:
        """See that the model takes the media of a batch; nothing is run.

        Raises:
            BatchError: it does not.
        """
        self._read(batch)

    def layout(self) -> "dcs.Layout":
        """Which boxes of which Hugging Face tensors `tensors` holds. Experts are named one by one."""
        return self._layout

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """This rank's parameters by local name; live memory that the next step changes."""
        return [(name, parameter.detach()) for name, parameter in self._parameters.items()]

    def save(self, folder: Path) -> None:
        """Write this rank's part of weights, optimizer, schedule and random state; every rank calls it.

        Raises:
            StepOrderError: a gradient waits for its `optim_step`.
            StateFileError: the folder is already there.
        """
        if self._accumulated:
            raise StepOrderError(f"save between {self._accumulated} forward_backward and their optim_step")
        checkpoint.save(Path(folder), self._models, self._trained, self._plan, self._progress())

    def load(self, folder: Path) -> None:
        """Go on from a folder that ranks wrote, perhaps split otherwise; `tensors()` keep their memory.

        Bit for bit under the same split; under another, random state starts from the seed and the step.

        Raises:
            StateMissingError: there is no such folder.
            StateMismatchError: it is of another model.
        """
        found = checkpoint.load(Path(folder), self._models, self._trained, self._plan)
        self._trained.discard()
        self._accumulated = 0
        self._steps, self._warming = found.steps, found.warming

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder together, each rank its files; see `export.write`."""
        export.write(
            Path(folder),
            source=self.folder,
            layout=self._layout,
            tensors=self._parameters,
            device=self.device,
            fused=self._plan.family.fused_experts,
        )

    def close(self) -> None:
        """Give Megatron's groups up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._replay is not None:
            self._replay.close()
        self._models.clear()
        self._parameters.clear()
        del self._schedules, self._optimizer
        topology.leave()
        # Modules, hooks and buffers refer to each other and to the groups, whose threads end with them.
        gc.collect()

    # Parts

    def _freeze(self) -> None:
        """Take the gradients of what is to stay as it is, before buffers and optimizers are made."""
        parts = self._plan.freeze
        if not parts:
            return
        freeze.require_parts(weights.all_names(self._plan), parts)
        # A rank may have nothing but padding of a vocabulary: a piece that is empty, but of some tensor.
        named = [
            (spec.pieces[0].source if spec.pieces else spec.name, self._parameters[spec.name])
            for spec in self._layout.tensors
        ]
        freeze.freeze(named, parts)

    def _common_length(self, lengths: list[int]) -> int:
        """The length that packed sequences are padded to, 0 where each may have its own."""
        config = self._plan.config
        gathers = bool(config.num_moe_experts) and config.moe_token_dispatcher_type == "allgather"
        if not gathers:
            # Only an interleaved schedule asks for equal ones; see build.py.
            return max(lengths) if config.virtual_pipeline_model_parallel_size is not None else 0
        # Tokens of all replicas meet in one gather.
        longest = torch.tensor(max(lengths), device=self.device)
        distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
        return int(longest.item())

    @property
    def _trained(self) -> Optimizer:
        if self._optimizer is None:
            raise StepOrderError("this rank was made to score only; make one with RankSpec.trains")
        return self._optimizer

    def _progress(self) -> "checkpoint.Progress":
        return checkpoint.Progress(steps=self._steps, warming=self._warming)

    def _end_warm_up(self) -> None:
        if self._warming:
            self._trained.forget_moments()
            self._warming = False

    def _work(self, batches: Sequence[Packed]) -> list[Work]:
        if not batches:
            raise BatchError("there is no micro-batch; every replica is given equally many, at least one")
        hf, config = self._plan.hf, self._plan.config
        unsampled = torch.tensor(self._unsampled, device=self.device) if self._unsampled else None
        cut = {
            "multiple": config.tensor_model_parallel_size if config.sequence_parallel else 1,
            "thd": self._plan.transformer_engine,
        }
        length = self._common_length([packing.packed_length(batch, **cut) for batch in batches])
        work = []
        for batch in batches:
            shown = self._read(batch)
            moved = _on_device(batch, self.device)
            packed = packing.sequence(
                moved,
                vocabulary=hf.vocab_size,
                context=hf.max_position_embeddings,
                unsampled=unsampled,
                length=length,
                positions=None if shown is None else shown.positions,
                **cut,
            )
            routes = moved.routes
            if routes is not None:
                if self._routing is None:
                    raise BatchError(f"the batch has routes, but {self.folder} has no experts to route to")
                replay.require_valid(routes, len(batch.tokens), self._routing)
            own = None
            if shown is not None:
                own = media.own(shown, replay.own_tokens(packed.tokens, config.sequence_parallel))
            work.append(Work(packed, routes, counts=True, media=own))
        return work

    def _read(self, batch: Packed) -> media.Media | None:
        """What a micro-batch shows; None of text."""
        if not any(batch.media):
            return None
        if self._plan.media is None:
            raise BatchError(
                f"the batch has media, which {self.folder} (a {self._plan.hf.model_type}) cannot see"
            )
        padding.check(
            batch, vocabulary=self._plan.hf.vocab_size, context=self._plan.hf.max_position_embeddings
        )
        return self._plan.media.read(batch)


def _on_device(batch: Packed, device: torch.device) -> Packed:
    if device.type == "cpu":
        return batch
    return dataclasses.replace(
        batch,
        tokens=batch.tokens.to(device),
        offsets=batch.offsets.to(device),
        prompt_lengths=batch.prompt_lengths.to(device),
        fields={name: column.to(device) for name, column in batch.fields.items()},
        routes=None if batch.routes is None else batch.routes.to(device),
    )


def _loss_inputs(batch: Packed, scores: Tensor) -> LossInputs:
    columns = {name: column.to(scores.device) for name, column in batch.fields.items()}
    return LossInputs(
        logprobs=scores,
        old_logprobs=columns["rollout_logprobs"],
        advantages=columns["advantages"],
        mask=columns["loss_mask"],
        offsets=batch.response_offsets.to(scores.device),
        reference_logprobs=columns.get("reference_logprobs"),
    )


def _added(outputs: Sequence[LossOutputs]) -> LossOutputs:
    """Sums and counts of several micro-batches; a metric ending in `_max` takes the maximum."""
    metrics: dict[str, tuple[float, float]] = {}
    for part in outputs:
        for name, (value, count) in part.metrics.items():
            if name not in metrics:
                metrics[name] = (value, count)
            elif name.endswith("_max"):
                metrics[name] = max(metrics[name], (value, count))
            else:
                metrics[name] = (metrics[name][0] + value, metrics[name][1] + count)
    return LossOutputs(
        loss=torch.stack([part.loss.detach() for part in outputs] or [torch.zeros(())]).sum(),
        count=math.fsum(part.count for part in outputs),
        metrics=metrics,
    )
