"""Whether the response is the answer, letter for letter."""

from relax.engine.rewards.base import RewardError, RewardInput, Score


class ExactMatch:
    """1 if the response equals the row's answer, else 0. Space around either does not count.

    Args:
        ignore_case: nor does case.
    """

    name = "exact_match"

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    async def __call__(self, sample: RewardInput) -> Score:
        response, answer = sample.response.strip(), answer_text(sample, self.name)
        if self.ignore_case:
            response, answer = response.casefold(), answer.casefold()
        value = float(response == answer)
        return Score(value, {"correct": value})


def answer_text(sample: RewardInput, reward: str) -> str:
    """The row's answer as text without space around it.

    Raises:
        RewardError: there is none, or it is empty.
    """
    text = "" if sample.answer is None else str(sample.answer).strip()
    if not text:
        raise RewardError(
            f"{reward}: the row has no answer (answer={sample.answer!r}, columns {sorted(sample.row)}): name "
            "the column that holds it in the data configuration, or drop such rows"
        )
    return text
