"""What a trainer is told before it starts, and the learning rate that follows from it."""

import math
from dataclasses import dataclass
from typing import Literal

from relax.backends.train.errors import SettingsError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class TrainerSettings:
    """The optimizer, its schedule, and the temperature of the policy.

    Attributes:
        lr: peak learning rate, reached after the warm-up.
        betas: AdamW's decay of the first and the second moment.
        eps: AdamW's denominator floor.
        weight_decay: decoupled, on weights of two and more dimensions only (never on norms and biases).
        clip_grad_norm: largest global L2 norm of the scaled gradient; None never clips.
        lr_schedule: after the warm-up stay, or fall to 0 at `total_steps` linearly or as half a cosine.
        warmup_steps: optimizer steps of linear rise; the first step already has lr / warmup_steps.
        total_steps: where a falling schedule ends; needed by those, ignored by `constant`.
        temperature: logits are divided by it before log-softmax, as the engine did when it sampled.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float | None = 1.0
    lr_schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require(_finite(self.lr) and self.lr >= 0, "lr", self.lr, "a finite number >= 0")
        _require(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers in [0, 1)")
        _require(_finite(self.eps) and self.eps > 0, "eps", self.eps, "a finite number > 0")
        _require(
            _finite(self.weight_decay) and self.weight_decay >= 0,
            "weight_decay",
            self.weight_decay,
            "a finite number >= 0",
        )
        _require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            "clip_grad_norm",
            self.clip_grad_norm,
            "a number > 0, or None to never clip",
        )
        _require(
            self.lr_schedule in ("constant", "linear", "cosine"),
            "lr_schedule",
            self.lr_schedule,
            "constant, linear or cosine",
        )
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "a whole number >= 0")
        _require(
            _finite(self.temperature) and self.temperature > 0,
            "temperature",
            self.temperature,
            "a finite number > 0 (greedy sampling has no distribution to train)",
        )
        if self.lr_schedule != "constant":
            _require(
                self.total_steps is not None and self.total_steps > self.warmup_steps,
                "total_steps",
                self.total_steps,
                f"more than warmup_steps ({self.warmup_steps}), as lr_schedule is {self.lr_schedule}",
            )


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """The learning rate of optimizer step `step`, from 0; skipped steps not counted, 0 past the end."""
    if step < settings.warmup_steps:
        return settings.lr * ((step + 1) / settings.warmup_steps)
    if settings.lr_schedule == "constant" or settings.total_steps is None:
        return settings.lr
    done = (step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps)
    left = max(0.0, 1.0 - done)
    if settings.lr_schedule == "linear":
        return settings.lr * left
    return settings.lr * 0.5 * (1.0 - math.cos(math.pi * left))


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise SettingsError(f"trainer setting {name} is {value!r}; it has to be {wanted}")
