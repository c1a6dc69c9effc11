"""Combinations that cannot work, refused before anything is started."""

from relax.config.base import ConfigError
from relax.config.parallel import parallel_faults
from relax.config.run import RunConfig
from relax.config.sglang import sglang_faults


def check(config: RunConfig) -> None:
    """Raise ConfigError for the combinations that single fields cannot see; all of them at once."""
    faults = [
        *_staleness(config),
        *_sampling(config),
        *_groups(config),
        *_inputs(config),
        *_weights(config),
        *parallel_faults(config.actor.backend, config.actor),
        *_lora(config),
        *_sglang(config),
        *_ray(config),
    ]
    if faults:
        raise ConfigError("this configuration cannot run:\n  " + "\n  ".join(faults))


def _staleness(config: RunConfig) -> list[str]:
    if config.mode == "colocate" and config.max_staleness > 0:
        return [
            f"max_staleness = {config.max_staleness} with mode = colocate: roles that take turns are "
            f"strictly on-policy; "
            "set max_staleness=0 or mode=async"
        ]
    return []


def _sampling(config: RunConfig) -> list[str]:
    sampling = config.rollout
    return [
        f"rollout.{key} = {value}: a ratio loss needs the whole distribution that was sampled from; set "
        f"rollout.{key}={off}"
        for key, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0))
        if value != off
    ]


def _groups(config: RunConfig) -> list[str]:
    faults = []
    if config.rollout.samples_per_prompt < 2:
        faults.append(
            f"rollout.samples_per_prompt = {config.rollout.samples_per_prompt}: {config.algorithm.name} "
            f"compares the samples "
            "of a prompt with each other; give at least 2"
        )
    if config.environment.name == "calculator" and config.rollout.max_turns < 2:
        faults.append(
            f"rollout.max_turns = {config.rollout.max_turns} with environment = calculator: the tool's "
            f"answer comes in the "
            "second turn; give at least 2"
        )
    if (
        config.model.context_length is not None
        and config.rollout.max_new_tokens >= config.model.context_length
    ):
        faults.append(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in "
            f"model.context_length = {config.model.context_length}"
        )
    return faults


def _inputs(config: RunConfig) -> list[str]:
    faults = []
    if not config.data.path:
        faults.append("data.path is empty: name a JSONL or Parquet file, or module:function")
    if (
        config.reward.name in ("math", "exact_match")
        and config.environment.name == "single_turn"
        and not config.data.answer_column
    ):
        faults.append(
            f"reward = {config.reward.name} compares with an answer: name its column in data.answer_column"
        )
    if config.model.text_only:
        faults += [
            f"model.text_only = true with data.{kind}_column = {column!r}: a model that only reads is shown "
            f"no {kind}s; leave one of them out"
            for kind, column in config.data.media_columns.items()
        ]
    if config.data.audio_in_video and not config.data.video_column:
        faults.append(
            "data.audio_in_video = true without data.video_column: name the column with the videos whose "
            "sound is to be heard"
        )
    supervised = config.actor.supervised
    if supervised.steps and not config.data.answer_column and config.environment.name == "single_turn":
        faults.append(
            f"actor.supervised.steps = {supervised.steps} needs answers to imitate: name their column in "
            f"data.answer_column"
        )
    return faults


def _weights(config: RunConfig) -> list[str]:
    weights = config.weights
    faults = []
    if len(set(weights.wires)) < len(weights.wires):
        faults.append(f"weights.wires = {weights.wires} names a wire twice; name each once")
    if "tcp" not in weights.wires:
        if weights.delta:
            faults.append(
                f"weights.delta = true with weights.wires = {weights.wires}: differences travel by tcp, and "
                f"mapped memory has no use for them; add tcp to weights.wires, or leave weights.delta out"
            )
        if config.ray.address is not None:
            faults.append(
                f"weights.wires = {weights.wires} with ray.address = {config.ray.address!r}: memory is "
                f"mapped on one machine only, and a cluster may have several; add tcp to weights.wires"
            )
    return faults


def _lora(config: RunConfig) -> list[str]:
    actor = config.actor
    if not actor.lora.rank:
        return []
    faults = []
    if actor.backend == "megatron":
        faults.append(
            f"actor.lora.rank = {actor.lora.rank} with actor.backend = megatron, which trains no adapters; "
            f"set actor.backend=torch_native or actor.lora.rank=0"
        )
    if actor.lora.sync == "adapter" and actor.ranks > 1:
        faults.append(
            f"actor.lora.sync = adapter with {actor.ranks} ranks, which publish merged shards; set "
            f"actor.lora.sync=merged or actor.data_parallel=1"
        )
    return faults


def _ray(config: RunConfig) -> list[str]:
    if config.ray.nodes is None or (config.launcher == "ray" and config.ray.address is not None):
        return []
    return [
        f"ray.nodes = {config.ray.nodes} is for a Ray with a ray.address that launcher = ray visits; "
        f"another one has one node; leave it out, or set ray.nodes=null"
    ]


def _sglang(config: RunConfig) -> list[str]:
    if config.rollout.engine != "sglang":
        return []
    faults = sglang_faults(config.rollout.sglang, replicas=config.rollout.replicas, mode=config.mode)
    if config.actor.routing_replay and config.rollout.sglang.pause in ("retract", "in_place"):
        faults.append(
            f"rollout.sglang.pause = {config.rollout.sglang.pause} with actor.routing_replay = true: SGLang "
            f"would tell the routes of newer weights beside logprobs of older ones; set "
            f"rollout.sglang.pause=auto, which keeps those of the first sampling"
        )
    return faults
