"""The `torch_native` backend: Hugging Face models trained by plain PyTorch, one rank or many (FSDP2)."""

from relax.backends.train.torch_native.trainer import TorchNative

__all__ = ["TorchNative"]
