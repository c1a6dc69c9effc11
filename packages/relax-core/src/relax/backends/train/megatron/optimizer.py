"""Megatron's optimizers, driven as `torch_native` drives AdamW: gradient sums, scaled once, clipped once."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from relax.backends.train.megatron.moments import parts_of
from relax.backends.train.settings import TrainerSettings
from relax.config.megatron import MegatronSettings


def with_gradient_buffers(
    chunks: Sequence[GPTModel], settings: MegatronSettings
) -> list[DistributedDataParallel]:
    """Wrap model chunks: gradients gather in float32 buffers and are **added** over replicas.

    Megatron adds them (rather than taking their mean) as the chunks' `calculate_per_token_loss` is set.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed_optimizer,
        # Reduced once a step, when its last micro-batch is known; several calls accumulate before.
        overlap_grad_reduce=False,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) over all shards; decay on weights of two and more dimensions."""

    def __init__(
        self,
        chunks: Sequence[Any],
        settings: TrainerSettings,
        megatron: MegatronSettings,
        dtype: torch.dtype,
    ) -> None:
        self._chunks: list[Any] = list(chunks)
        self._settings = settings
        self.inner: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                decoupled_weight_decay=True,
                # Clipped here: Megatron adds 1e-6 to the norm, which torch_native does not.
                clip_grad=0.0,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=megatron.distributed_optimizer,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )

    def step(self, scale: float, lr: float) -> float:
        """Finish the accumulated gradients, scale and clip them, step, drop them; every rank calls it.

        Finishing adds gradients over replicas and context ranks, those of norms under sequence and tensor
        parallelism over tensor ranks, and those of tied embeddings over the first and the last stage.

        Returns:
            The norm over all shards after scaling and before clipping, the same on every rank. If it is not
            finite, only the gradients were dropped.
        """
        finalize_model_grads(self._chunks)
        for chunk in self._chunks:
            chunk.scale_gradients(scale)
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if math.isfinite(norm):
            limit = self._settings.clip_grad_norm
            if limit is not None and norm > limit:
                for parameter in self.inner.get_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(limit / norm)
            for group in self.inner.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
                group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)
            self.inner.step_with_ready_grads()
        self.discard()
        return norm

    def discard(self) -> None:
        """Drop what was accumulated."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def forget_moments(self) -> None:
        """Start afresh: moments and step counts as before the first step; weights and masters stay."""
        for optimizer in self._torch_optimizers():
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group.pop("step", None)  # TE's and Apex's FusedAdam count in the group

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in parts_of(self.inner) if part.optimizer is not None]
