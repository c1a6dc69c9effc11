"""The supervised warm-up: a few steps of imitation before the first rollout, on answers or on demonstrations.

An environment that has a `demonstration(task)` shows how it is played; otherwise the answer column is
imitated. The tokens are laid out exactly as an episode's transcript would be, so that what is learned is what
will be sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omni_processor import OmniProcessor

from relax.backends.train.base import Packed, TrainBackend, ragged
from relax.components.context import RunContext
from relax.config.base import ConfigError
from relax.engine.policy import shown
from relax.engine.prompts import Prompt, PromptSource, read_rows
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


def warm_up(context: RunContext, backend: TrainBackend, reports: Reports) -> None:
    """Run the configured supervised steps on batches drawn by the run's seed."""
    from relax.components.assembly import Environments

    config = context.config
    settings = config.actor.supervised
    rows = read_rows(config.data)
    source = PromptSource(rows, config.data, config.seed)
    processor = OmniProcessor.from_pretrained(context.model, family=config.model.family)
    environment = Environments(config)()
    known: dict[int, Demonstration] = {}
    draw = np.random.default_rng([config.seed, 0x5F7])
    for step in range(settings.steps):
        chosen = [int(i) for i in draw.integers(0, len(rows), settings.batch_size)]
        for ordinal in chosen:
            if ordinal not in known:
                known[ordinal] = demonstrate(processor, environment, source.prompt(ordinal))
        loss = backend.supervised_step(packed([known[i] for i in chosen]), settings.lr)
        if step % REPORT_EVERY == 0 or step + 1 == settings.steps:
            reports.add("event", event="warm-up", step=step + 1, of=settings.steps, loss=loss)


def demonstrate(processor: OmniProcessor, environment: Any, prompt: Prompt) -> Demonstration:
    """The transcript to imitate for one prompt."""
    show = getattr(environment, "demonstration", None)
    if show is None:
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
