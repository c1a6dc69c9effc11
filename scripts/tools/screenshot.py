"""The picture of a run in the README: run the command in a terminal of its own, and draw what it shows.

    .venv/bin/python scripts/tools/screenshot.py docs/images/train.svg relax train configs/quickstart.yaml

Nothing is made up: the command runs in a pseudo-terminal of COLUMNS x ROWS, and the picture is what stands
there in the end; what was written before has scrolled away. If the command fails, its output is printed.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 10
CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r\n|\r|\n)")
# Without the fonts that rich fetches from elsewhere: a picture in a repository may load nothing.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what to run; relax is the one beside python"
    )
    arguments = parser.parse_args()
    code, output = run(arguments.command)
    if code:
        sys.stderr.write(output)
        return code
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in screen(output)[-ROWS:]:
        console.print(Text.from_ansi(line), soft_wrap=True)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title=" ".join(arguments.command), code_format=SVG_FORMAT, unique_id="relax")
    arguments.picture.write_text(svg)
    return 0


def run(command: list[str]) -> tuple[int, str]:
    """The command in a terminal of its own: its exit status, and all it wrote."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    beside = Path(sys.executable).parent / command[0]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [str(beside) if beside.is_file() else command[0], *command[1:]],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    written = bytearray()
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(controller)
    return process.wait(), written.decode(errors="replace")


def screen(output: str) -> list[str]:
    """The lines that stand when all is written, colours kept; knows the controls that a live display uses."""
    lines, row, place = [""], 0, 0
    for match in CONTROL.finditer(output):
        lines[row] += output[place : match.start()]
        place = match.end()
        parameters, letter, newline = match.groups()
        if newline and "\n" in newline:
            row += 1
            if row == len(lines):
                lines.append("")
        elif letter == "m":
            lines[row] += match.group()
        elif letter == "A":
            row = max(0, row - int(parameters or 1))
        elif letter == "K":
            lines[row] = ""
    lines[row] += output[place:]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


if __name__ == "__main__":
    sys.exit(main())
