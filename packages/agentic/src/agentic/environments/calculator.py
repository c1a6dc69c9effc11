"""The calculator task: an arithmetic question, a calculator to call, an answer to give.

The syntax is a few printable ASCII characters, so that a tiny character-level model can learn it:

    user       12*7+5=?
    assistant  [12*7+5]        a call: an expression in brackets
    tool       89              its value, or "error: ..."
    assistant  =89             the answer: "=" and a number that ends the turn

Text before either is free. A turn with a call is a call, whatever else it says: only its first call counts.
"""

import re
from fractions import Fraction

from ..environment import Action, Message, Observation, Step, Task
from ..errors import InvalidValue
from ..seeds import derive_seed
from .arithmetic import ArithmeticFault, evaluate, to_text

CALL = re.compile(r"\[([^\[\]]*)\]")
ANSWER = re.compile(r"=\s*(-?\d{1,160}(?:\.\d{1,160}|/0*[1-9]\d{0,160})?)\s*\Z")

REWARD_EXACT = 1.0
REWARD_CALL = 0.1
REWARD_USEFUL_CALL = 0.1
REWARD_ANSWERED = 0.1

INSTRUCTIONS = (
    "Answer the arithmetic question. To use the calculator, write one expression in square brackets, such as "
    "[12*7+5], and nothing after it; you are then told its value. When you know the answer, write = and the "
    "number, such as =89, and nothing after it."
)
"""A system message for models that were not taught the syntax."""


class Calculator:
    """An arithmetic question, with a calculator as a tool. The episode is over when an answer is given.

    The reward of an episode that ends with the exact answer is 1.0. Otherwise it is the sum of what was
    earned: 0.1 for a call that has a value, another 0.1 for a call whose value is the answer (each once), and
    0.1 for an answer that is a number but wrong. So every reward is in {0, 0.1, 0.2, 0.3, 1.0}, up to
    rounding.

    Reward parts, each a count or 0/1: `exact`, `answered`, `calls` (that had a value), `failed_calls`.

    Malformed calls and turns that are neither call nor answer are answered with a tool message that starts
    with "error:".
    """

    def __init__(
        self,
        *,
        operations: int = 1,
        operators: str = "+-*",
        max_operand: int = 99,
        instructions: str | None = None,
    ) -> None:
        """Set what `tasks` makes, and what opens every episode.

        Args:
            operations: operators in a question, 1 to 16.
            operators: which ones, out of "+-*".
            max_operand: operands are 0 to this, at most 999,999.
            instructions: a system message before the question, `INSTRUCTIONS` for one; None for none.

        Raises:
            InvalidValue: a value outside its range.
        """
        if not 1 <= operations <= 16:
            raise InvalidValue(f"operations is {operations}; expected 1 to 16")
        if not operators or set(operators) - set("+-*"):
            raise InvalidValue(f'operators is {operators!r}; expected one or more of "+-*"')
        if not 0 <= max_operand <= 999_999:
            raise InvalidValue(f"max_operand is {max_operand}; expected 0 to 999999")
        self._operations = operations
        self._operators = operators
        self._max_operand = max_operand
        self._instructions = instructions
        self._answer: Fraction | None = None
        self._earned: dict[str, float] = {}

    def tasks(self, seed: int, n: int) -> list[Task]:
        """n tasks: task i is a function of the constructor's arguments, the seed and i. Questions may repeat.

        `answer` is the exact value as text; `data["expression"]` is what is asked for.
        """
        return [self._task(seed, index) for index in range(n)]

    def demonstration(self, task: Task) -> list[Message]:
        """A correct episode of a task, as messages, for supervised warm-up: question, call, value, answer.

        Any task whose `data["expression"]` is an expression with the value `answer` will do.
        """
        value = to_text(evaluate(task.data["expression"]))
        return [
            *self._opening(task),
            {"role": "assistant", "content": f"[{task.data['expression']}]"},
            {"role": "tool", "content": value},
            {"role": "assistant", "content": f"={value}"},
        ]

    async def reset(self, task: Task) -> Observation:
        """Ask the question.

        Raises:
            InvalidValue: the task's answer is not a number.
        """
        self._answer = _expected(task)
        self._earned = {}
        return Observation(self._opening(task))

    async def step(self, action: Action) -> Step:
        """Evaluate the turn's call, or judge its answer.

        Raises:
            RuntimeError: called before `reset`.
        """
        if self._answer is None:
            raise RuntimeError("Calculator.step was called before reset")
        if call := CALL.search(action.text):
            return self._call(call[1], self._answer)
        if answer := ANSWER.search(action.text):
            return self._judge(Fraction(answer[1]), self._answer)
        return _told("error: expected [expression] or =answer", 0.0, {})

    async def close(self) -> None:
        """Forget the task."""
        self._answer = None

    def _task(self, seed: int, index: int) -> Task:
        def draw(what: str, position: int, choices: int) -> int:
            # Not numpy's or random's generator: their streams may change between releases.
            return derive_seed(seed, "calculator", index, what, position) % choices

        expression = str(draw("operand", 0, self._max_operand + 1))
        for position in range(1, self._operations + 1):
            expression += self._operators[draw("operator", position, len(self._operators))]
            expression += str(draw("operand", position, self._max_operand + 1))
        return Task(
            id=f"calculator-{seed}-{index}",
            prompt=[{"role": "user", "content": f"{expression}=?"}],
            answer=to_text(evaluate(expression)),
            data={"expression": expression},
        )

    def _opening(self, task: Task) -> list[Message]:
        if self._instructions is None:
            return list(task.prompt)
        return [{"role": "system", "content": self._instructions}, *task.prompt]

    def _call(self, expression: str, expected: Fraction) -> Step:
        try:
            value = evaluate(expression)
        except ArithmeticFault as fault:
            return _told(f"error: {fault}", 0.0, {"failed_calls": 1.0})
        reward = self._earn("call", REWARD_CALL)
        if value == expected:
            reward += self._earn("useful_call", REWARD_USEFUL_CALL)
        return _told(to_text(value), reward, {"calls": 1.0})

    def _judge(self, answer: Fraction, expected: Fraction) -> Step:
        exact = answer == expected
        reward = REWARD_EXACT - sum(self._earned.values()) if exact else REWARD_ANSWERED
        parts = {"exact": float(exact), "answered": 1.0}
        return Step(observation=None, reward=reward, done=True, reward_parts=parts)

    def _earn(self, name: str, reward: float) -> float:
        if name in self._earned:
            return 0.0
        self._earned[name] = reward
        return reward


def _told(content: str, reward: float, parts: dict[str, float]) -> Step:
    observation = Observation([{"role": "tool", "content": content}])
    return Step(observation=observation, reward=reward, done=False, reward_parts=parts)


def _expected(task: Task) -> Fraction:
    try:
        return Fraction(str(task.answer))
    except (ValueError, ZeroDivisionError):
        raise InvalidValue(f"the answer of task {task.id!r} is {task.answer!r}; expected a number") from None
