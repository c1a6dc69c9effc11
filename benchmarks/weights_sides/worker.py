"""A process that takes one role after another: to start it costs more than most of what is measured.

    python worker.py

{"do": "open", "role": NAME, ...} makes what `open_role` of the module of that name returns; {"do": "call",
"what": NAME, ...} calls it; {"do": "close"} ends it.
"""

# `asked` first: it puts the folder of the benchmarks on the path.
from asked import answer  # isort: split

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class Role(Protocol):
    """What a process does for a while.

    Attributes:
        calls: what can be asked of it, by name.
    """

    calls: Mapping[str, Callable[..., Mapping[str, Any]]]

    def close(self) -> None:
        """End it."""
        ...


class Worker:
    """The process."""

    def __init__(self) -> None:
        self._role: Role | None = None

    def open(self, role: str, **words: Any) -> dict[str, Any]:
        """Take a role; only its module imports what it needs."""
        self._role = importlib.import_module(role).open_role(**words)
        return {}

    def call(self, what: str, **words: Any) -> Mapping[str, Any]:
        """Do something in it."""
        assert self._role is not None, "open a role first"
        return self._role.calls[what](**words)

    def close(self) -> dict[str, Any]:
        """Give it up, and what memory it took."""
        role, self._role = self._role, None
        if role is not None:
            role.close()
        return {}


def main() -> None:
    torch.set_num_threads(1)
    worker = Worker()
    answer({"open": worker.open, "call": worker.call, "close": worker.close})
    worker.close()


if __name__ == "__main__":
    main()
