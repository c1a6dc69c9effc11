"""Write the data files of the demonstrations into configs/data/: the same bytes every time."""

import argparse
import json
from pathlib import Path

from agentic.environments import Calculator

FOLDER = Path(__file__).parents[2] / "configs" / "data"
VERBS = ("emit", "write", "give", "print", "show", "send", "say", "type")
AMOUNTS = ("more", "many", "lots of", "plenty of", "only", "just")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    _write("sevens", [{"prompt": f"{verb} {amount} 7s"} for verb in VERBS for amount in AMOUNTS])
    _write(
        "addition",
        [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(10) for b in range(10)],
    )
    tasks = {task.data["expression"]: task for task in Calculator(max_operand=9).tasks(seed=0, n=1000)}
    _write(
        "calculator",
        [
            {"prompt": task.prompt[0]["content"], "expression": expression, "answer": task.answer}
            for expression, task in tasks.items()
        ],
    )


def _write(name: str, rows: list[dict[str, str]]) -> None:
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
