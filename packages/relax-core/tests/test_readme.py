"""The example of the README runs as it stands, without Ray, and learns what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.timeout(150)
def test_the_example_of_the_readme_learns_in_one_process(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(program + "\nimport sys\n\nassert 'ray' not in sys.modules\n")

    ran = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=140, check=False
    )

    assert ran.returncode == 0, ran.stderr
    summary, accounts = ran.stdout.splitlines()[-2:]
    found = re.fullmatch(
        r"reward ([\d.]+) -> ([\d.]+) in 30 steps, \d+ s, run at (runs/sevens-[\d-]+)", summary
    )
    assert found, ran.stdout
    assert float(found[1]) < 0.2
    assert float(found[2]) > 0.9
    assert accounts == "1920 samples put = 1920 trained + 0 dropped (exact)"
    assert (tmp_path / found[3] / "checkpoints" / "step-000030").is_dir()
