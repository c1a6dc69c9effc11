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

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        sample = self._processor(messages, add_generation_prompt=add_generation_prompt)
        return Encoded(sample.tokens, list(sample.media))

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
