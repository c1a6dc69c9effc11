"""The example in the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path


def test_the_example_of_the_readme_runs():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "acknowledged by ['engine-0']" in done.stdout
