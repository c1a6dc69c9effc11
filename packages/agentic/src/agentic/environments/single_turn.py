"""One question, one answer, one reward."""

from ..environment import Action, Observation, Step, Task
from ..reward import Reward, score


class SingleTurn:
    """Shows the task's prompt, and scores the policy's only turn with a reward function."""

    def __init__(self, reward: Reward) -> None:
        """Args: reward: plain or async, (task, response text, transcript) -> number or `Score`."""
        self._reward = reward
        self._task: Task | None = None

    async def reset(self, task: Task) -> Observation:
        """Begin the task with its own prompt."""
        self._task = task
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        """Score the turn, also one that was cut off. The episode is over.

        Raises:
            InvalidValue: the reward function returned something else than a finite number or `Score`.
            RuntimeError: called before `reset`.
        """
        if self._task is None:
            raise RuntimeError("SingleTurn.step was called before reset")
        found = await score(self._reward, self._task, action.text, action.transcript)
        return Step(
            observation=None,
            reward=found.value,
            done=True,
            info={"reason": found.reason} if found.reason else {},
            reward_parts=found.parts,
        )

    async def close(self) -> None:
        """Forget the task."""
        self._task = None
