"""FSDP2 ranks read their own shards of a folder's weights, and never hold a whole model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from relax.backends.models import build_model
from relax.backends.tiny import write_tiny
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.hollow import hollow_model
from relax.backends.train.torch_native.masters import local

LENGTHS = [(3, 7), (8, 2), (1, 12), (5, 5)]


def batch(seed: int = 0):
    return pack(make_rows(60, LENGTHS, seed))


def folder_of(place: Path, kind, **sizes) -> Path:
    write_tiny(place, kind, max_position_embeddings=128, **sizes)
    build_model(place, seed=5).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("hollow") / "moe", "qwen3_moe")


def trained(gang):
    return gang._own.backend._trainer


def file_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in build_model(folder).state_dict().values())


@pytest.mark.parametrize("lora", [0, 4], ids=["all of it", "adapters"])
@pytest.mark.slow
def test_a_rank_reads_its_own_shards_and_computes_as_one_that_read_all(start, experts_folder, loss, lora):
    actor = {"lora": {"rank": lora, "targets": ["q_proj", "v_proj", "o_proj"]}} if lora else {}
    with start(experts_folder, data_parallel=2, **actor) as gang:
        ours = gang.forward(batch())
        read, held = trained(gang).bytes_read, [local(part) for _, part in trained(gang).base_tensors()]
        outputs = gang.forward_backward(batch(), loss)
        norm = gang.optim_step(1 / outputs.count).grad_norm
    alone = TorchNative(experts_folder, settings=TrainerSettings(lr=1e-3, temperature=0.8))
    torch.testing.assert_close(ours, alone.forward(batch()), rtol=0, atol=1e-5)
    assert read == sum(part.nbytes for part in held)
    assert read < 0.6 * file_bytes(experts_folder)
    if not lora:
        outputs = alone.forward_backward(batch(), loss)
        assert norm == pytest.approx(alone.optim_step(1 / outputs.count).grad_norm, rel=1e-5)


def test_a_hollow_model_has_shapes_and_no_memory(experts_folder, text_folder):
    for folder in (experts_folder, text_folder):
        hollow, whole = hollow_model(folder, torch.bfloat16), build_model(folder, torch.bfloat16)
        assert hollow is not None
        theirs = dict(whole.named_parameters())
        for name, parameter in hollow.named_parameters():
            assert (parameter.shape, parameter.dtype) == (theirs[name].shape, theirs[name].dtype), name
            assert parameter.untyped_storage().nbytes() == parameter.element_size()
        buffers = dict(whole.named_buffers())
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in hollow.named_buffers())


def test_what_cannot_be_read_by_shards_is_left_to_a_whole_load(text_folder, tmp_path):
    write_tiny(tmp_path / "drawn", "qwen3")
    assert hollow_model(tmp_path / "drawn", torch.float32) is None, "no weights: they are drawn from a seed"
    foreign = folder_of(tmp_path / "foreign", "qwen3")
    config = json.loads((foreign / "config.json").read_text())
    for layers in (1, 3):  # tensors that the model does not have, or the files
        other = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        (foreign / "config.json").write_text(json.dumps(config | other))
        assert hollow_model(foreign, torch.float32) is None


PEAK = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from relax.backends.train.torch_native import hollow
from relax.backends.train.torch_native.policy import load_model
folder, how = Path(sys.argv[1]), sys.argv[2]
from relax.backends.models import build_model
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
import transformers.models.qwen3.modeling_qwen3
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
if how == "whole":
    load_model(folder, torch.float32, 0, torch.device("cpu"))
else:
    assert hollow.hollow_model(folder, torch.float32) is not None
print(peak() - before)
"""


@pytest.mark.slow
def test_what_a_rank_holds_before_it_is_sharded_is_next_to_nothing(tmp_path):
    """Resident MB beyond the imports, for 130 MB of float32 weights."""
    folder = folder_of(
        tmp_path / "larger", "qwen3", hidden_size=512, intermediate_size=2048, num_hidden_layers=8
    )
    grown = {}
    for how in ("whole", "hollow"):
        told = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder), how],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        grown[how] = float(told.stdout)
    size = file_bytes(folder) / (1 << 20)
    assert grown["whole"] > 0.9 * size, (grown, size)
    assert grown["hollow"] < 0.25 * size, (grown, size)
