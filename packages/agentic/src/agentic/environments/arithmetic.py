"""Exact arithmetic on text a policy wrote: nothing but numbers and operators, in bounded time and memory."""

import ast
import re
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_NODES = 100
MAX_BITS = 512
"""Of the numerator and of the denominator of every intermediate result: about 154 decimal digits."""

ALLOWED = re.compile(r"[0-9+\-*/%(). ]*")


class ArithmeticFault(ValueError):
    """The expression has no value; the message is short, as it is shown to the policy."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression over + - * / // % ** and parentheses, with integers and decimals.

    Raises:
        ArithmeticFault: not such an expression, no value (division by zero), or over a limit
            (`MAX_CHARACTERS`, `MAX_NODES`, `MAX_BITS`).
    """
    if len(expression) > MAX_CHARACTERS:
        raise ArithmeticFault("too long")
    if not ALLOWED.fullmatch(expression):
        raise ArithmeticFault("only numbers and + - * / // % ** ( )")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        # The parser reports nesting beyond its stack as any of the three.
        raise ArithmeticFault("syntax") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ArithmeticFault("too long")
    return _value(tree.body, expression.strip())


def to_text(value: Fraction) -> str:
    """As digits when it is an integer, else as `numerator/denominator` in lowest terms."""
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            # From the text, not from the float, so that 0.1 is one tenth.
            return _bounded(Fraction((ast.get_source_segment(source, node) or "").rstrip(".")))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source)
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_apply(operator, _value(left, source), _value(right, source)))
        case _:
            raise ArithmeticFault("syntax")


def _apply(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() | ast.FloorDiv() | ast.Mod() if right == 0:
            raise ArithmeticFault("division by zero")
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
        case _:
            raise ArithmeticFault("syntax")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticFault("exponent is no integer")
    if base == 0 and exponent < 0:
        raise ArithmeticFault("division by zero")
    # Refused before it is computed: a power is the one operation whose result may dwarf its operands.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS:
        raise ArithmeticFault("too large")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ArithmeticFault("too large")
    return value
