"""What can be checked in seconds, before a process is started: the prompts against the model's context, the
reward, the environment, the algorithm.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relax import algorithms
from relax.components.assembly import Environments, context_length
from relax.components.context import RunContext
from relax.config import ConfigError, RunConfig
from relax.engine.prompts import messages_of, read_rows

PROMPTS_CHECKED = 512
"""Rows whose prompts are encoded beforehand; a longer one further on drops its group with a reason."""


def preflight(config: RunConfig, context: RunContext) -> None:
    """Raise ConfigError for what would fail later."""
    rows = read_rows(config.data)
    _check_algorithm(config)
    try:
        Environments(config)
    except (ValueError, LookupError, ImportError, TypeError) as error:
        raise ConfigError(
            f"environment = {config.environment.name!r} or reward = {config.reward.name!r}: {error}"
        ) from error
    _check_prompts(rows, config, context)


def _check_algorithm(config: RunConfig) -> None:
    from relax.algorithms.errors import AlgorithmError

    if ":" in config.algorithm.name:
        return
    settings = config.algorithm.overrides()
    try:
        algorithms.check(config.algorithm.name, settings)
    except AlgorithmError as error:
        raise ConfigError(f"algorithm: {error}") from error


def _check_prompts(rows: Sequence[Mapping[str, Any]], config: RunConfig, context: RunContext) -> None:
    from omni_processor import OmniProcessor

    processor = OmniProcessor.from_pretrained(context.model)
    room = context_length(context) - 1
    for number in range(min(len(rows), PROMPTS_CHECKED)):
        messages = messages_of(rows[number], config.data)
        length = len(processor(messages, add_generation_prompt=True).tokens)
        if length > room:
            raise ConfigError(
                f"data.path = {config.data.path!r}: the prompt of row {number} has {length} tokens, more "
                f"than the {room} "
                f"that leave room for one answer token in the context (model.context_length = "
                f"{config.model.context_length}, the model's own limit applies too); shorten it or raise "
                f"the limit"
            )
