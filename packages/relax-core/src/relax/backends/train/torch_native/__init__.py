"""The `torch_native` backend: Hugging Face models trained by plain PyTorch, on one rank or on many (FSDP2)."""

from relax.backends.train.torch_native.trainer import TorchNative

__all__ = ["TorchNative"]
