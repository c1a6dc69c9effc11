"""The tools' help comes at once: torch, which takes seconds to import, is left to those who have work."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "tools"
TOOLS = sorted(tool for tool in FOLDER.glob("*.py") if "argparse" in tool.read_text())
HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_asking_a_tool_for_help_imports_no_torch(tool):
    command = [sys.executable, "-c", HELP, str(tool)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert said.startswith("usage: ")
    assert said.endswith("False\n")
