"""The README: its example runs as it stands, and what it refers to can be found from where it is read."""

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


def test_the_readme_links_to_nothing_that_a_wheel_has_not():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [
        link for link in links if not link.startswith("#")
    ] == []  # it is shown where no file is beside it


def test_the_documents_that_the_readme_names_are_in_the_repository():
    package = Path(__file__).parent.parent
    documents = package.parent.parent / "docs"
    named = re.findall(r"`docs/([^`]+)`", (package / "README.md").read_text())
    assert named
    if documents.is_dir():  # not so where the package is tested alone
        assert [name for name in named if not (documents / name).is_file()] == []
