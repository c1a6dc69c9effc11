"""`make lint` proves the import rules; here each rule is shown to refuse what it is for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

STANDS_ALONE = "The four packages that stand alone"


@pytest.fixture(scope="module")
def lint_imports(root: Path, tmp_path_factory: pytest.TempPathFactory):
    """Runs the linter over a copy of all packages, with one more module written into it."""
    copy = tmp_path_factory.mktemp("packages")
    for package in root.glob("packages/*/src/*"):
        shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(module: str, line: str) -> subprocess.CompletedProcess[str]:
        path = copy / module
        path.write_text(line + "\n")
        try:
            return subprocess.run(
                [root / ".venv/bin/lint-imports", "--no-cache", root / "pyproject.toml"],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "200"},
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            path.unlink()

    return run


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("agentic/extra.py", "import ray", f"{STANDS_ALONE} import neither Ray nor relax"),
        ("dcs/extra.py", "import relax.schema", f"{STANDS_ALONE} import neither Ray nor relax"),
        ("transferqueue/extra.py", "from dcs import errors", f"{STANDS_ALONE} do not import each other"),
        (
            "relax/distributed/extra.py",
            "import relax.engine",
            "The six layers of relax import downwards only",
        ),
        ("relax/components/extra.py", "from ray import serve", "Only the orchestration of relax knows Ray"),
        (
            "relax/algorithms/extra.py",
            "import relax.backends",
            "What stands beside the layers imports none of them",
        ),
    ],
)
def test_an_import_against_the_rules_is_refused(lint_imports, module: str, line: str, rule: str) -> None:
    answer = lint_imports(module, line)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert f"{rule} BROKEN" in answer.stdout


def test_what_the_rules_allow_is_kept(lint_imports) -> None:
    answer = lint_imports(
        "relax/orchestration/extra.py", "import ray, transferqueue, relax.backends, relax.schema"
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
