import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax.engine.rewards import RewardError, Score, build


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("7777", 1.0),
        ("77a7", 0.75),
        ("", 0.0),
        ("7", 0.25),
        ("777", 0.75),
        ("77777777", 1.0),
        ("7aaaaaaa", 0.125),
    ],
)
async def test_char_share_is_over_the_whole_expected_length(response, value, sample):
    score = await build("char_share", {"character": "7", "length": 4})(sample(response))
    assert score == Score(value, {"share": value})


@given(text=st.text(st.sampled_from("7ab"), max_size=24))
async def test_ending_early_never_raises_the_char_share(text, sample):
    reward = build("char_share", {"character": "7", "length": 16})
    whole = (await reward(sample(text))).value
    assert 0.0 <= whole <= 1.0
    if len(text) <= 16:
        shorter = [(await reward(sample(text[:end]))).value for end in range(len(text))]
        assert all(value <= whole for value in shorter)


@pytest.mark.parametrize(
    ("settings", "response", "answer", "value"),
    [
        ({}, " Paris\n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({"ignore_case": True}, "paris", "Paris", 1.0),
        ({}, "Paris.", "Paris", 0.0),
        ({}, "7", 7, 1.0),
        ({}, "", 7, 0.0),
    ],
)
async def test_exact_match_compares_letter_for_letter(settings, response, answer, value, sample):
    assert await build("exact_match", settings)(sample(response, answer)) == Score(value, {"correct": value})


@pytest.mark.parametrize("name", ["exact_match", "math"])
@pytest.mark.parametrize("answer", [None, "", "  "])
async def test_a_row_without_an_answer_is_an_error_that_names_its_columns(name, answer, sample):
    with pytest.raises(RewardError, match=rf"{name}: the row has no answer.*columns \['answer', 'prompt'\]"):
        await build(name)(sample("7", answer))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_cannot_exist(value):
    with pytest.raises(RewardError, match=f"a score of {value}.*expected a finite number"):
        Score(value)
