"""agentic's Policy over the engine pool: the processor's encoding and one replica's generation."""

from collections.abc import Sequence

from agentic import Action, Encoded, Generation, GenerationRequest, Message, Observation
from omni_processor import OmniProcessor

from relax.engine.pool import Replica


class ReplicaPolicy:
    """The policy of the episodes of one group: all of its turns go to the same replica."""

    def __init__(self, processor: OmniProcessor, replica: Replica) -> None:
        self._processor = processor
        self._replica = replica
        self._opening: tuple[list[Message], bool, Encoded] | None = None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        """The opening of an episode; the members of a group open alike, and are encoded once."""
        if self._opening is not None:
            known, prompted, encoded = self._opening
            if prompted == add_generation_prompt and _same(known, messages):
                return encoded
        sample = self._processor(messages, add_generation_prompt=add_generation_prompt)
        encoded = Encoded(sample.tokens, list(sample.media))
        self._opening = (list(messages), add_generation_prompt, encoded)
        return encoded

    def encode_observation(
        self, conversation: Sequence[Message], action: Action, observation: Observation
    ) -> Encoded:
        assistant = {"role": "assistant", "content": action.text}
        sample = self._processor.template_suffix(
            [*conversation, assistant], list(observation.messages), sampled=action.tokens
        )
        return Encoded(sample.tokens, list(sample.media))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.decode(tokens, skip_special_tokens=True)

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._replica.front.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._replica.engine.abort(request_id)


def _same(known: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether two conversations are the same objects, or the same text."""
    return len(known) == len(messages) and all(
        a is b or (isinstance(a["content"], str) and a == b) for a, b in zip(known, messages, strict=True)
    )
