"""A tokenizer with its chat template: text to ids, conversations to text, and what a further turn appends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omni_processor.errors import TemplateError, TemplateRewritesHistory

Messages = Sequence[Mapping[str, Any]]

_STAND_IN: Messages = ({"role": "user", "content": "."}, {"role": "assistant", "content": "."})


class ChatTokenizer:
    """Thread-safe view of a transformers tokenizer; nothing here changes it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)
        # A fast tokenizer sets its padding state on the first call; afterwards calls only read.
        self.encode("")

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of text as it stands: nothing is added, special tokens written in it are recognised."""
        return np.asarray(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32
        )

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens included unless told otherwise."""
        return self.tokenizer.decode(
            np.asarray(tokens, np.int64).tolist(),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as text, exactly as ``tokenizer.apply_chat_template`` renders it.

        Raises:
            TemplateError: there is no template, or it refuses this conversation.
        """
        from jinja2.exceptions import TemplateError as JinjaError

        if not self.tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template: pass the prompt as a plain string, or set "
                "tokenizer.chat_template"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
        except (JinjaError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template failed on a conversation of roles [{roles}]: {error}"
            ) from error

    def suffix_text(self, messages: Messages | None, new_messages: Messages, **render_kwargs: Any) -> str:
        """What the template writes between the end of an assistant's words and its next turn.

        See `OmniProcessor.template_suffix`; this is its text, with the turn's end included.

        Raises:
            TemplateRewritesHistory: with the new messages present, earlier turns are rendered differently.
            TemplateError: the conversation does not end in an assistant turn.
        """
        history = list(_STAND_IN if messages is None else messages)
        if not history or history[-1].get("role") != "assistant":
            raise TemplateError(
                "the conversation so far must end in the assistant turn that was just sampled"
            )
        asked, turn = history[:-1], history[-1]
        prompt = self.render(asked, add_generation_prompt=True, **render_kwargs) if asked else ""
        whole = self.render([*history, *new_messages], add_generation_prompt=True, **render_kwargs)
        if not whole.startswith(prompt):
            raise TemplateRewritesHistory(
                "the template renders the prompt of the last assistant turn differently once later messages "
                f"exist: {_divergence(prompt, whole)}. Use a template that keeps earlier turns as they were"
            )
        # The assistant's words are replaced by a mark, so that what follows them is found whatever they were.
        mark = "\ue000assistant\ue001"
        while mark in whole:
            mark += "\ue001"
        marked = self.render(
            [*asked, {"role": "assistant", "content": mark}, *new_messages],
            add_generation_prompt=True,
            **render_kwargs,
        )
        if marked.count(mark) != 1:
            raise TemplateRewritesHistory(
                f"the template writes the content of an earlier assistant turn {marked.count(mark)} times "
                "instead of once"
            )
        suffix = marked[marked.index(mark) + len(mark) :]
        if not whole.endswith(suffix):
            raise TemplateRewritesHistory(
                "what the template writes after the assistant turn depends on the words of that turn: "
                f"{whole[-len(suffix) :][:80]!r} against {suffix[:80]!r}"
            )
        content = turn.get("content")
        rendered = whole[len(prompt) : len(whole) - len(suffix)]
        # Calls kept apart from the content are written by the template in its own form: nothing to compare
        # with. Blanks at the edges are trimmed by many templates; the sampled tokens keep them, so that is no
        # difference.
        if (
            isinstance(content, str)
            and not (turn.keys() - {"role", "content"})
            and asked
            and rendered.strip() != content.strip()
        ):
            raise TemplateRewritesHistory(
                "the template changes the words of the last assistant turn once later messages exist: "
                f"{_divergence(content.strip(), rendered.strip())}. Use a template that keeps them "
                "(reasoning included)"
            )
        return suffix

    def drop_sampled_end(self, suffix: np.ndarray, sampled: Sequence[int] | np.ndarray) -> np.ndarray:
        """Leave out the turn's end when the policy sampled that very token."""
        if (
            len(sampled)
            and len(suffix)
            and int(suffix[0]) == int(sampled[-1])
            and int(suffix[0]) in self._special_ids
        ):
            return suffix[1:]
        return suffix


def _divergence(before: str, after: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    return f"from character {at} on, {before[at : at + 40]!r} became {after[at : at + 40]!r}"
