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


def test_the_readme_names_every_option_of_the_command_and_no_other():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    said = re.findall(r"`dcs serve ([^`]+)`", text)[0]
    done = subprocess.run(
        [sys.executable, "-m", "dcs.cli", "serve", "--help"], capture_output=True, text=True, timeout=60
    )
    assert set(re.findall(r"--[a-z-]+", said)) == set(re.findall(r"--[a-z-]+", done.stdout)) - {"--help"}


def test_examples_in_docstrings_run():
    """There are few: what is worth one has a page, which is run as well."""
    import doctest
    import importlib
    import pkgutil

    import dcs

    tried = 0
    for module in pkgutil.walk_packages(dcs.__path__, "dcs."):
        if module.name.rpartition(".")[2].startswith("_") or module.name.endswith("vllm_worker"):
            continue
        found = doctest.testmod(importlib.import_module(module.name))
        tried += 1
        assert found.failed == 0, module.name
    assert tried > 80
