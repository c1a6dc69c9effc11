"""Rank processes with megatron-core on the CPU, started once, and tiny models of every family."""

import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
VOCABULARY = 101
SECONDS = 240.0
SECONDS_BEHIND = 20.0
"""For an answer of a rank, when another one has failed already and it may wait for that."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if util.find_spec("megatron") is None:
        skip = pytest.mark.skip(reason="megatron-core is not installed (relax-core[megatron])")
        for item in items:
            if HERE in Path(item.path).parents:
                item.add_marker(skip)


class Ranks:
    """Processes of one default process group, each with the shim and the cases."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world = world
        environment = dict(os.environ)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        paths = [str(HERE / "shim"), str(HERE / "processes"), environment.get("PYTHONPATH", "")]
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.logs = [folder / f"rank-{rank}.log" for rank in range(world)]
        self._answers: list[queue.Queue[str | None]] = [queue.Queue() for _ in range(world)]
        self._processes, self._readers = [], []
        script = HERE / "processes" / "serve.py"
        for rank in range(world):
            with self.logs[rank].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, str(script), str(rank), str(world), str(folder / "store")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )  # fmt: skip
            reader = threading.Thread(target=self._read, args=(process, self._answers[rank]), daemon=True)
            reader.start()
            self._processes.append(process)
            self._readers.append(reader)

    def __call__(self, case: str, **arguments: Any) -> list[Any]:
        """The result of a case on every rank; fails the test with what a rank raised."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"case": case, **arguments}) + "\n")
            process.stdin.flush()
        found, faults = [], []
        for rank, answers in enumerate(self._answers):
            # Also behind a fault: what others answer must not be left for the next case.
            try:
                line = answers.get(timeout=SECONDS_BEHIND if faults else SECONDS)
            except queue.Empty:
                faults.append(f"rank {rank} does not answer")
                continue
            answer = {"error": "it ended"} if line is None else json.loads(line)
            if "error" in answer:
                faults.append(f"rank {rank}: {answer['error']}\n{self.logs[rank].read_text()[-3000:]}")
            else:
                found.append(answer["result"])
        if faults:
            pytest.fail("\n".join(faults))
        return found

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()
        for process, reader in zip(self._processes, self._readers, strict=True):
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=30)
            reader.join(timeout=30)

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: "queue.Queue[str | None]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put(None)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, for a module. Not for all: autograd keeps some models of closed ranks, mixtures of experts
    above all, and with them about thirty groups each, whose gloo threads wake a hundred times a second.
    """
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks, for what takes several kinds of parallelism at once."""
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def process_module() -> Callable[[str], Any]:
    """Gives a module of processes/ by its name: what ranks are held against is in the same place."""
    return _process_module


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folders of tiny models with weights far from 0, by family; made once each."""
    made: dict[tuple[Any, ...], str] = {}

    def make(kind: str, *, tied: bool = True, layers: int = 2, **other: Any) -> str:
        key = (kind, tied, layers, *sorted(other.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            _write(folder, kind, tied, layers, other)
            made[key] = str(folder)
        return made[key]

    return make


def _process_module(name: str) -> Any:
    """A module of processes/, which a rank process imports by name."""
    sys.path.insert(0, str(HERE / "processes"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(HERE / "processes"))


def _write(folder: Path, kind: str, tied: bool, layers: int, other: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    if kind.startswith("qwen3"):
        sizes["head_dim"] = 16
    if kind in ("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe_thinker"):
        sizes |= {
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
    maker: Any = AutoModelForCausalLM
    if kind.startswith("qwen3_vl"):
        maker, seeing = AutoModelForImageTextToText, _process_module("seeing")
        sizes = seeing.write_config(kind, sizes, tied, list(other.pop("deepstack", (0, 1))))
    if kind == "qwen3_omni_moe_thinker":
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

        maker = SimpleNamespace(from_config=Qwen3OmniMoeThinkerForConditionalGeneration._from_config)
        hearing = _process_module("hearing")
        deepstack = list(other.pop("deepstack", (0, 1)))
        sizes, other = hearing.write_config({**sizes, **other}, deepstack), {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = maker.from_config(AutoConfig.for_model(kind, **{**sizes, **other}))
        with torch.no_grad():
            for parameter in model.parameters():
                # Larger than the usual initialisation, so that logits are far apart and errors show.
                if parameter.ndim >= 2:
                    parameter.mul_(4.0)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
