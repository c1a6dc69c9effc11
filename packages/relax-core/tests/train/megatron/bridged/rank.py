"""One rank of a model that megatron-bridge maps: rank.py RANK WORLD STORE FOLDER OUT ACTOR

megatron-bridge imports Transformer Engine, which needs CUDA. What it takes from it when it is imported is
replaced by empty classes here, after megatron-core has been imported without it.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed


class Hollow(ModuleType):
    """A module in which every name is a module, or with a capital an empty torch module."""

    __version__ = "2.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class HollowEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Transformer Engine where there is none."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        made = Hollow(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: ModuleType) -> None: ...


def main(rank: int, world: int, store: str, folder: Path, out: Path, actor: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from relax.backends.train.megatron import bridge  # megatron-core comes with it

    sys.meta_path.insert(0, HollowEngine())
    importlib.import_module("megatron.bridge")
    from relax.algorithms.spec import LossInputs, LossOutputs
    from relax.backends.train.conformance import make_rows, pack
    from relax.backends.train.ranks import RankSpec
    from relax.backends.train.settings import TrainerSettings
    from relax.config.roles import ActorSettings
    from safetensors.torch import save_file

    def loss(inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        mask = inputs.mask.to(ratio.dtype)
        return LossOutputs(loss=-(mask * inputs.advantages * ratio).sum(), count=float(mask.sum()))

    settings = TrainerSettings(lr=1e-3, temperature=0.9)
    spec = RankSpec(folder, settings, ActorSettings.model_validate({"backend": "megatron", **actor}))
    made = bridge.megatron_rank(spec)
    assert type(made) is bridge.BridgedRank
    work = [pack(make_rows(97, [(3, 7), (8, 2), (1, 12)], seed)) for seed in range(2)]
    at = made.coordinates
    own = work[at.data_rank :: at.data_size]

    def told(name: str) -> None:
        scores = made.forward(own)
        if scores is not None:
            save_file({f"{at.data_rank}.{i}": part for i, part in enumerate(scores)}, out / f"{name}.{rank}")

    told("before")
    save_file(dict(made.tensors()), out / f"published.{rank}")
    layout = made.layout()
    assert {one.name: one.shape for one in layout.tensors} == {
        name: tuple(tensor.shape) for name, tensor in made.tensors()
    }
    outputs = made.forward_backward(own, loss)
    stats = made.optim_step(1 / 40)
    made.export(out / "export")
    made.save(out / "state")
    told("after")
    made.forward_backward(own, loss)
    made.optim_step(1 / 40)
    made.load(out / "state")
    told("loaded")
    (out / f"told.{rank}.json").write_text(
        json.dumps({"loss": None if outputs is None else float(outputs.loss), "norm": stats.grad_norm})
    )
    made.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        Path(sys.argv[5]),
        json.loads(sys.argv[6]),
    )
