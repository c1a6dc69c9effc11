"""Settings of the roles: rollout, actor, and what the algorithm asks of the others."""

from typing import Literal

from pydantic import Field, model_validator

from relax.config.base import Settings
from relax.config.freeze import Frozen
from relax.config.lora import LoraSettings
from relax.config.megatron import MegatronSettings
from relax.config.parallel import ParallelSettings
from relax.config.sglang import SglangSettings


class AlgorithmSettings(Settings):
    """The loss. A field left out keeps the default of the named algorithm."""

    name: str = "grpo"
    """Registered algorithm (`grpo`, `dapo`, `dr_grpo`) or `module:attribute`."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    """Above `clip_low`: clip-higher."""
    delta: float | None = Field(default=None, gt=1)
    """Cap of the unclipped ratio (two-sided clipping)."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL to the reference in the loss; above 0 a Reference role is started."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    aggregation: Literal["token", "sequence", "fixed"] | None = None
    """Mean over tokens of the batch, over sequences, or divide by a fixed length."""
    normalize_std: bool | None = None

    def overrides(self) -> dict[str, object]:
        """The settings that were given, by name."""
        return {k: v for k, v in self.model_dump(exclude={"name"}).items() if v is not None}


class RolloutSettings(Settings):
    """Generation: how many prompts and samples a step, by which engine, with which sampling."""

    engine: str = "transformers"
    """Registered engine (`transformers`, `sglang`) or `module:attribute`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where a `transformers` engine computes; with `cuda` each replica has a GPU of its own. SGLang has
    `rollout.sglang.device`.
    """
    replicas: int = Field(default=2, ge=1)
    """Engine replicas in the pool."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Groups trained by one optimizer step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Members of a group."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Most tokens the policy samples in one turn."""
    max_turns: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    """Sample on to `max_new_tokens` whatever comes."""
    router: Literal["affinity", "least_load"] = "affinity"
    """Which replica a request goes to with mode = async. `affinity`: the one that holds its episode, or the
    beginning of its prompt, in its prefix cache, unless that is overloaded; else, and always with
    `least_load`, the one with the fewest tokens to do. colocate has a fixed order.
    """
    stall_seconds: float = Field(default=120.0, gt=0)
    """An engine that has requests and neither decodes nor commits for so long, though it may answer, is lost:
    its requests go to another one, and it is started again. What its start takes does not count.
    """
    engine_restarts: int = Field(default=3, ge=0)
    """How often in a row an engine that was lost is started again; one that then serves for ten minutes
    begins anew. The run ends when no engine is left.
    """
    max_running: int = Field(default=64, ge=1)
    """Requests one replica decodes at once."""
    inflight: Literal["retract"] = "retract"
    """What becomes of running requests when new weights are committed: their KV is recomputed."""
    episode_seconds: float = Field(default=300.0, gt=0)
    """Longest time of one episode."""
    max_failures: int = Field(default=16, ge=0)
    """Groups in a row that may fail before the run ends."""
    sglang: SglangSettings = SglangSettings()
    """For `engine = sglang`."""


class SupervisedSettings(Settings):
    """A short supervised warm-up on prompt and answer before the first rollout."""

    steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=3e-3, gt=0)


class ActorSettings(ParallelSettings):
    """Training: the backend, how it is split over ranks, the optimizer."""

    backend: str = "torch_native"
    """Registered training backend or `module:attribute`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the trainer computes; with `cuda` each of its ranks has a GPU of its own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained parameters in forward and backward."""
    master_weights: bool = True
    """With a `dtype` of half precision: gradients are added and weights are stepped in float32. Without,
    small updates are lost.
    """
    fsdp: bool = True
    """With torch_native and `data_parallel` above 1: weights, gradients and moments are sharded over the
    ranks. Without, every rank has all of them.
    """
    gradient_checkpointing: bool = False
    """Compute the activations of each layer again in the backward pass instead of keeping them."""
    packing: bool = False
    """Lay the rows of a micro-batch end to end instead of padding them, with attention kept inside each row.
    Pays where their lengths differ much.
    """
    freeze: Frozen = ()
    """Parts of the model that are left as they are: `language`, `vision`, `audio`, `projector`. They get no
    gradient and no optimizer state; engines are sent them like the others.
    """
    lora: LoraSettings = LoraSettings()
    megatron: MegatronSettings = MegatronSettings()
    """For `backend = megatron`."""
    rank_tokens: int | None = Field(default=None, ge=1)
    """Most tokens, prompts included, in one forward and backward of a rank: a micro-batch is cut further,
    into equally many pieces on every replica. A pipeline is filled with as many pieces as it has stages.
    """
    rank_seconds: float = Field(default=600.0, gt=0)
    """Longest collective of the ranks; one that stands still for so long ends the run."""
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad_norm: float = Field(default=1.0, gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    micro_batch_size: int = Field(default=16, ge=1)
    """Samples in one forward and backward; rounded to whole groups."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Most tokens, prompts included, in one forward and backward, and in one forward of the Reference role:
    as many whole groups as fit, at least one. Takes the place of `micro_batch_size`.
    """
    routing_replay: bool = False
    """Mixtures of experts only: the trainer sends every token to the experts that the engine sent it to when
    it was sampled (R3), in the training pass and for old logprobs; not in reference passes.
    """
    routing_replay_tokens: Literal["all", "sampled"] = "all"
    """With `routing_replay`: of all tokens, or only of those that the policy sampled; the others are routed
    freely.
    """
    max_skipped_steps: int = Field(default=10, ge=0)
    """Steps in a row that may be skipped for a gradient that is not finite before the run ends."""
    supervised: SupervisedSettings = SupervisedSettings()

    @model_validator(mode="after")
    def _trains_one_way(self) -> "ActorSettings":
        if self.freeze and self.lora.rank > 0:
            raise ValueError(
                f"freeze = {list(self.freeze)} with lora.rank = {self.lora.rank}: adapters leave all of the "
                "model's own weights as they are; name the layers that get one by lora.targets instead"
            )
        return self

    @property
    def travelling_adapter(self) -> LoraSettings | None:
        """The adapter, where versions travel as one and engines merge it."""
        sends = self.lora.rank > 0 and self.lora.sync != "merged" and self.ranks == 1
        return self.lora if sends else None
