"""torch.cuda as megatron-core uses it, on a CPU. See sitecustomize.py beside this file."""

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like",
              "zeros_like", "ones_like", "as_tensor", "linspace", "randint")  # fmt: skip


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> "_Event":
        return _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _TheGenerator:
    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def install() -> None:
    """Change torch for this process, once; does nothing where there is a GPU."""
    if torch.cuda.is_available() or getattr(torch.cuda, "_is_the_cpu", False):
        return
    # What `torch.device("meta")` and its kin apply to is looked up once, and has to be torch's own functions.
    _device_constructors()
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda._is_the_cpu = True
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *args: None
    cuda.device = lambda *args: contextlib.nullcontext()
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = lambda *args: stream
    cuda.default_stream = lambda *args: stream
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = cuda.manual_seed
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.get_device_capability = lambda *args: (0, 0)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.default_generators = _TheGenerator()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    own_type = torch.Tensor.type

    def type_on_cuda(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return own_type(self, dtype, **kwargs)
        return own_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_on_cuda  # type: ignore[method-assign]
    own_to: Any = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **kwargs: own_to(  # type: ignore[method-assign]
        self,
        *(_CPU if _is_cuda(a) else a for a in args),
        **{k: _CPU if k == "device" and _is_cuda(v) else v for k, v in kwargs.items()},
    )
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def splits_as_numpy(moe_utils: ModuleType) -> None:
    """The all-to-all of experts wants the sizes of its parts as numpy arrays, as on a GPU."""
    own = moe_utils.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return own(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = moved  # type: ignore[attr-defined]


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return made
