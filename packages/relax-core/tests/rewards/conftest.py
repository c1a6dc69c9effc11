from collections.abc import Callable
from typing import Any

import pytest
from relax.engine.rewards import RewardInput


@pytest.fixture(scope="session")
def sample() -> Callable[..., RewardInput]:
    """A finished sample with this response and answer."""

    def make(response: str, answer: Any = None) -> RewardInput:
        row = {"prompt": "2+5=", "answer": answer}
        return RewardInput(
            messages=[{"role": "user", "content": "2+5="}], response=response, answer=answer, row=row
        )

    return make
