"""The examples of the site are real: each page's Python is written out and run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^```python(?: title="([\w.]+)")?\n(.*?)^```$', flags=re.M | re.S)
PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if "decisions" not in page.parts]
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.fixture(scope="module")
def finished(
    request: pytest.FixtureRequest, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[subprocess.CompletedProcess[str]]]]:
    """The scripts of all pages that are tested. Two run at a time: most of each is the import of torch."""

    def run(page: Path) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp(page.stem)
        script = []
        for title, code in BLOCK.findall(page.read_text()):
            if title:
                (folder / title).write_text(code)
            else:
                script.append(code)
        assert script, f"{page.name} shows files, but no lines that use them"
        (folder / "page.py").write_text("\n".join(script))
        return subprocess.run(
            [sys.executable, "page.py"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    names = {item.name for item in request.session.items}
    wanted = [
        page for page in PAGES_WITH_CODE if f"{test_the_code_of_a_page_runs.__name__}[{page.stem}]" in names
    ]
    with ThreadPoolExecutor(2) as two:
        yield {page: two.submit(run, page) for page in wanted}
        two.shutdown(cancel_futures=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: Path, finished: dict[Path, Future[subprocess.CompletedProcess[str]]]
) -> None:
    """Blocks with a title are files of that name; the rest, in order, are one script beside them."""
    done = finished[page].result(timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_how_to_shows_code_that_runs() -> None:
    assert {page for page in PAGES if page.parent.name == "how-to"} <= set(PAGES_WITH_CODE)
