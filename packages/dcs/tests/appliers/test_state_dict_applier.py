"""New weights in place: whole or not at all, and nothing before the checks."""

import threading

import dcs
import pytest
import torch
from dcs.appliers import Prefixed, Renamed, StateDictApplier
from torch import nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def filled(module: nn.Module, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in module.state_dict().items()}


def test_parameters_and_buffers_are_overwritten_where_they_are(version) -> None:
    module = Tied()
    applier = StateDictApplier(module)
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    wanted = filled(module, 3)
    del wanted["head.weight"]
    applier(version(7, wanted))
    assert all((tensor == 3).all() for tensor in module.state_dict().values())
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == places
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.requires_grad
    assert applier.last is not None
    assert (applier.last.version, applier.last.nbytes) == (7, sum(t.nbytes for t in wanted.values()))
    assert 0 < applier.last.pause_seconds <= applier.last.seconds


def test_tied_tensors_are_in_the_layout_once_under_the_first_name() -> None:
    names = [spec.name for spec in StateDictApplier(Tied()).layout.tensors]
    assert "embed.weight" in names
    assert "head.weight" not in names


def test_a_version_whose_autograd_history_is_alive_can_be_applied(version) -> None:
    layer = nn.Linear(3, 2, bias=False)
    loss = layer(torch.ones(3)).sum()
    loss.backward()
    StateDictApplier(layer)(version(1, {"weight": torch.zeros(2, 3)}))
    assert not layer.weight.any()
    assert layer.weight.is_leaf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, r"'b' of version 1 is absent, but the target takes float32\[3\]"),
        ({"b": torch.zeros(4)}, r"'b' of version 1 is float32\[4\], but the target takes float32\[3\]"),
        ({"b": torch.zeros(3, dtype=torch.float64)}, r"float64\[3\]"),
        ({"c": torch.zeros(1)}, r"'c' of version 1 is float32\[1\], but the target takes absent"),
        ({"b": torch.zeros(3).to_sparse()}, "'b' is torch.sparse_coo"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_touched(change, message, version) -> None:
    target = {"a": torch.ones(2), "b": torch.ones(3)}
    applier = StateDictApplier(target)
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3)} | change
    with pytest.raises(dcs.LayoutMismatch, match=message):
        applier(version(1, {name: tensor for name, tensor in tensors.items() if tensor is not None}))
    assert target["a"].all()
    assert applier.usable
    applier(version(2, {"a": torch.zeros(2), "b": torch.zeros(3)}))
    assert not target["a"].any()


def test_another_dtype_is_cast_only_when_asked(version) -> None:
    target = {"w": torch.zeros(4), "n": torch.zeros(2, dtype=torch.int64)}
    published = {"w": torch.arange(4).bfloat16(), "n": torch.ones(2, dtype=torch.int64)}
    with pytest.raises(dcs.LayoutMismatch, match="bfloat16"):
        StateDictApplier(target)(version(1, published))
    applier = StateDictApplier(target, dtype=torch.bfloat16)
    assert applier.layout == dcs.layout.of(published)
    applier(version(1, published))
    assert target["w"].tolist() == [0, 1, 2, 3]
    assert target["n"].tolist() == [1, 1]


class Faulty(torch.Tensor):
    """Copies into nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            raise RuntimeError("the device fell off the bus")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_error_in_the_middle_makes_it_unusable(version) -> None:
    target = {"a": torch.ones(2), "b": torch.ones(3).as_subclass(Faulty)}
    applier = StateDictApplier(target)
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(dcs.ApplyFailed, match=r"version 1 failed half way.*fell off the bus"):
        applier(version(1, tensors))
    assert not applier.usable
    assert applier.last is None
    with pytest.raises(dcs.ApplyFailed, match="earlier version failed"):
        applier(version(2, tensors))


def test_the_lock_is_held_while_copying_and_not_while_checking(version) -> None:
    lock = threading.Lock()
    applier = StateDictApplier({"a": torch.ones(2)}, lock=lock)
    with lock:
        with pytest.raises(dcs.LayoutMismatch):
            applier(version(1, {}))
        copying = threading.Thread(target=applier, args=[version(1, {"a": torch.zeros(2)})])
        copying.start()
        copying.join(0.1)
        assert copying.is_alive()
    copying.join(10.0)
    assert applier.last is not None
    assert not lock.locked()


def test_published_names_may_differ(version) -> None:
    target = {"a": torch.ones(2), "b": torch.ones(3)}
    applier = StateDictApplier(target, names=Prefixed(published_prefix="policy."))
    assert [spec.name for spec in applier.layout.tensors] == ["policy.a", "policy.b"]
    applier(version(1, {"policy.a": torch.zeros(2), "policy.b": torch.zeros(3)}))
    assert not target["b"].any()


def test_a_layout_with_pieces_is_taken_when_it_is_the_targets() -> None:
    target = {"w": torch.zeros(2, 3)}
    given = dcs.layout.of(target)
    assert StateDictApplier(target, layout=given).layout is given
    with pytest.raises(dcs.LayoutMismatch, match="not the target's"):
        StateDictApplier(target, layout=dcs.layout.of({"w": torch.zeros(3, 3)}))


def test_a_target_without_storage_is_refused() -> None:
    with pytest.raises(dcs.LayoutMismatch, match="meta device"):
        StateDictApplier(nn.Linear(2, 2, device="meta"))


def test_views_of_one_tensor_that_differ_are_no_ties(version) -> None:
    whole = torch.zeros(2, 4)
    applier = StateDictApplier({"left": whole[:, :2], "right": whole[:, 2:], "rows": whole[:1]})
    assert len(applier.layout.tensors) == 3
    applier(
        version(
            1, {"left": torch.ones(2, 2), "right": torch.full((2, 2), 2.0), "rows": torch.full((1, 4), 3.0)}
        )
    )
    assert whole.tolist() == [[3, 3, 3, 3], [1, 1, 2, 2]]


def test_renaming_is_one_to_one() -> None:
    names = Renamed({"wte": "embed", "wpe": "positions"})
    for name in ("wte", "wpe", "lm_head"):
        assert names.published(names.engine(name)) == name
    with pytest.raises(ValueError, match="shares its name"):
        Renamed({"a": "x", "b": "x"})
    with pytest.raises(ValueError, match=r"does not begin with 'policy\.'"):
        Prefixed(published_prefix="policy.").engine("critic.a")
