"""Each package stands alone: its wheel in an empty environment imports, runs its README, passes its tests."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
TEST_TOOLS = ["hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout"]


@dataclass(frozen=True)
class Wheels:
    """What `uv build` made, and the pins under which it is tried."""

    uv: str
    folder: Path
    constraints: Path
    link_mode: str

    def install(self, python: Path, *requirements: str) -> None:
        command = [self.uv, "pip", "install", "--quiet", "--python", python, "--constraint", self.constraints]
        links = ["--find-links", self.folder, "--link-mode", self.link_mode]
        # The checkout is the place where uv's settings and the wanted Python are written down.
        done = subprocess.run([*command, *links, *requirements], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Installed:
    """One package alone in an environment of its own."""

    source: Path
    name: str
    extras: tuple[str, ...]
    imports: str
    wheel: Path
    python: Path
    environment: dict[str, str]

    def run(self, *arguments: str | Path, cwd: Path, timeout: float) -> str:
        done = subprocess.run(
            [self.python, *arguments],
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{self.name}: {arguments} answered {done.returncode}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def wheels(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    folder = tmp_path_factory.mktemp("wheels")
    built = subprocess.run(
        [uv, "build", "--all-packages", "--quiet", "--out-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    export = [uv, "export", "--quiet", "--no-emit-workspace", "--all-groups", "--all-extras", "--no-hashes"]
    pins = subprocess.run(export, cwd=ROOT, capture_output=True, text=True)
    assert pins.returncode == 0, pins.stderr
    constraints = folder / "constraints.txt"
    constraints.write_text(pins.stdout)
    # Gigabytes of torch cost nothing when linked from uv's cache; a hard link cannot leave its file system.
    cache = subprocess.run([uv, "cache", "dir"], cwd=ROOT, capture_output=True, text=True, check=True)
    near = Path(cache.stdout.strip()).stat().st_dev == folder.stat().st_dev
    return Wheels(uv, folder, constraints, "hardlink" if near else "symlink")


@pytest.fixture(scope="module", params=FOLDERS)
def installed(
    request: pytest.FixtureRequest,
    wheels: Wheels,
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installed]:
    source = ROOT / "packages" / request.param
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    (wheel,) = wheels.folder.glob(f"{project['name'].replace('-', '_')}-*.whl")
    (package,) = (path.parent.name for path in source.glob("src/*/__init__.py"))
    place = tmp_path_factory.mktemp(request.param) / "environment"
    made = subprocess.run(
        [wheels.uv, "venv", "--quiet", "--python", ROOT / ".venv/bin/python", place],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    python = place / "bin/python"
    wheels.install(python, str(wheel))
    extras = tuple(project.get("optional-dependencies", ()))
    yield Installed(source, project["name"], extras, package, wheel, python, environment)
    shutil.rmtree(place)


@pytest.mark.timeout(600)
def test_the_wheel_alone_imports_and_its_readme_example_runs(
    installed: Installed, uv: str, tmp_path: Path
) -> None:
    frozen = subprocess.run(
        [uv, "pip", "freeze", "--python", installed.python],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    dists = {re.split(r"==| @ ", line)[0] for line in frozen.splitlines()}
    ours = {
        tomllib.loads(path.read_text())["project"]["name"] for path in ROOT.glob("packages/*/pyproject.toml")
    }
    if installed.name == "relax-core":
        assert ours <= dists
    else:
        assert dists & (ours | {"ray"}) == {installed.name}

    where = Path(
        installed.run(
            "-c", f"import {installed.imports} as it; print(it.__file__)", cwd=tmp_path, timeout=200
        ).splitlines()[-1]
    )
    assert where.is_relative_to(installed.python.parents[1])
    assert (where.parent / "py.typed").exists(), "a typed package says so with an empty py.typed"

    readme = (installed.source / "README.md").read_text()
    example = re.search(r"^```python\n(.*?)^```$", readme, flags=re.M | re.S)
    assert example, f"{installed.source.name}/README.md has no ```python block to run"
    # That relax-core's learns in 30 steps is shown by the package's own test; here it needs to run.
    (tmp_path / "example.py").write_text(example[1].replace('"steps": 30', '"steps": 3'))
    installed.run("example.py", cwd=tmp_path, timeout=300)


def test_every_wheel_carries_the_licence(wheels: Wheels) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for wheel in wheels.folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
            assert archive.read(name) == licence, wheel.name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_packages_own_tests_pass_with_the_wheel_alone(
    installed: Installed, wheels: Wheels, tmp_path: Path
) -> None:
    extras = f"[{','.join(installed.extras)}]" if installed.extras else ""
    wheels.install(installed.python, f"{installed.name}{extras} @ {installed.wheel.as_uri()}", *TEST_TOOLS)
    # A copy, so that nothing beside the tests and what they show to users can be imported or read.
    shutil.copytree(installed.source / "tests", tmp_path / "tests")
    shutil.copy(installed.source / "README.md", tmp_path / "README.md")
    if (installed.source / "recipes").exists():
        shutil.copytree(installed.source / "recipes", tmp_path / "recipes")
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-q", "-m", "not slow"]
    report = installed.run("-m", "pytest", *settings, "tests", cwd=tmp_path, timeout=1100)
    assert re.search(r"\d+ passed", report.splitlines()[-1]), report
