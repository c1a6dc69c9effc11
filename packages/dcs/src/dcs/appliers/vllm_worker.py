"""What runs inside vLLM's workers: `vllm serve ... --worker-extension-cls
dcs.appliers.vllm_worker.DcsWorkerExtension`.

vLLM mixes this class into its own worker class, so `self` has the worker's `model_runner`.
"""

from typing import Any

from dcs.appliers.checkpoint import read


class DcsWorkerExtension:
    """Adds one method to a vLLM worker; `VllmApplier` calls it on all of them through `collective_rpc`."""

    model_runner: Any

    def dcs_load_weights(self, file: str, version: int) -> dict[str, int]:
        """Load a safetensors file into this worker's shard of the model, in place.

        Returns the version and how many parameters vLLM says it has set. Raises what vLLM raises for
        weights that do not fit.
        """
        loaded = self.model_runner.model.load_weights(read(file))
        return {"version": version, "loaded": len(loaded or ())}
