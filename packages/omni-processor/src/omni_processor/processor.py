"""`OmniProcessor`: a conversation in, exactly the ids and tensors the model was trained on out."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from omni_processor import families, spans
from omni_processor.cache import ItemCache
from omni_processor.chat import ChatTokenizer, Messages
from omni_processor.errors import BudgetExceeded, ConfigError, MessageError, UnsupportedModality
from omni_processor.families import Family
from omni_processor.media import Prepared, Preparer, refusal
from omni_processor.messages import KINDS, Asked, Columns, prepare_messages, replace_marks
from omni_processor.pretrained import read_model
from omni_processor.sample import Budget, ItemPlan, Limits, MediaItem, Sample, Span


class OmniProcessor:
    """Turns conversations with media into token ids and numpy tensors for one model. Thread-safe.

    Args:
        tokenizer: the model's transformers tokenizer (fast or not), with its chat template.
        family: a family's name (its published pixel rules then hold) or one made by `families.create`.
        generation_config: the model's generation_config.json as a dict, for its end and padding tokens.
        budget: limits in tokens.
        limits: limits in bytes, pixels, seconds and frames, held against headers before anything is decoded.
        cache_bytes: memory for tensorised items, kept by content: equal ones are decoded once.
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
        """From a model folder or a hub id: its config.json, tokenizer and preprocessor configs.

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
            family=families.create(
                family, files.tokenizer, files.config, files.preprocessor, files.video_preprocessor
            ),
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
        audios: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
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
            audios, videos: the same for ``<audio>`` and ``<video>``.
            use_audio_in_video: every video comes with its own sound, unless its part says otherwise under the
                same name; one without a sound track is then refused.
            add_generation_prompt: whether the header of the assistant's next turn is added (messages only).
            tools: JSON schemas for templates that list tools.
            template_kwargs: passed to the template, e.g. ``enable_thinking=False``.

        Raises:
            MessageError, TemplateError: the conversation, or the template on it.
            MediaError: one item cannot be used; the kinds are in `omni_processor.errors`.
            TypeError: an argument is a misspelt one, or for the template that a plain string does not have.
        """
        _check_words(template_kwargs, templated=not isinstance(messages, str))
        columns = Columns(images=images, audios=audios, videos=videos)
        for kind in columns.kinds():
            if kind not in self._modalities:
                raise UnsupportedModality(refusal(self.family, kind), item=f"{kind} 0")
        if isinstance(messages, str):
            placeholders = {
                kind: self.family.placeholder_text(kind) if kind in self._modalities else f"<{kind}>"
                for kind in KINDS
            }
            text, asked = replace_marks(messages, columns, placeholders)
        else:
            prepared, asked = prepare_messages(messages, columns, self._modalities)
            text = self._chat.render(
                prepared, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
            )
        columns.check()
        return self._sample(self._chat.encode(text), asked, use_audio_in_video)

    def template_suffix(
        self,
        messages: Messages | None,
        new_messages: Messages,
        *,
        sampled: Sequence[int] | np.ndarray = (),
        use_audio_in_video: bool = False,
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
            use_audio_in_video: as for a call, of the new messages.

        Returns:
            A `Sample` of the appended piece; its spans count from the piece's start.

        Raises:
            TemplateRewritesHistory: the template renders earlier turns differently now, so appending would be
                wrong.
            TypeError: an argument is a misspelt one.
        """
        _check_words(template_kwargs, templated=True)
        if not new_messages:
            raise MessageError("there is no new message to append")
        history = None
        if messages is not None:
            history, _ = prepare_messages(messages, Columns(required=False), self._modalities)
        added, asked = prepare_messages(new_messages, Columns(), self._modalities)
        text = self._chat.suffix_text(history, added, tools=tools, **template_kwargs)
        collapsed = self._chat.drop_sampled_end(self._chat.encode(text), sampled)
        return self._sample(collapsed, asked, use_audio_in_video)

    def plan(self, source: Any, kind: str = "image", *, use_audio_in_video: bool = False) -> ItemPlan:
        """What an image, audio or video will become and cost in tokens, from its header: nothing is decoded.

        Raises: MediaError, as processing it would (except for damage behind the header).
        """
        return self._prepared(Asked(kind, source), kind, use_audio_in_video).plan

    def positions(self, tokens: Sequence[int] | np.ndarray, media: Sequence[MediaItem]) -> np.ndarray:
        """Rotary positions [3, tokens] (time, height, width) of an expanded sequence without padding.

        int64, or float32 for qwen3_omni, whose videos count fractions. Equal to the model's own
        get_rope_index; for text-only models all three rows count 0, 1, 2, ...

        Raises: SpanMismatch.
        """
        found = spans.match(np.asarray(tokens), media, self.family)
        return self.family.positions(
            len(tokens), [(placed.places, media[placed.span.item]) for placed in found]
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
        """The inverse of `expand`. Without `media`, a run of placeholders is one image or sound."""
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

    def _sample(self, collapsed: np.ndarray, asked: Sequence[Asked], own_sound: bool) -> Sample:
        media = self._media(asked, own_sound)
        tokens = spans.expand(collapsed, media, self.family)
        found = spans.match_spans(tokens, media, self.family)
        self._check_budget([len(self.family.placeholders(item)) for item in media], asked)
        counts = {"text": 0} | {
            kind: int((tokens == token).sum()) for kind, token in self.family.placeholder_ids.items()
        }
        counts["text"] = len(tokens) - sum(counts.values())
        return Sample(tokens=tokens, media=media, spans=found, token_counts=counts)

    def _prepared(self, asked: Asked, label: str, own_sound: bool) -> Prepared:
        wanted = own_sound if asked.own_sound is None else asked.own_sound
        preparer = Preparer(self.family, self.budget, self.limits)
        return preparer.prepare(asked.kind, asked.source, label, own_sound=wanted and asked.kind == "video")

    def _media(self, asked: Sequence[Asked], own_sound: bool) -> list[MediaItem]:
        prepared = [self._prepared(one, f"{one.kind} {index}", own_sound) for index, one in enumerate(asked)]
        self._check_budget([one.plan.tokens for one in prepared], asked)
        return [self._cache.get_or_make(one.key, one.make) for one in prepared]

    def _check_budget(self, costs: Sequence[int], asked: Sequence[Asked]) -> None:
        """What the items cost by their headers, and, as some headers only estimate, what they came to."""
        allowed = self.budget.max_sample_tokens
        if allowed is not None and sum(costs) > allowed:
            kinds = {one.kind for one in asked}
            raise BudgetExceeded(
                f"the media cost {sum(costs)} tokens ({', '.join(map(str, costs))}), allowed are {allowed}: "
                "use fewer or smaller ones, or Budget(max_item_tokens=..., max_frame_tokens=...)",
                item=f"{len(costs)} {kinds.pop() if len(kinds) == 1 else 'media item'}s",
            )


def _end_tokens(generation: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    configured = generation.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    unique = dict.fromkeys(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)
    if not unique:
        raise ConfigError(
            "neither generation_config.json nor the tokenizer names an end token: set tokenizer.eos_token"
        )
    return tuple(unique)


def _check_words(words: Mapping[str, Any], *, templated: bool) -> None:
    """Refuse what a template would swallow without a word: `video=` instead of `videos=` shows nothing."""
    own = ("images", "audios", "videos", "use_audio_in_video", "add_generation_prompt", "tools")
    for word in words:
        near = difflib.get_close_matches(word, own, 1, 0.8)
        if near:
            raise TypeError(f"there is no argument {word!r}; did you mean {near[0]!r}?")
        if not templated:
            raise TypeError(
                f"there is no argument {word!r}, and a plain string goes through no template that might take "
                f"it; give messages, or leave it out"
            )
