"""The norm worked out by hand is that of transformers, forward and backward."""

import pytest
import torch
from relax.backends.models import build_model
from relax.backends.train.rms_norm import rms_norm, use_fused_norms
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def test_its_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_it_equals_the_module_of_transformers(scale):
    torch.manual_seed(0)
    module = Qwen3RMSNorm(16)
    torch.nn.init.normal_(module.weight)
    x = (scale * torch.randn(4, 7, 16)).requires_grad_()
    # Attention hands back a gradient that is laid out otherwise.
    upstream = torch.randn(4, 16, 7).transpose(1, 2)
    outputs = (module(x), rms_norm(x, module.weight, module.variance_epsilon))
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(out, (x, module.weight), upstream) for out in outputs]
    for plain, ours in zip(*gradients, strict=True):
        assert float((plain - ours).abs().max()) <= 1e-6 * max(1.0, float(plain.abs().max()))


def test_a_model_keeps_its_names_and_its_logits(text_folder):
    plain, fused = build_model(text_folder), build_model(text_folder)
    layers = plain.config.num_hidden_layers
    assert use_fused_norms(fused) == 4 * layers + 1
    assert fused.state_dict().keys() == plain.state_dict().keys()
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(fused(tokens).logits, plain(tokens).logits)


def test_other_dtypes_keep_their_norms(text_folder):
    assert use_fused_norms(build_model(text_folder, torch.float64)) == 0
