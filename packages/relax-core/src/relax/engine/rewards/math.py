"""Whether the response's final answer is mathematically equal to the row's, by math-verify."""

import re

from relax.engine.rewards.base import RewardError, RewardInput, Score
from relax.engine.rewards.exact_match import answer_text
from relax.engine.rewards.worker_pool import WorkerDied, WorkerPool, WorkerTimeout

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_ANYTHING_TO_READ = re.compile(r"[0-9A-Za-z\\]|[^\x00-\x7f]", re.ASCII)


class MathReward:
    """1 if the response's answer equals the row's, else 0.

    The answer is one expression, LaTeX or plain, without words around it; the response may be prose.
    Plain integers are compared on the spot. The rest is parsed and compared in a child process, started at
    the first such sample, as symbolic algebra can run for ever: after `timeout` seconds the child is killed
    and the sample scores 0 with the reason and `verifier_failed` 1, as does one that kills the child.

    Args:
        timeout: seconds one sample may take, counted from when a child takes it.
        workers: children; each is about 0.1 GB.
    """

    name = "math"

    def __init__(self, timeout: float = 5.0, workers: int = 1) -> None:
        if timeout <= 0:
            raise RewardError(f"math: timeout={timeout}: expected more than 0 seconds")
        if workers < 1:
            raise RewardError(f"math: workers={workers}: expected 1 or more")
        self._pool = WorkerPool("relax.engine.rewards.math_verifier:verify", workers=workers, timeout=timeout)

    async def __call__(self, sample: RewardInput) -> Score:
        """Judge one sample.

        Raises:
            RewardError: the row has no answer, the answer cannot be read as mathematics, or the reward is
                closed.
        """
        response, answer = sample.response.strip(), answer_text(sample, self.name)
        if _INTEGER.fullmatch(answer):
            if _INTEGER.fullmatch(response):
                return _score(int(response) == int(answer))
            if not _ANYTHING_TO_READ.search(response):
                return _score(False, "nothing to read in the response")
        try:
            found = await self._pool.call({"answer": answer, "response": response})
        except (WorkerTimeout, WorkerDied) as error:
            return Score(0.0, {"correct": 0.0, "verifier_failed": 1.0}, str(error))
        if not found["answer_parsed"]:
            raise RewardError(
                f"math: the answer {answer!r} of the row cannot be read as mathematics: correct it in the "
                "data, or use the exact_match reward"
            )
        return _score(found["equal"], None if found["response_parsed"] else "no answer found in the response")

    def close(self) -> None:
        """End the children. Idempotent."""
        self._pool.close()


def _score(correct: bool, reason: str | None = None) -> Score:
    return Score(float(correct), {"correct": float(correct), "verifier_failed": 0.0}, reason)
