"""How the trainer is split over ranks: one number for each kind of parallelism, and what fits together."""

from collections.abc import Iterator

from pydantic import Field

from relax.config.base import Settings

SUPPORTED: dict[str, frozenset[str]] = {"torch_native": frozenset({"data_parallel"})}
"""Kinds of parallelism of the registered backends that do not know all of them. A backend that is not listed
checks for itself.
"""


class ParallelSettings(Settings):
    """Ranks of the trainer by kind. Their product, experts aside, is the number of processes."""

    data_parallel: int = Field(default=1, ge=1)
    """Replicas, or with torch_native shards, that train different rows of a micro-batch."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that split every matrix of a layer."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that hold different layers, one stage after the other."""
    virtual_pipeline: int = Field(default=1, ge=1)
    """Stages that each pipeline rank holds, interleaved; adds no ranks."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that split every sequence."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that hold different experts; taken from the data, context and tensor ranks, adds none."""
    expert_tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that split every matrix of an expert; taken like those of `expert_parallel`."""

    @property
    def parallel(self) -> "ParallelSettings":
        """These numbers alone, without what a settings class adds to them."""
        return ParallelSettings(**{name: getattr(self, name) for name in ParallelSettings.model_fields})

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.model_ranks * self.data_parallel

    @property
    def model_ranks(self) -> int:
        """Processes that hold the model once."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


def parallel_faults(backend: str, parallel: ParallelSettings) -> Iterator[str]:
    """What cannot work of a split, in words that name the key; what depends on the model is the backend's to
    check.
    """
    supported = SUPPORTED.get(backend)
    if supported is not None:
        for name in ParallelSettings.model_fields:
            if name not in supported and (value := getattr(parallel, name)) > 1:
                yield (
                    f"actor.{name} = {value} with actor.backend = {backend}, which knows "
                    f"{', '.join(sorted(supported))} only; set actor.backend=megatron or actor.{name}=1"
                )
        return
    if parallel.virtual_pipeline > 1 and parallel.pipeline_parallel == 1:
        yield (
            f"actor.virtual_pipeline = {parallel.virtual_pipeline} with actor.pipeline_parallel = 1: stages "
            f"are interleaved between pipeline ranks; give at least 2 of them or set actor.virtual_pipeline=1"
        )
    experts = parallel.expert_parallel * parallel.expert_tensor_parallel
    around = parallel.data_parallel * parallel.context_parallel * parallel.tensor_parallel
    if around % experts:
        yield (
            f"actor.expert_parallel x actor.expert_tensor_parallel = {parallel.expert_parallel} x "
            f"{parallel.expert_tensor_parallel} does not divide the {around} ranks of a pipeline stage "
            f"(actor.data_parallel x actor.context_parallel x actor.tensor_parallel); change one of them"
        )
