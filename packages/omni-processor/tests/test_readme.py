"""The README's example runs as it is printed."""

import re
from pathlib import Path


def test_readme_example_runs_and_prints_what_its_comments_say(capsys):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(.*\)  # (.*)", blocks[0])
    assert len(promised) == len(printed)
    assert printed[: len(promised) - 1] == promised[:-1]
    assert "https:// is not fetched here" in printed[-1]
