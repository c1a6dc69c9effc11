"""What a committed file may hold: no index's address, no path of one person's machine, one idea a file."""

import os
import re
import subprocess
from pathlib import Path

import pytest

INDEX_ADDRESS = r"https?://[^ \"']*/(simple|packages)(/|\b)"
HOME_OF_A_MACHINE = r"(^|[^A-Za-z0-9._~-])/(root|home|Users|work|farm)/[A-Za-z0-9._]"
MOST_LINES = 600
NAMES_WITHOUT_AN_IDEA = {"utils", "util", "helpers", "common", "misc"}


@pytest.fixture(scope="module")
def git(root: Path):
    """Runs git over the index (what is or will be committed); any owner of the checkout will do."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
        )
        # git grep answers 1 when it finds nothing.
        assert done.returncode in ((0, 1) if arguments[0] == "grep" else (0,)), done.stderr
        return done.stdout

    if not (root / ".git").exists() and not os.environ.get("CI"):
        pytest.skip("not a git checkout: there are no committed files to look at")
    return run


@pytest.mark.parametrize("pattern", [INDEX_ADDRESS, HOME_OF_A_MACHINE], ids=["index address", "machine path"])
def test_no_committed_file_names_it(git, pattern: str) -> None:
    assert git("grep", "--cached", "-nIE", pattern) == ""


def test_the_patterns_find_what_they_are_for() -> None:
    host = "//mirror.example.org"
    for address in (
        f"https:{host}/simple/torch/",
        f"http:{host}:81/a/packages/b/c.whl",
        f"https:{host}/simple",
    ):
        assert re.search(INDEX_ADDRESS, address)
    for folder in ("root", "home", "Users"):
        assert re.search(HOME_OF_A_MACHINE, f'"/{folder}/someone/relax"')
    assert not re.search(INDEX_ADDRESS, f"https:{host}/docs/a-simple-example")
    assert not re.search(HOME_OF_A_MACHINE, "../shared/home/x and ~/projects/x")


def test_the_committed_lock_is_index_neutral(git, neutral_lock: str) -> None:
    committed = git("show", ":uv.lock")
    assert 'registry = "pypi"' in committed
    assert committed == neutral_lock, (
        "uv.lock is not committed in its neutral form: make setup, git add uv.lock"
    )


def test_a_python_file_is_one_idea(git, root: Path) -> None:
    for name in git("ls-files", "packages/*.py", "benchmarks/*.py", "scripts/*.py").split():
        path = root / name
        if not path.exists():  # removed, not yet committed
            continue
        lines = len(path.read_text().splitlines())
        assert lines <= MOST_LINES or "tests" in Path(name).parts, (
            f"{name} has {lines} lines; at most {MOST_LINES}"
        )
        assert not NAMES_WITHOUT_AN_IDEA & {part.removesuffix(".py") for part in Path(name).parts}, name
