"""Generation requests as `/generate` takes them."""

from collections.abc import Sequence
from typing import Any

from agentic import Sampling

from relax.backends.inference.sglang.answers import Answer
from relax.backends.inference.sglang.pictures import PictureRules, at_version

STREAM_TOKENS = 32
"""Tokens between two pieces of a stream: they tell of progress, and what is there if the server dies."""

NEVER = -1e9
"""Added to the logit of a token that no policy may say; JSON has no infinity."""


def body(
    answers: Sequence[Answer],
    version: int,
    never: Sequence[int] = (),
    rules: PictureRules | None = None,
) -> dict[str, Any]:
    """One call for several requests: admitted together and in order, each streamed by its index.

    Args:
        answers: begun, each with room; several only where none has routes from calls before, as one call
            has one place from which on it tells of routes.
        version: of the weights that are served now. It names the prefix cache, so that no prompt that comes
            later finds what older weights computed.
        never: tokens that must not be sampled.
        rules: of the pictures that answers have. Of what is shown the server is to tell the prompt that it
            makes with it.
    """
    content: dict[str, Any] = {
        "rid": [answer.rid for answer in answers],
        "input_ids": [answer.prompt for answer in answers],
        "sampling_params": [
            sampling(answer.request.sampling, answer.room, answer.request.seed, never) for answer in answers
        ],
        "return_logprob": True,
        "extra_key": [f"v{version}"] * len(answers),
        "stream": True,
    }
    if rules is not None and any(answer.pictures for answer in answers):
        # A server looks at the first entry to see that each request has a list.
        content["input_ids"] = [
            rules.collapsed(answer.prompt) if answer.pictures else answer.prompt for answer in answers
        ]
        content["image_data"] = [
            [at_version(file, version) for file in answer.pictures or []] for answer in answers
        ]
    if any(answer.shown is not None for answer in answers):
        content["video_data"] = [
            [] if answer.shown is None else answer.shown.pieces(len(answer.prompt), version)
            for answer in answers
        ]
    if any(answer.shows for answer in answers):
        content["return_prompt_token_ids"] = True
    if answers[0].captured is not None:
        content["return_routed_experts"] = True
        content["routed_experts_start_len"] = answers[0].routed
    return content


def sampling(how: Sampling, room: int, seed: int, never: Sequence[int] = ()) -> dict[str, Any]:
    """`sampling_params` of one request with room for so many tokens.

    Its end-of-text token, which a server otherwise adds to the stop tokens, is switched off with
    `ignore_eos`; but that switches off the stop tokens too. So with stop tokens it stays on, and an answer
    that it has ended is asked again.
    """
    found: dict[str, Any] = {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k or -1,
        "max_new_tokens": room,
        "sampling_seed": signed(seed),
        "stream_interval": STREAM_TOKENS,
        "skip_special_tokens": False,
    }
    if how.stop_token_ids:
        found["stop_token_ids"] = list(how.stop_token_ids)
    else:
        found["ignore_eos"] = True
    if never:
        found["logit_bias"] = {str(token): NEVER for token in never}
    return found


def signed(seed: int) -> int:
    """A seed in [0, 2**64) as the signed number with the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed
