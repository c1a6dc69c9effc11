"""`OmniProcessor`: a conversation in, exactly the ids and tensors the model was trained on out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from omni_processor import families, spans
from omni_processor.cache import ItemCache
from omni_processor.chat import ChatTokenizer, Messages
from omni_processor.errors import BudgetExceeded, ConfigError, MessageError, UnsupportedModality
from omni_processor.families import Family
from omni_processor.images import decode, decoder_errors, read_header
from omni_processor.messages import IMAGE_MARK, ImageColumn, prepare_messages, replace_marks
from omni_processor.pretrained import read_model
from omni_processor.sample import Budget, ItemPlan, Limits, MediaItem, Sample, Span
from omni_processor.sources import ResolvedImage, content_digest, resolve

_NO_IMAGES = "this model reads text only: use a vision model, or leave the images out"


class OmniProcessor:
    """Turns conversations with media into token ids and numpy tensors for one model. Thread-safe.

    Args:
        tokenizer: the model's transformers tokenizer (fast or not), with its chat template.
        family: a family's name (its published pixel rules then hold) or one made by `families.create`.
        generation_config: the model's generation_config.json as a dict, for its end and padding tokens.
        budget: limits in tokens.
        limits: limits in bytes and pixels, held against headers before anything is decoded.
        cache_bytes: memory for tensorised items, kept by content: equal pictures are decoded once.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        family: str | Family = "text",
        generation_config: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
        limits: Limits | None = None,
        cache_bytes: int = 256 * 2**20,
    ) -> None:
        self._chat = ChatTokenizer(tokenizer)
        self.family = families.create(family, tokenizer) if isinstance(family, str) else family
        self.budget = budget or Budget()
        self.limits = limits or Limits()
        self._cache = ItemCache(cache_bytes)
        self._modalities = frozenset(self.family.placeholder_ids)
        generation = generation_config or {}
        self.eos_token_ids = _end_tokens(generation, tokenizer)
        self._pad_token_id = tokenizer.pad_token_id
        if self._pad_token_id is None:
            self._pad_token_id = generation.get("pad_token_id")

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        family: str | None = None,
        revision: str | None = None,
        budget: Budget | None = None,
        limits: Limits | None = None,
        cache_bytes: int = 256 * 2**20,
    ) -> Self:
        """From a model folder or a hub id: its config.json, tokenizer and (image) preprocessor config.

        Args:
            model: the folder, or ``owner/name``.
            family: overrides what config.json's model_type says; ``"text"`` uses a vision model's text alone.

        Raises:
            ConfigError: anything missing or contradictory in the folder.
        """
        files = read_model(model, revision)
        if family is None:
            if not files.config:
                raise ConfigError(
                    f"{files.folder} has no config.json, so the model's family is unknown: "
                    f"pass family= one of {', '.join(sorted(families.FAMILIES))}"
                )
            family = families.family_of(files.config)
        return cls(
            files.tokenizer,
            family=families.create(family, files.tokenizer, files.config, files.preprocessor),
            generation_config=files.generation_config,
            budget=budget,
            limits=limits,
            cache_bytes=cache_bytes,
        )

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._chat.tokenizer

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, else the generation config's, else the first end token."""
        return self.eos_token_ids[0] if self._pad_token_id is None else int(self._pad_token_id)

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """Ids only media may put into a sequence; a sampler must never emit them."""
        return self.family.reserved_ids

    def __call__(
        self,
        messages: str | Messages,
        *,
        images: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Sample:
        """Process one conversation, or one prompt text.

        Args:
            messages: messages with string content or OpenAI-style parts, rendered by the chat template; or a
                plain string, which is the prompt itself and goes through no template.
            images: sources for the ``<image>`` marks in the text (and for image parts without a source), in
                order. Without it, ``<image>`` is ordinary text.
            add_generation_prompt: whether the header of the assistant's next turn is added (messages only).
            tools: JSON schemas for templates that list tools.
            template_kwargs: passed to the template, e.g. ``enable_thinking=False``.

        Raises:
            MessageError, TemplateError: the conversation, or the template on it.
            MediaError: one item cannot be used; the kinds are in `omni_processor.errors`.
        """
        column = ImageColumn(images)
        if len(column) and "image" not in self._modalities:
            raise UnsupportedModality(_NO_IMAGES, item="image 0")
        if isinstance(messages, str):
            text, sources = messages, []
            if column.given and IMAGE_MARK in messages:
                text, sources = replace_marks(messages, column, self.family.placeholder_text("image"))
        else:
            prepared, sources = prepare_messages(messages, column, self._modalities)
            text = self._chat.render(
                prepared, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
            )
        column.check()
        return self._sample(self._chat.encode(text), sources)

    def template_suffix(
        self,
        messages: Messages | None,
        new_messages: Messages,
        *,
        sampled: Sequence[int] | np.ndarray = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Sample:
        """What to append after a sampled assistant turn: its end, the new messages, the next turn's header.

        The sampled tokens stay as they are; nothing before them is encoded again.

        Args:
            messages: the conversation so far, ending in the assistant turn just sampled (its text as
                content). None: a one-line conversation stands in, for callers that keep tokens only.
            new_messages: tool or user messages, media allowed.
            sampled: the sampled tokens (the last one is enough). If they end with the turn's own end token it
                is not added again; if the turn was cut off, or this is left empty, it is added. Another end
                token than the template's (such as a base model's <|endoftext|>) does not end a turn, so the
                turn's end follows it.

        Returns:
            A `Sample` of the appended piece; its spans count from the piece's start.

        Raises:
            TemplateRewritesHistory: the template renders earlier turns differently now, so appending would be
                wrong.
        """
        if not new_messages:
            raise MessageError("there is no new message to append")
        history = None
        if messages is not None:
            history, _ = prepare_messages(messages, ImageColumn(None, required=False), self._modalities)
        added, sources = prepare_messages(new_messages, ImageColumn(None), self._modalities)
        text = self._chat.suffix_text(history, added, tools=tools, **template_kwargs)
        return self._sample(self._chat.drop_sampled_end(self._chat.encode(text), sampled), sources)

    def plan(self, source: Any) -> ItemPlan:
        """What an image will become and cost in tokens, from its header: nothing is decoded.

        Raises: MediaError, as processing it would (except for damage behind the header).
        """
        return self._plan(source, "image")[1]

    def positions(self, tokens: Sequence[int] | np.ndarray, media: Sequence[MediaItem]) -> np.ndarray:
        """Rotary positions int64 [3, tokens] (time, height, width) of an expanded sequence without padding.

        Equal to the model's own get_rope_index; for text-only models all three rows count 0, 1, 2, ...

        Raises: SpanMismatch.
        """
        found = spans.match_spans(np.asarray(tokens), media, self.family)
        return self.family.positions(
            len(tokens), [(span.start, span.end, media[span.item]) for span in found]
        )

    def spans(self, tokens: Sequence[int] | np.ndarray, media: Sequence[MediaItem]) -> list[Span]:
        """Where each item sits in an expanded sequence. Raises: SpanMismatch."""
        return spans.match_spans(np.asarray(tokens), media, self.family)

    def expand(self, tokens: Sequence[int] | np.ndarray, media: Sequence[MediaItem]) -> np.ndarray:
        """int32 ids with one placeholder an item -> as many as the items take. Raises: SpanMismatch."""
        return spans.expand(np.asarray(tokens), media, self.family)

    def collapse(
        self, tokens: Sequence[int] | np.ndarray, media: Sequence[MediaItem] | None = None
    ) -> np.ndarray:
        """The inverse of `expand`. Without `media`, every run of placeholders counts as one item."""
        return spans.collapse(np.asarray(tokens), media, self.family)

    def check_agreement(
        self,
        tokens: Sequence[int] | np.ndarray,
        engine_tokens: Sequence[int] | np.ndarray,
        media: Sequence[MediaItem],
    ) -> None:
        """Raise SpanMismatch, naming the item, unless trainer and engine hold the same expanded ids."""
        spans.check_agreement(np.asarray(tokens), np.asarray(engine_tokens), media, self.family)

    def encode_text(self, text: str) -> np.ndarray:
        """int32 ids of text as it stands; no template, nothing added."""
        return self._chat.encode(text)

    def decode(self, tokens: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        return self._chat.decode(tokens, skip_special_tokens)

    def _sample(self, collapsed: np.ndarray, sources: Sequence[Any]) -> Sample:
        media = self._media(sources)
        tokens = spans.expand(collapsed, media, self.family)
        found = spans.match_spans(tokens, media, self.family)
        counts = dict.fromkeys(("text", *self.family.placeholder_ids), 0)
        for span in found:
            counts[span.kind] += span.end - span.start
        counts["text"] = len(tokens) - sum(counts.values())
        return Sample(tokens=tokens, media=media, spans=found, token_counts=counts)

    def _plan(self, source: Any, label: str) -> tuple[ResolvedImage, ItemPlan, Any]:
        if "image" not in self._modalities:
            raise UnsupportedModality(_NO_IMAGES, item=label)
        resolved = resolve(source, self.limits, label)
        header = read_header(resolved, self.limits, label)
        return resolved, self.family.plan(header, self.budget), header

    def _media(self, sources: Sequence[Any]) -> list[MediaItem]:
        planned = [self._plan(source, f"image {index}") for index, source in enumerate(sources)]
        costs = [plan.tokens for _, plan, _ in planned]
        allowed = self.budget.max_sample_tokens
        if allowed is not None and sum(costs) > allowed:
            raise BudgetExceeded(
                f"the media cost {sum(costs)} tokens ({', '.join(map(str, costs))}), allowed are {allowed}: "
                "use fewer or smaller images, or Budget(max_item_tokens=...)",
                item=f"{len(costs)} images",
            )
        media = []
        for index, (resolved, plan, header) in enumerate(planned):
            label = f"image {index}"

            def make(resolved=resolved, plan=plan, header=header, label=label) -> MediaItem:
                return self.family.tensorize(decode(resolved, header, label), plan)

            with decoder_errors(label, resolved.label):
                key = content_digest(resolved, header.orientation)
            media.append(self._cache.get_or_make(key, make))
        return media


def _end_tokens(generation: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    configured = generation.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    unique = dict.fromkeys(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)
    if not unique:
        raise ConfigError(
            "neither generation_config.json nor the tokenizer names an end token: set tokenizer.eos_token"
        )
    return tuple(unique)
