"""agentic's Policy over the engine pool: the processor's encoding and a seat's generation."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from agentic import Action, Encoded, Generation, GenerationRequest, Message, Observation
from omni_processor import OPAQUE, OmniProcessor, Sample

from relax.engine.decoding import Decoding
from relax.engine.seats import Seat


class Encoder:
    """The processor's encoding: of text at once, of what shows something in a thread."""

    def __init__(self, processor: OmniProcessor, decoding: Decoding) -> None:
        self.processor = processor
        self._decoding = decoding

    async def encode(self, messages: Sequence[Message], encode: Callable[[], Sample]) -> Encoded:
        """What `encode` makes of messages."""
        sample = await self._decoding.run(encode) if shows(messages) else encode()
        return Encoded(sample.tokens, shown(sample))


class Opening:
    """The opening of a group's episodes, encoded once: its members open alike."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: tuple[list[Message], bool, _Shared] | None = None

    async def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        if self._known is not None:
            known, prompted, shared = self._known
            if not shared.given_up and prompted == add_generation_prompt and _same(known, messages):
                return await shared.result()
        opening = list(messages)  # a member's list grows with its episode
        work = partial(self._encoder.processor, opening, add_generation_prompt=add_generation_prompt)
        shared = _Shared(self._encoder.encode(opening, work))
        self._known = opening, add_generation_prompt, shared
        return await shared.result()


class _Shared:
    """Encoding that several wait for; given up with the last of them."""

    def __init__(self, encoding: Coroutine[Any, Any, Encoded]) -> None:
        self._task = asyncio.ensure_future(encoding)
        self._waiting = 0
        self.given_up = False

    async def result(self) -> Encoded:
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self._task.done():
                self.given_up = True
                self._task.cancel()


class SeatPolicy:
    """The policy of one episode: encoding by the processor, generation from its seat in the pool."""

    def __init__(self, encoder: Encoder, opening: Opening, seat: Seat) -> None:
        self._encoder = encoder
        self._opening = opening
        self._seat = seat

    async def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        return await self._opening.encode(messages, add_generation_prompt=add_generation_prompt)

    async def encode_observation(
        self, conversation: Sequence[Message], action: Action, observation: Observation
    ) -> Encoded:
        assistant = {"role": "assistant", "content": action.text}
        suffix = partial(
            self._encoder.processor.template_suffix,
            [*conversation, assistant],
            list(observation.messages),
            sampled=action.tokens,
        )
        return await self._encoder.encode(observation.messages, suffix)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoder.processor.decode(tokens, skip_special_tokens=True)

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._seat.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._seat.abort(request_id)


def shows(messages: Sequence[Message]) -> bool:
    """Whether there is more to messages than text."""
    for message in messages:
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            return True
    return False


def shown(sample: Sample) -> list[dict[str, Any]]:
    """The media of a sample as engines and trainers take them: the arrays the model is fed, and nothing else
    that the processor keeps with an item, such as the file it came as.
    """
    return [{name: value for name, value in item.items() if name not in OPAQUE} for item in sample.media]


def _same(known: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether two conversations are the same objects, or the same text."""
    return len(known) == len(messages) and all(
        a is b or (isinstance(a.get("content"), str) and a == b) for a, b in zip(known, messages, strict=True)
    )
