import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_readme_example_prints_what_the_readme_says(tmp_path):
    readme = Path(__file__).parent.parent / "README.md"
    if not readme.exists():
        pytest.skip("the tests were copied without the README")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
    (code, expected) = (text for _, text in blocks)
    assert blocks[0][0] == "python"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr == ""
    assert ran.stdout == expected
