"""agentic's Policy over the engine pool: the processor's encoding and a seat's generation."""

from collections.abc import Sequence
from typing import Any

from agentic import Action, Encoded, Generation, GenerationRequest, Message, Observation
from omni_processor import OPAQUE, OmniProcessor, Sample

from relax.engine.seats import Seat


class Opening:
    """The opening of a group's episodes, encoded once: its members open alike."""

    def __init__(self, processor: OmniProcessor) -> None:
        self._processor = processor
        self._known: tuple[list[Message], bool, Encoded] | None = None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        if self._known is not None:
            known, prompted, encoded = self._known
            if prompted == add_generation_prompt and _same(known, messages):
                return encoded
        sample = self._processor(messages, add_generation_prompt=add_generation_prompt)
        encoded = Encoded(sample.tokens, shown(sample))
        self._known = (list(messages), add_generation_prompt, encoded)
        return encoded


class SeatPolicy:
    """The policy of one episode: encoding by the processor, generation from its seat in the pool."""

    def __init__(self, processor: OmniProcessor, opening: Opening, seat: Seat) -> None:
        self._processor = processor
        self._opening = opening
        self._seat = seat

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        return self._opening.encode(messages, add_generation_prompt=add_generation_prompt)

    def encode_observation(
        self, conversation: Sequence[Message], action: Action, observation: Observation
    ) -> Encoded:
        assistant = {"role": "assistant", "content": action.text}
        sample = self._processor.template_suffix(
            [*conversation, assistant], list(observation.messages), sampled=action.tokens
        )
        return Encoded(sample.tokens, shown(sample))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.decode(tokens, skip_special_tokens=True)

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._seat.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._seat.abort(request_id)


def shown(sample: Sample) -> list[dict[str, Any]]:
    """The media of a sample as engines and trainers take them: the arrays the model is fed, and nothing else
    that the processor keeps with an item, such as the file it came as.
    """
    return [{name: value for name, value in item.items() if name not in OPAQUE} for item in sample.media]


def _same(known: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether two conversations are the same objects, or the same text."""
    return len(known) == len(messages) and all(
        a is b or (isinstance(a["content"], str) and a == b) for a, b in zip(known, messages, strict=True)
    )
