"""A state outlives its process."""

import subprocess
import sys

import pytest
import torch
from relax.backends.train.state_files import read_state

PROGRAM = """
import sys
from pathlib import Path
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.state_files import read_state, write_state
from relax.backends.train.torch_native import TorchNative

folder, start, first, last, out = sys.argv[1:]
settings = TrainerSettings(lr=3e-3, lr_schedule="cosine", warmup_steps=2, total_steps=8)
trainer = TorchNative(folder, settings=settings)
if start:
    trainer.load_state(read_state(start))
for step in range(int(first), int(last)):
    trainer.forward_backward(pack(make_rows(102, [(3, 7), (8, 2), (1, 12)], seed=step)), policy_gradient)
    trainer.optim_step(0.1)
write_state(out, trainer.state())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_steps_and_three_in_a_new_process_equal_six(text_folder, tmp_path):
    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, timeout=280)

    run(str(text_folder), "", "0", "6", str(tmp_path / "six"))
    run(str(text_folder), "", "0", "3", str(tmp_path / "three"))
    run(str(text_folder), str(tmp_path / "three"), "3", "6", str(tmp_path / "resumed"))
    whole, resumed = read_state(tmp_path / "six"), read_state(tmp_path / "resumed")
    assert whole.data == resumed.data
    assert whole.tensors.keys() == resumed.tensors.keys()
    differ = [
        name for name, tensor in whole.tensors.items() if not torch.equal(tensor, resumed.tensors[name])
    ]
    assert not differ
