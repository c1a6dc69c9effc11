"""The row of the padding token in the input embedding, which Hugging Face models do not train."""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor


def keep_untrained(embedding: Any, token: int) -> None:
    """Have a VocabParallelEmbedding give no gradient to `token` where it is read, as `nn.Embedding` does with
    `padding_idx`.

    Its row starts as zeros, so that the norm behind it would make the gradient a thousand times larger than
    any other. A tied output layer trains the row all the same, there as here.
    """

    def without_gradient(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        read = inputs[0] == token  # [batch, tokens]
        if module.reduce_scatter_embeddings:  # the output is [tokens of this rank, batch, hidden]
            size = parallel_state.get_tensor_model_parallel_world_size()
            read = read.transpose(0, 1).chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(read.unsqueeze(-1), output.detach(), output)

    embedding.register_forward_hook(without_gradient)
