"""The child's end of `measure.child`: answers each line with what the named handler returns."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., Mapping[str, Any]]


def work() -> dict[str, Any]:
    """What the parent gave as the one argument."""
    return json.loads(sys.argv[1])


def answer(handlers: Mapping[str, Handler], ready: Mapping[str, Any] | None = None) -> None:
    """Say that all is ready, then answer until the parent closes standard input.

    Args:
        handlers: by the `do` of a line; the rest of the line is its keywords.
        ready: what the first line says.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    print(json.dumps(ready or {}), file=answers, flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        print(json.dumps(handlers[words.pop("do")](**words)), file=answers, flush=True)
