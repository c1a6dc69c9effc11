"""torch_native holds what every training backend has to, on a text and on a vision model."""

import pytest
from relax.backends.train import conformance
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative


@pytest.mark.parametrize("kind", ["text", "vision"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_torch_native(check, kind, request, tmp_path):
    folder = request.getfixturevalue(f"{kind}_folder")
    check(lambda model, settings: TorchNative(model, settings=settings), folder, tmp_path)


def test_a_backend_that_forgets_the_temperature_is_caught(text_folder, tmp_path):
    def forgetful(model, settings):
        plain = TrainerSettings(lr=settings.lr)
        return TorchNative(model, settings=plain)

    with pytest.raises(AssertionError, match="logprobs differ"):
        conformance.logprobs_equal_plain_transformers(forgetful, text_folder, tmp_path)


def test_a_backend_whose_state_is_no_copy_is_caught(text_folder, tmp_path):
    def sharing(model, settings):
        backend = TorchNative(model, settings=settings)
        copying = backend.state

        def state():
            tree = copying()
            tree.tensors |= {f"weight.{name}": tensor for name, tensor in backend.tensors()}
            return tree

        backend.state = state
        return backend

    with pytest.raises(AssertionError, match="largest differences"):
        conformance.a_state_is_a_copy(sharing, text_folder, tmp_path)
