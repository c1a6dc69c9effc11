"""RMSNorm for layers without Transformer Engine, which also knows sequence parallelism."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight (Zhang and Sennrich, 2019), over the last dimension.

    The mean of squares is taken in float32, as Hugging Face's Llama and Qwen do.

    Megatron's own wrapper of torch's norm refuses sequence parallelism. All that is needed for it is the mark
    on the weight: its gradient then is a part, which `finalize_model_grads` adds up over tensor ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron finds the parameters whose gradients are parts by this attribute.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        whole = functional.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        return self.weight * whole.to(x.dtype)
