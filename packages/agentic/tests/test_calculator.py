from fractions import Fraction

import pytest
from agentic import EpisodeEnd, EpisodeError, InvalidValue, Limits, Sampling, Task, run_episode
from agentic.environments import Calculator
from agentic.environments.arithmetic import evaluate
from agentic.environments.calculator import INSTRUCTIONS
from hypothesis import given
from hypothesis import strategies as st

QUESTION = Task("q", [{"role": "user", "content": "12*7+5=?"}], answer="89", data={"expression": "12*7+5"})


@pytest.fixture
def play(policy_of, turns_of):
    async def play(*texts, environment=None, task=QUESTION, max_turns=None):
        return await run_episode(
            environment or Calculator(),
            task,
            policy_of(turns_of(*texts)),
            limits=Limits(max_turns=max_turns or len(texts)),
            sampling=Sampling(),
            request_id="e",
            seed=0,
        )

    return play


def told(episode):
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("texts", "reward", "parts"),
    [
        (["[12*7+5]", "=89"], 1.0, {"calls": 1, "exact": 1, "answered": 1}),
        (["=89"], 1.0, {"exact": 1, "answered": 1}),
        (["[12*7]", "[84+5]", "=89"], 1.0, {"calls": 2, "exact": 1, "answered": 1}),
        (["[12*7+5]", "=90"], 0.3, {"calls": 1, "exact": 0, "answered": 1}),
        (["[12*7]", "=90"], 0.2, {"calls": 1, "exact": 0, "answered": 1}),
        (["=90"], 0.1, {"exact": 0, "answered": 1}),
        (["[1+1]", "[1+1]", "[1+1]"], 0.1, {"calls": 3}),
        (["[12*7+5]", "[12*7+5]"], 0.2, {"calls": 2}),
        (["[1/0]", "[", "what"], 0.0, {"failed_calls": 1}),
    ],
)
async def test_rewards_are_as_documented(play, texts, reward, parts):
    episode = await play(*texts)
    assert episode.reward == pytest.approx(reward, abs=1e-12)
    assert (episode.reward == 1.0) == bool(parts.get("exact"))
    assert episode.reward_parts == parts


async def test_the_value_of_a_call_is_told_and_masked_out(play):
    episode = await play("[12*7+5]", "=89")
    assert (episode.end, told(episode)) == (EpisodeEnd.DONE, ["89"])
    # The call and its end of turn; tool role, "89", end of turn, assistant role; the answer and its end.
    assert episode.transcript.loss_mask.tolist() == [1] * 9 + [0] * 5 + [1] * 4


async def test_the_episode_is_over_with_an_answer_or_with_the_last_turn(play):
    assert (await play("=1", max_turns=5)).end is EpisodeEnd.DONE
    assert (await play("[1]", "[1]")).end is EpisodeEnd.MAX_TURNS


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[1/0]", "error: division by zero"),
        ("[2**999999]", "error: too large"),
        ("[1+]", "error: syntax"),
        ("[]", "error: syntax"),
        ("[os]", "error: only numbers and + - * / // % ** ( )"),
        ("hello", "error: expected [expression] or =answer"),
        ("=", "error: expected [expression] or =answer"),
        ("=89 or so", "error: expected [expression] or =answer"),
        ("=1/0", "error: expected [expression] or =answer"),
        ("[12*7+5", "error: expected [expression] or =answer"),
    ],
)
async def test_mistakes_are_told_and_the_episode_goes_on(play, text, answer):
    episode = await play(text, "=89")
    assert told(episode) == [answer]
    assert (episode.end, episode.reward) == (EpisodeEnd.DONE, 1.0)


@pytest.mark.parametrize("text", ["so [1+1] then [2+2]", "[1+1]=89", "=89[1+1]"])
async def test_only_the_first_call_of_a_turn_counts(play, text):
    episode = await play(text, "=89")
    assert told(episode) == ["2"]
    assert episode.turns == 2


@pytest.mark.parametrize(
    ("answer", "text"),
    [("7/2", "=3.5"), ("7/2", "=7/2"), ("7/2", "=14/4"), ("-3", "= -3 "), (89, "it is =089")],
)
async def test_answers_are_compared_by_value(play, answer, text):
    task = Task("q", QUESTION.prompt, answer=answer)
    assert (await play(text, task=task)).reward == 1.0


async def test_an_environment_may_play_one_episode_after_another(play):
    environment = Calculator()
    await play("[12*7+5]", "=89", environment=environment)
    assert (await play("[12*7+5]", "=90", environment=environment)).reward == pytest.approx(0.3)


@pytest.mark.parametrize("answer", [None, "many", "1/0"])
async def test_a_task_whose_answer_is_no_number_fails_by_name(play, answer):
    with pytest.raises(EpisodeError, match=rf"at reset: .*answer of task 'q' is {answer!r}"):
        await play("=1", task=Task("q", QUESTION.prompt, answer=answer))


@given(st.integers(0, 2**64 - 1), st.integers(1, 4), st.sampled_from(["+", "+-", "+-*"]))
def test_tasks_are_a_function_of_the_seed_and_their_place(seed, operations, operators):
    make = Calculator(operations=operations, operators=operators, max_operand=20)
    tasks = make.tasks(seed, 5)
    assert make.tasks(seed, 3) == tasks[:3]
    for task in tasks:
        expression = task.data["expression"]
        assert task.prompt == [{"role": "user", "content": f"{expression}=?"}]
        assert evaluate(expression) == Fraction(task.answer)
        assert sum(expression.count(symbol) for symbol in operators) == operations


def test_tasks_never_change():
    tasks = Calculator(operations=2).tasks(1, 3)
    assert [(task.id, task.data["expression"], task.answer) for task in tasks] == [
        ("calculator-1-0", "64-93-72", "-101"),
        ("calculator-1-1", "36-40-86", "-90"),
        ("calculator-1-2", "17*98*80", "133280"),
    ]


def test_tasks_use_all_operands_and_operators():
    tasks = Calculator(max_operand=9).tasks(0, 500)
    assert {symbol for task in tasks for symbol in "+-*" if symbol in task.data["expression"]} == set("+-*")
    assert {digit for task in tasks for digit in task.data["expression"] if digit.isdigit()} == set(
        "0123456789"
    )


async def test_a_demonstration_earns_the_whole_reward_when_it_is_played(play):
    environment = Calculator(operations=3, instructions=INSTRUCTIONS)
    for task in environment.tasks(5, 20):
        shown = environment.demonstration(task)
        said = [message["content"] for message in shown if message["role"] == "assistant"]
        episode = await play(*said, environment=environment, task=task)
        assert episode.reward == 1.0
        assert episode.messages == shown


def test_demonstrations_are_printable_ascii():
    environment = Calculator(operations=3)
    for task in environment.tasks(5, 20):
        assert all(
            message["content"].isascii() and message["content"].isprintable()
            for message in environment.demonstration(task)
        )


async def test_instructions_come_first(play):
    episode = await play("=89", environment=Calculator(instructions=INSTRUCTIONS))
    assert [message["role"] for message in episode.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    "options", [{"operations": 0}, {"operators": ""}, {"operators": "+/"}, {"max_operand": -1}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        Calculator(**options)
