"""The supervised warm-up: a few steps of imitation before the first rollout, on answers or on demonstrations.

An environment that has a `demonstration(task)` shows how it is played; otherwise the answer column is
imitated. The tokens are laid out exactly as an episode's transcript would be, so that what is learned is what
will be sampled. A row that makes no demonstration is left out and told of, as rollout drops it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omni_processor import OmniProcessor, OmniProcessorError

from relax.backends.train.base import Packed, TrainBackend, ragged
from relax.components.context import RunContext
from relax.config.base import ConfigError
from relax.engine.policy import shown
from relax.engine.prompts import BadRow, Prompt, PromptSource, read_rows
from relax.engine.tasks import task_of
from relax.ops.reports import Reports

REPORT_EVERY = 25
"""Warm-up steps between two reports."""


@dataclass(frozen=True)
class Demonstration:
    """One transcript to imitate: response tokens with mask 1 are the policy's."""

    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray
    media: Sequence[Any]


class NoDemonstration(ValueError):
    """A row that shows nothing to imitate, or what no model can be trained on."""


class Demonstrations:
    """The demonstrations of the data's rows, each made once."""

    def __init__(
        self, source: PromptSource, processor: OmniProcessor, environment: Any, reports: Reports
    ) -> None:
        self._source = source
        self._processor = processor
        self._environment = environment
        self._reports = reports
        self._known: dict[int, Demonstration] = {}
        self._bad: dict[int, str] = {}  # why rows make none

    def drawn(self, draw: np.random.Generator, size: int, max_failures: int) -> list[Demonstration]:
        """`size` of them at random; another is drawn in the place of a row that makes none.

        Raises:
            ConfigError: more than `max_failures` that were drawn one after the other make none, or none does.
        """
        chosen: list[Demonstration] = []
        rows = len(self._source)
        for first in draw.integers(0, rows, size):
            ordinal, known = int(first), len(self._bad)
            while not self._makes_one(ordinal):
                found = len(self._bad) - known
                if found > max_failures or len(self._bad) == rows:
                    raise ConfigError(
                        f"{found} of {rows} rows, one after the other, make no demonstration for the warm-up "
                        f"(rollout.max_failures = {max_failures}); the last one: {self._bad[ordinal]}"
                    )
                ordinal = int(draw.integers(0, rows))
            chosen.append(self._known[ordinal])
        return chosen

    def _makes_one(self, ordinal: int) -> bool:
        if ordinal in self._known or ordinal in self._bad:
            return ordinal in self._known
        try:
            prompt = self._source.prompt(ordinal)
            self._known[ordinal] = demonstrate(self._processor, self._environment, prompt)
        except (BadRow, NoDemonstration, OmniProcessorError) as error:
            reason = self._bad[ordinal] = str(error)
            self._reports.add("event", event="warm-up row left out", ordinal=ordinal, reason=reason)
        return ordinal in self._known


def warm_up(context: RunContext, backend: TrainBackend, reports: Reports) -> None:
    """Run the configured supervised steps on batches drawn by the run's seed."""
    from relax.components.assembly import Environments

    config = context.config
    settings = config.actor.supervised
    rows = read_rows(config.data)
    source = PromptSource(rows, config.data, config.seed)
    processor = OmniProcessor.from_pretrained(context.model, family=config.model.family)
    demonstrations = Demonstrations(source, processor, Environments(config)(), reports)
    draw = np.random.default_rng([config.seed, 0x5F7])
    for step in range(settings.steps):
        chosen = demonstrations.drawn(draw, settings.batch_size, config.rollout.max_failures)
        loss = backend.supervised_step(packed(chosen), settings.lr)
        if step % REPORT_EVERY == 0 or step + 1 == settings.steps:
            reports.add("event", event="warm-up", step=step + 1, of=settings.steps, loss=loss)


def demonstrate(processor: OmniProcessor, environment: Any, prompt: Prompt) -> Demonstration:
    """The transcript to imitate for one prompt.

    Raises:
        NoDemonstration: there is no answer to imitate, or what is shown is no finite numbers.
        OmniProcessorError: it cannot be encoded.
        ConfigError: the environment demonstrates no turn of the policy.
    """
    show = getattr(environment, "demonstration", None)
    if show is None:
        if prompt.answer is None:
            raise NoDemonstration(f"{prompt.key} has no answer to imitate")
        turns = [{"role": "assistant", "content": str(prompt.answer)}]
        opening = prompt.messages
    else:
        messages = show(task_of(prompt))
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
        if first is None:
            raise ConfigError(
                f"environment {type(environment).__name__} demonstrated {prompt.key} without an assistant "
                f"turn"
            )
        opening, turns = messages[:first], messages[first:]
    start = processor(opening, add_generation_prompt=True)
    tokens, mask, media = [start.tokens], [], shown(start)
    conversation = list(opening)
    place = 0
    while place < len(turns):
        content = turns[place]["content"]
        said = np.concatenate(
            [processor.encode_text(content), np.array([processor.eos_token_ids[0]], np.int32)]
        ).astype(np.int32)
        tokens.append(said)
        mask.append(np.ones(len(said), np.uint8))
        following = place + 1
        while following < len(turns) and turns[following]["role"] != "assistant":
            following += 1
        conversation.append(turns[place])
        seen = turns[place + 1 : following]
        if seen and following < len(turns):
            suffix = processor.template_suffix(conversation, seen, sampled=said)
            tokens.append(suffix.tokens)
            mask.append(np.zeros(len(suffix.tokens), np.uint8))
            media += shown(suffix)
            conversation += seen
        place = following
    for number, item in enumerate(media):
        for name, value in item.items():
            # A sum is finite only if all are: an infinity or a NaN stays.
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value.sum()):
                raise NoDemonstration(
                    f"media item {number} of {prompt.key} has {name} that are no finite numbers, and no step "
                    "could be taken on it"
                )
    return Demonstration(np.concatenate(tokens), len(start.tokens), np.concatenate(mask), media)


def packed(demonstrations: Sequence[Demonstration]) -> Packed:
    """Demonstrations as one micro-batch."""
    tokens, offsets = ragged([d.tokens for d in demonstrations], torch.int64)
    mask, _ = ragged([d.loss_mask for d in demonstrations], torch.uint8)
    return Packed(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=torch.tensor([d.prompt_length for d in demonstrations]),
        fields={"loss_mask": mask},
        media=[d.media for d in demonstrations],
    )
