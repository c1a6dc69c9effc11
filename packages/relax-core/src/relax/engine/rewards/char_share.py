"""The share of one character in the response: the smallest task that visibly learns ("emit more 7s")."""

from relax.engine.rewards.base import RewardError, RewardInput, Score


class CharShare:
    """Occurrences of `character` over the characters of the response, but over at least `length`.

    The value is in 0..1. A response shorter than `length` is divided by `length` all the same: otherwise a
    policy that says "7" and stops would be perfect, and learning would shorten responses instead of filling
    them. Set `length` to the characters a full response has (its token limit, when a token is a character).
    """

    name = "char_share"

    def __init__(self, character: str, length: int) -> None:
        if len(character) != 1:
            raise RewardError(f"char_share: character={character!r}: expected exactly one character")
        if length < 1:
            raise RewardError(f"char_share: length={length}: expected 1 or more characters")
        self.character = character
        self.length = length

    async def __call__(self, sample: RewardInput) -> Score:
        share = sample.response.count(self.character) / max(len(sample.response), self.length)
        return Score(share, {"share": share})
