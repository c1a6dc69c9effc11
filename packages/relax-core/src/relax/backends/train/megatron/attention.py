"""Attention over packed sequences without Transformer Engine, split over context-parallel ranks or not."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from relax.backends.train.errors import BatchError


class PackedAttention(nn.Module):
    """Softmax attention where a mask says what sees what: the tokens of one row, up to each.

    Context-parallel ranks hold different tokens. Each brings its queries and gathers the keys and values of
    all, whose gradients the backward adds up and scatters again.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **ignored: object
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._contexts = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        **ignored: object,
    ) -> Tensor:
        """[own tokens, 1, local heads x head size] of query [own tokens, 1, local heads, head size].

        Args:
            query: see above.
            key, value: [own tokens, 1, local KV heads, head size].
            attention_mask: bool [1, 1, own tokens, all tokens], True where a query sees a key.
        """
        if attention_mask is None:
            raise BatchError("packed attention was given no mask; every micro-batch has one")
        if self._contexts > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=group) for part in (key, value)
            )
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        seen = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return seen.permute(2, 0, 1, 3).flatten(2).contiguous()
