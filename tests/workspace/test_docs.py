"""The examples of the site are real: each page's Python is written out and run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^```python(?: title="([\w.]+)")?\n(.*?)^```$', flags=re.M | re.S)
PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if "decisions" not in page.parts]
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Blocks with a title are files of that name; the rest, in order, are one script beside them."""
    script = []
    for title, code in BLOCK.findall(page.read_text()):
        if title:
            (tmp_path / title).write_text(code)
        else:
            script.append(code)
    assert script, f"{page.name} shows files, but no lines that use them"
    (tmp_path / "page.py").write_text("\n".join(script))

    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_how_to_shows_code_that_runs() -> None:
    assert {page for page in PAGES if page.parent.name == "how-to"} <= set(PAGES_WITH_CODE)
