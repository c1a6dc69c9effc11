"""What can be checked in seconds, before a process is started: the prompts, the names, the ports."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentic import AgenticError

from relax import algorithms
from relax.backends.inference.errors import EngineError
from relax.backends.inference.registry import ENGINES, engine_class
from relax.backends.inference.sglang.installed import explain
from relax.backends.train.registry import BACKENDS, RANK_BACKENDS
from relax.components.assembly import Environments, algorithm_settings, context_length
from relax.components.context import RunContext
from relax.components.trainers import is_gang
from relax.config import ConfigError, RunConfig
from relax.engine.prompts import BadRow, prompt_of, read_rows
from relax.orchestration.model_shape import shape_of
from relax.orchestration.suitability import missized

if TYPE_CHECKING:
    from omni_processor import OmniProcessor

PROMPTS_CHECKED = 512
"""Rows whose prompts are encoded beforehand; a bad or too long one further on drops its group."""

STREAMS_CHECKED = 32
"""The same where they come with sound or video, which take longer to decode."""


def preflight(config: RunConfig, context: RunContext) -> None:
    """Raise ConfigError for what would fail later."""
    rows = read_rows(config.data)
    check_names(config)
    for key, port in (("queue.port", config.queue.port), ("weights.port", config.weights.port)):
        _check_port(key, port)
    if config.rollout.engine == "sglang":
        _check_sglang(config, context)
    _check_prompts(rows, config, context)


def check_sizes(config: RunConfig, model: Path) -> None:
    """Raise ConfigError for a split that does not divide the model, or a context it does not have. A model
    whose config.json says its sizes in words of its own is left to those who build it.
    """
    try:
        shape = shape_of(json.loads((model / "config.json").read_text()))
    except (KeyError, TypeError):
        return
    if faults := list(missized(config, shape)):
        raise ConfigError("this configuration cannot run:\n  " + "\n  ".join(faults))


def check_names(config: RunConfig) -> None:
    """Raise ConfigError for an engine, backend, algorithm, environment or reward that there is not."""
    engine, backend, algorithm = config.rollout.engine, config.actor.backend, config.algorithm.name
    backends = RANK_BACKENDS if is_gang(config.actor) or backend not in BACKENDS.entries else BACKENDS
    for key, name, lookup, load in (
        ("rollout.engine", engine, ENGINES, engine_class),
        ("actor.backend", backend, backends, backends.load),
    ):
        # What is ours is there, and takes seconds to import; what is another's may be anything.
        found = load if ":" in name else lookup.path
        _check(f"{key} = {name!r}", lambda found=found, name=name: found(name))
    if ":" in algorithm:
        _check(
            f"algorithm.name = {algorithm!r}", lambda: algorithms.build(algorithm, algorithm_settings(config))
        )
    else:
        _check("algorithm", lambda: algorithms.check(algorithm, algorithm_settings(config)))
    _check("environment or reward", lambda: Environments(config))


def _check_sglang(config: RunConfig, context: RunContext) -> None:
    """Refuse what SGLang cannot do here, and a python without it."""
    if context.replay is not None:
        raise ConfigError(
            "--replay with rollout.engine = sglang: what a server of SGLang batched together is not known "
            "afterwards, so its bits cannot be had again; replay runs of rollout.engine=transformers"
        )
    if context.media and config.rollout.sglang.pause == "retract":
        raise ConfigError(
            f"rollout.sglang.pause = retract with model.path = {config.model.path!r}, which sees: a server "
            f"keeps what the vision tower of older weights made of a picture, and what it holds would go on "
            f"with that; set rollout.sglang.pause=auto"
        )
    try:
        explain(config.rollout)
    except EngineError as error:
        raise ConfigError(str(error)) from error


def _check(what: str, build: Callable[[], Any]) -> None:
    try:
        build()
    except (ValueError, LookupError, ImportError, TypeError, AgenticError) as error:
        raise ConfigError(f"{what}: {error}") from error


def _check_port(key: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"{key} = {port}: it cannot be listened on ({error.strerror}); choose another, "
                "or 0 for a free one"
            ) from error


def _check_columns(config: RunConfig, processor: "OmniProcessor") -> None:
    """Refuse columns of media that the model does not take."""
    family, model = processor.family, f"model.path = {config.model.path!r}"
    taken = ", ".join(("text", *sorted(family.placeholder_ids)))
    for kind, column in config.data.media_columns.items():
        if kind not in family.placeholder_ids:
            verb = "hear" if kind == "audio" else "see"
            raise ConfigError(
                f"data.{kind}_column = {column!r} with {model} ({family.name}), which does not {verb} "
                f"{kind}s: it takes {taken}; leave the column out, or take a model that does"
            )
    if config.data.audio_in_video and not family.hears_videos:
        raise ConfigError(
            f"data.audio_in_video = true with {model} ({family.name}), which does not hear: it takes "
            f"{taken}; leave it out, or take a model that does"
        )


def _check_prompts(rows: Sequence[Mapping[str, Any]], config: RunConfig, context: RunContext) -> None:
    from omni_processor import OmniProcessor, OmniProcessorError

    try:
        processor = OmniProcessor.from_pretrained(context.model, family=config.model.family)
    except (OmniProcessorError, TypeError, ValueError, LookupError, OSError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from error
    _check_columns(config, processor)
    room = context_length(context) - 1
    streams = config.data.media_columns.keys() & {"audio", "video"}
    for number in range(min(len(rows), STREAMS_CHECKED if streams else PROMPTS_CHECKED)):
        at = f"data.path = {config.data.path!r}: row {number}"
        try:
            prompt = prompt_of(rows, number, config.data, number)
        except BadRow as error:
            raise ConfigError(f"{at} is no prompt: {error.reason}; correct or remove the row") from error
        try:
            sample = processor(prompt.messages, add_generation_prompt=True)
            length = len(sample.tokens)
            between = sample.media and (processor.positions(sample.tokens, sample.media) % 1).any()
        except (OmniProcessorError, TypeError, ValueError, LookupError, OSError) as error:
            raise ConfigError(
                f"{at} cannot be encoded: {type(error).__name__}: {error}; correct or remove the row"
            ) from error
        if between and config.rollout.engine == "sglang":
            raise ConfigError(
                f"{at} shows a video whose steps in time do not begin at whole positions, and SGLang's are "
                f"whole numbers; set fps in the model's video_preprocessor_config.json so that "
                f"temporal_patch_size / fps * position_id_per_seconds is one, or rollout.engine=transformers"
            )
        if length > room:
            raise ConfigError(
                f"data.path = {config.data.path!r}: the prompt of row {number} has {length} tokens, more "
                f"than the {room} that leave room for one answer token in the context "
                f"(model.context_length = {config.model.context_length}, the model's "
                "own limit applies too); shorten it or raise the limit"
            )
