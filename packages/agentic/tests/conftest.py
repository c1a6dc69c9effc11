"""A policy that follows a script, over a tokenizer of one id a character."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from agentic import (
    Action,
    Encoded,
    Generation,
    GenerationRequest,
    Limits,
    Message,
    Observation,
    Sampling,
    Step,
    Task,
    run_episode,
)

END_OF_TURN = 1
ROLES = {"system": 2, "user": 3, "assistant": 4, "tool": 5}

type Script = Callable[[GenerationRequest], str | Generation | Awaitable[str | Generation]]


def encode_messages(messages: Sequence[Message]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *map(ord, message["content"]), END_OF_TURN]
    return ids


class ScriptedPolicy:
    """Answers by calling a script; a text it returns ends with the end-of-turn token, within max_new_tokens.

    Keeps every request, every generation and the id of every abort, in order. `version` is what it samples
    with.
    """

    end_of_turn = END_OF_TURN

    def __init__(self, script: Script, version: int = 0) -> None:
        self.script = script
        self.version = version
        self.requests: list[GenerationRequest] = []
        self.generations: list[Generation] = []
        self.aborted: list[str] = []

    async def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Encoded:
        ids = encode_messages(messages) + ([ROLES["assistant"]] if add_generation_prompt else [])
        return Encoded(np.array(ids, np.int32))

    async def encode_observation(
        self, conversation: Sequence[Message], action: Action, observation: Observation
    ) -> Encoded:
        owed = [] if action.tokens[-1] == END_OF_TURN else [END_OF_TURN]
        ids = [*owed, *encode_messages(observation.messages), ROLES["assistant"]]
        return Encoded(np.array(ids, np.int32))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token >= 32)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        answer = self.script(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, str):
            answer = self.generation(answer, request.sampling.max_new_tokens)
        self.generations.append(answer)
        return answer

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def generation(self, text: str, max_new_tokens: int = 1000) -> Generation:
        ids = [*map(ord, text), END_OF_TURN]
        finish_reason = "stop" if len(ids) <= max_new_tokens else "length"
        tokens = np.array(ids[:max_new_tokens], np.int32)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
        return Generation(tokens, logprobs, [(self.version, 0, len(tokens))], finish_reason)


class Echo:
    """Tells the policy what it said, until it says "bye"; 1.0 a turn. Counts its calls."""

    def __init__(self) -> None:
        self.resets = 0
        self.closes = 0
        self.actions: list[Action] = []

    async def reset(self, task: Task) -> Observation:
        self.resets += 1
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        done = action.text == "bye"
        observation = None if done else Observation([{"role": "tool", "content": action.text}])
        return Step(observation, 1.0, done, {"said": action.text}, {"turns": 1.0})

    async def close(self) -> None:
        self.closes += 1


@pytest.fixture
def policy_of() -> type[ScriptedPolicy]:
    """ScriptedPolicy(script): script(request) -> text or Generation, or an awaitable of one."""
    return ScriptedPolicy


@pytest.fixture
def echo_environment() -> type[Echo]:
    """Echo(): an environment that repeats the policy's words."""
    return Echo


@pytest.fixture
def task() -> Task:
    return Task("greeting", [{"role": "user", "content": "hello"}])


@pytest.fixture
def turns_of() -> Callable[..., Script]:
    """turns_of("a", "bye"): a script that says these, turn by turn (told by the request's id)."""

    def make(*texts: str) -> Script:
        return lambda request: texts[int(request.id.rsplit("/", 1)[1])]

    return make


@pytest.fixture
async def never() -> asyncio.Event:
    """An event nobody sets."""
    return asyncio.Event()


@pytest.fixture
def play(task):
    """play(environment, policy): one episode of the task, as request "e"."""

    async def play(environment, policy, *, limits=None, sampling=None, seed=11):
        return await run_episode(
            environment,
            task,
            policy,
            limits=limits or Limits(),
            sampling=sampling or Sampling(),
            request_id="e",
            seed=seed,
        )

    return play
