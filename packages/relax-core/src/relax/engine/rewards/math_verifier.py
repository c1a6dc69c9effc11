"""The comparison of two mathematical expressions. Imported in a worker only: it may hang, and needs sympy."""

import logging

import math_verify

# It warns once that its own alarm is off: the parent process keeps the time.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify(request: dict[str, str]) -> dict[str, bool]:
    """Parse `answer` and `response` and compare them.

    Returns:
        `equal`, and whether each could be read: `answer_parsed`, `response_parsed`.
    """
    answer = request["answer"]
    # The answer is one whole expression, and parsed as one: in bare text the first number would do.
    gold = _parse(answer if "$" in answer or "boxed" in answer else f"${answer}$")
    if not _readable(gold):
        gold = _parse(answer)
    found = _parse(request["response"])
    equal = bool(gold and found) and math_verify.verify(gold, found, timeout_seconds=None)
    return {"equal": equal, "answer_parsed": _readable(gold), "response_parsed": bool(found)}


def _parse(text: str) -> list:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _readable(forms: list) -> bool:
    # What math-verify finds but cannot read it gives back as a string only.
    return any(not isinstance(form, str) for form in forms)
