"""Training backends are found by name or import path."""

import pytest
from relax.backends.train.errors import UnknownBackendError
from relax.backends.train.registry import BACKENDS, train_backend
from relax.backends.train.torch_native import TorchNative


def test_a_backend_is_found_by_name_and_by_import_path():
    assert train_backend("torch_native") is TorchNative
    assert train_backend(BACKENDS.entries["torch_native"]) is TorchNative


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch_nativ", r"did you mean 'torch_native'\?: expected one of torch_native"),
        ("xyz", "training backend 'xyz' is not known: expected one of"),
        ("no_such_package.x:Y", "cannot be imported .*No module named 'no_such_package'"),
        ("relax.backends.train.registry:Nothing", "has no attribute 'Nothing'"),
        ("relax.backends.train.registry:BACKENDS", "is a Registry, which cannot be called"),
    ],
)
def test_an_unknown_backend_is_named_with_the_way_out(name, message):
    with pytest.raises(UnknownBackendError, match=message):
        train_backend(name)
