"""The weights that every side moves: a Qwen3's names and shapes, to a size, known again by a number."""

import math

import numpy as np
import torch
import xxhash
from queue_sides.buffers import touched

LAYERS = 36
"""As Qwen3-4B has: 398 tensors."""
MANY_LAYERS = 138
"""1,520 tensors."""
ALIGNMENT = 64
_TILE = 13_000_002
"""Bytes of the random pattern: no multiple of a chunk, so that chunks in the wrong place show."""
_EMBEDDING_SHARE = 0.1
_SEED = 4


def shapes(nbytes: int, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes, in bfloat16, of a Qwen3 with Qwen3-4B's proportions: about `nbytes` in all, but no
    less than the smallest such model has.
    """
    # A layer has 15.4 hidden^2 elements: 32 query heads and 8 key-value heads of hidden / 20, and 3.8 hidden.
    hidden = max(40, 40 * round(math.sqrt((1 - _EMBEDDING_SHARE) * nbytes / 2 / layers / 15.4) / 40))
    head, wide = hidden // 20, int(3.8 * hidden)
    layer = {
        "self_attn.q_proj.weight": (32 * head, hidden),
        "self_attn.k_proj.weight": (8 * head, hidden),
        "self_attn.v_proj.weight": (8 * head, hidden),
        "self_attn.o_proj.weight": (hidden, 32 * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    found: dict[str, tuple[int, ...]] = {
        f"model.layers.{at}.{name}": shape for at in range(layers) for name, shape in layer.items()
    }
    rest = nbytes - 2 * sum(math.prod(shape) for shape in found.values())
    found["model.embed_tokens.weight"] = (max(1, rest // 2 // hidden // 64) * 64, hidden)
    found["model.norm.weight"] = (hidden,)
    return found


class Payload:
    """Weights in memory that is there, each tensor a view of it.

    Args:
        nbytes: about how many.
        layers: of the model.

    Attributes:
        tensors: bfloat16, by name.
        flat: all of it, bfloat16 ``[n]``, in the order of the names.
        nbytes: of all tensors.
    """

    def __init__(self, nbytes: int, layers: int = LAYERS) -> None:
        sizes = shapes(nbytes, layers)
        starts, end = {}, 0
        for name, shape in sizes.items():
            starts[name] = end
            end += -(-2 * math.prod(shape) // ALIGNMENT) * ALIGNMENT
        memory = touched(end)
        memory[:] = np.resize(np.frombuffer(np.random.default_rng(_SEED).bytes(_TILE), np.uint8), end)
        memory[1::2] &= 0xBF  # no exponent of infinity or NaN
        self.flat = torch.from_numpy(memory).view(torch.bfloat16)
        self.tensors = {
            name: self.flat[starts[name] // 2 :][: math.prod(shape)].view(shape)
            for name, shape in sizes.items()
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def stamp(self, version: int) -> None:
        """Write the number into the first element of every tensor."""
        for tensor in self.tensors.values():
            bits(tensor)[0] = version


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as int16 ``[n]``."""
    return tensor.view(torch.int16).view(-1)


def stamps(tensors: dict[str, torch.Tensor]) -> set[int]:
    """The numbers that `stamp` wrote: one, unless versions are mixed."""
    return {int(bits(tensor)[0]) for tensor in tensors.values()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of every bit, in the order of the names."""
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(bits(tensors[name]).numpy().data)
    return whole.hexdigest()
