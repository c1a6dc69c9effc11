"""The policy protocol: the one thing the package asks of whoever owns a tokenizer and an engine."""

from collections.abc import Sequence
from typing import Protocol

from .environment import Action, Message, Observation
from .generation import Encoded, Generation, GenerationRequest


class Policy(Protocol):
    """Encodes, generates and decodes. One instance serves any number of episodes at once, in one event loop.

    Encoding must not hold that loop up: what takes long, such as decoding a video, belongs in a thread. The
    time limit holds while it is awaited; it is cancelled when nobody waits for it any more.
    """

    async def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        """The ids of an opening conversation, followed by what makes the policy speak when asked for."""
        ...

    async def encode_observation(
        self, conversation: Sequence[Message], action: Action, observation: Observation
    ) -> Encoded:
        """The ids between two of the policy's turns: exactly what follows `action.tokens`.

        That is whatever the template still owes to end the turn, the observation's messages, and the
        generation prompt. `action.tokens` says what is owed: its last id is the end-of-turn token if the
        policy sampled it. The media are those of the observation.

        Args:
            conversation: the messages before this turn.
            action: the turn just sampled.
            observation: what the policy is shown next.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of one sampled turn, without the end-of-turn and other special tokens."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. After `abort(request.id)` it returns what it has, with finish_reason "abort".

        If the call itself is cancelled, the request has been aborted before.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early. An id that is unknown or finished is ignored."""
        ...
