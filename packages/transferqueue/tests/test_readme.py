import re
from pathlib import Path

import pytest


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert "[0 1 2 3 4 0 1 2]" in capsys.readouterr().out
