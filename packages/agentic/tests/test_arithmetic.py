import contextlib
import operator
from fractions import Fraction

import pytest
from agentic.environments.arithmetic import MAX_BITS, ArithmeticFault, evaluate, to_text
from hypothesis import given
from hypothesis import strategies as st

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@st.composite
def expressions(draw, depth=3):
    """An expression as text, and its value worked out while it is written (None if it divides by zero)."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 999))
        return str(number), Fraction(number)
    (left, left_value), (right, right_value) = (draw(expressions(depth - 1)) for _ in range(2))
    symbol = draw(st.sampled_from(sorted(OPERATORS)))
    if left_value is None or right_value is None or (symbol == "/" and right_value == 0):
        value = None
    else:
        value = OPERATORS[symbol](left_value, right_value)
    return f"({left}) {symbol} ({right})", value


@given(expressions())
def test_values_are_exact(case):
    text, value = case
    if value is None:
        with pytest.raises(ArithmeticFault, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == value


@given(st.text(alphabet="0123456789+-*/%(). ", max_size=40))
def test_any_text_of_the_alphabet_has_a_bounded_value_or_a_fault(text):
    try:
        value = evaluate(text)
    except ArithmeticFault:
        return
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS


@given(st.text(max_size=60))
def test_any_text_at_all_has_a_value_or_a_fault(text):
    with contextlib.suppress(ArithmeticFault):
        assert isinstance(evaluate(text), Fraction)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*7+5", "89"),
        (" 1 + 2*3 ", "7"),
        ("-3--4", "1"),
        ("+2", "2"),
        ("7/2", "7/2"),
        ("6/2", "3"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-2", "1/4"),
        ("-2**2", "-4"),
        ("0.1+0.2", "3/10"),
        (".5*4", "2"),
        ("1**99999999999999999999", "1"),
        ("0**0", "1"),
    ],
)
def test_known_values(text, value):
    assert to_text(evaluate(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "syntax"),
        ("1+", "syntax"),
        ("1 2", "syntax"),
        ("1(2)", "syntax"),
        ("()", "syntax"),
        ("007", "syntax"),
        ("1.2.3", "syntax"),
        ("(" * 150, "syntax"),
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "exponent is no integer"),
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("2**-9999999999", "too large"),
        ("9" * 160, "too large"),
        ("1+" * 60 + "1", "too long"),
        ("1" + "+1" * 150, "too long"),
        ("__import__('os')", "only numbers"),
        ("x", "only numbers"),
        ("1e5", "only numbers"),
        ("1\n2", "only numbers"),
        ("½", "only numbers"),
        ("٣", "only numbers"),
    ],
)
def test_what_has_no_value_is_a_fault(text, message):
    with pytest.raises(ArithmeticFault, match=message):
        evaluate(text)
