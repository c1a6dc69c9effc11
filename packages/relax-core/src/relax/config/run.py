"""The configuration of one run: every key there is, in one tree."""

from typing import Any, Literal

from pydantic import Field, field_validator

from relax.config.base import Settings
from relax.config.inputs import DataSettings, FactorySettings, ModelSettings
from relax.config.roles import ActorSettings, AlgorithmSettings, RolloutSettings
from relax.config.system import (
    CheckpointSettings,
    LogSettings,
    QueueSettings,
    RaySettings,
    RunSettings,
    WeightSettings,
)

SCHEMA_VERSION = 1

BESIDE_SERVER_SECONDS = 120.0
"""What the start of an engine takes beside that of its server: a process, its imports, the model's layout."""


class RunConfig(Settings):
    """Everything a run is made of. Saved, resolved, as `config.yaml` in the run folder."""

    schema_version: Literal[1] = SCHEMA_VERSION
    mode: Literal["async", "colocate"] = "async"
    """`async`: roles work at the same time. `colocate`: in turns, on-policy, repeatable bit for bit."""
    max_staleness: int = Field(default_factory=lambda data: 0 if data.get("mode") == "colocate" else 1, ge=0)
    """Versions that the oldest token of a trained sample may lie behind; 0 is on-policy."""
    launcher: Literal["ray", "local"] = "ray"
    """`ray`: every role a Ray Serve deployment. `local`: all roles in this process."""
    steps: int = Field(default=60, ge=1)
    """Optimizer steps of the whole run."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    environment: FactorySettings = FactorySettings(name="single_turn")
    reward: FactorySettings = FactorySettings(name="exact_match")
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout: RolloutSettings = RolloutSettings()
    actor: ActorSettings = ActorSettings()
    queue: QueueSettings = QueueSettings()
    weights: WeightSettings = WeightSettings()
    ray: RaySettings = RaySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()

    @field_validator("model", "data", mode="before")
    @classmethod
    def _path_for_short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @property
    def reference(self) -> bool:
        """Whether a Reference role is needed."""
        return bool(self.algorithm.kl_coef)

    @property
    def start_seconds(self) -> float:
        """Longest time until every role is ready: `ray.start_seconds`, or more where a server of an engine is
        given more.
        """
        sglang = self.rollout.sglang
        if self.rollout.engine != "sglang" or sglang.urls:
            return self.ray.start_seconds
        return max(self.ray.start_seconds, sglang.start_seconds + BESIDE_SERVER_SECONDS)

    @property
    def start_key(self) -> str:
        """The setting that `start_seconds` comes from."""
        own = self.start_seconds == self.ray.start_seconds
        return "ray.start_seconds" if own else "rollout.sglang.start_seconds"

    @property
    def batch_samples(self) -> int:
        """Samples trained by one optimizer step."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt
