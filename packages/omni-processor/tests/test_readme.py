"""The README's examples run as they are printed."""

import re
from pathlib import Path


def test_readme_examples_run_and_print_what_their_comments_say(capsys):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(.*\)  # (.*)", "".join(blocks))
    assert len(promised) == len(printed)
    refused = promised.index("how to go on instead")
    assert "https:// is not fetched here" in printed[refused]
    assert printed[:refused] + printed[refused + 1 :] == promised[:refused] + promised[refused + 1 :]
