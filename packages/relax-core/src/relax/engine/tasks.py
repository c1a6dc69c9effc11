"""A prompt of the data as a task of an environment."""

from agentic import Task

from relax.engine.prompts import Prompt

PLAIN = str | int | float | bool | list | type(None)


def task_of(prompt: Prompt) -> Task:
    """The task an episode plays; columns that hold plain data come along in `data`."""
    plain = {key: value for key, value in prompt.row.items() if isinstance(value, PLAIN)}
    return Task(id=prompt.key, prompt=prompt.messages, answer=prompt.answer, data=plain)
