"""Makes megatron-core run without CUDA. Tests only: a rank process has this folder on its PYTHONPATH.

megatron-core speaks to `torch.cuda` throughout. Where there is no GPU, "the current CUDA device" is taken to
be the CPU. Nothing happens until somebody imports `megatron.core`, so that other processes pay nothing.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec


class _BeforeMegatron:
    """Changes torch before `megatron.core` is imported, and one function of it before its user binds it."""

    _DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "megatron.core":
            import cuda_as_cpu

            cuda_as_cpu.install()
        elif name == self._DISPATCHER:
            import cuda_as_cpu

            sys.meta_path.remove(self)
            cuda_as_cpu.splits_as_numpy(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
        return None


sys.meta_path.insert(0, _BeforeMegatron())
