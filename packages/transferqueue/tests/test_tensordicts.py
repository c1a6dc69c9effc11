"""TensorDicts in, TensorDicts out."""

from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.values import frame
from transferqueue.values.encode import plan_fields
from transferqueue.values.restoring import restore, to_tensordict


def sent(fields: dict[str, Any], shared: dict[str, Any] | None = None) -> dict[str, tq.Column]:
    """Through a frame in memory that nobody may write."""
    header, payload = frame.encode(*plan_fields(fields, shared))
    return frame.decode(header, payload.tobytes())


def torch_module() -> Any:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def same(got: Any, want: Any) -> bool:
    """Tensors equal with dtype and shape."""
    return all(
        (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
        for one, other in zip(got, want, strict=True)
    )


def test_a_tensordict_comes_back_equal() -> None:
    torch = torch_module()
    tensordict = pytest.importorskip("tensordict")
    jagged = torch.nested.nested_tensor(
        [torch.arange(2), torch.arange(3), torch.arange(1)], layout=torch.jagged
    )
    batch = tensordict.TensorDict(
        {
            "tokens": jagged,
            "reward": torch.randn(3),
            "half": torch.randn(3, 4).to(torch.bfloat16),
            "text": ["a", "b", "c"],
            "constant": "same",
            "info": tensordict.NonTensorStack({"x": 1}, {"x": 2}, {"x": 3}),
            "obs": tensordict.TensorDict(
                {"image": torch.ones(3, 5, 2), "deep": {"er": torch.zeros(3, 5, 1, dtype=torch.int8)}}, [3, 5]
            ),
        },
        [3],
    )
    columns = sent(batch)
    assert "obs/deep/er" in columns
    for got in (restore(columns), to_tensordict(columns)):
        assert type(got) is tensordict.TensorDict
        assert got.batch_size == batch.batch_size
        assert got["obs"].batch_size == batch["obs"].batch_size
        assert set(got.keys(True, True)) == set(batch.keys(True, True))
        assert got["tokens"].layout == jagged.layout
        assert same(got["tokens"].unbind(), jagged.unbind())
        assert type(got.get("text")) is type(batch.get("text"))
        assert type(got.get("constant")) is type(batch.get("constant"))
        assert got["text"] == ["a", "b", "c"]
        assert got["info"] == [{"x": 1}, {"x": 2}, {"x": 3}]
        rest = [got.exclude("tokens"), batch.exclude("tokens")]
        assert bool((rest[0] == rest[1]).all())
    part = restore({name: column.slice(1, 3) for name, column in columns.items()})
    assert part["obs"].batch_size == torch.Size([2, 5])
    assert part["constant"] == "same"


def test_a_tensordict_inside_a_dict_and_any_columns_as_a_tensordict() -> None:
    torch = torch_module()
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"x": torch.ones(2, 3)}, [2])
    columns = sent({"td": inner, "l": [np.arange(2), np.arange(3)], "n": [1, None], "s": np.ones((2, 2))})
    got = restore(columns)
    assert type(got) is dict
    assert type(got["td"]) is tensordict.TensorDict
    made = to_tensordict(columns)
    assert made.batch_size == torch.Size([2])
    assert made["l"].is_nested
    assert made["n"] == [1, None]
    assert made["s"].dtype == torch.float64
    with pytest.raises(tq.InvalidArgument, match="no columns"):
        to_tensordict({})
    with pytest.raises(tq.InvalidArgument, match="batch dimensions"):
        plan_fields(tensordict.TensorDict({"x": torch.ones(2)}, []))


def test_lazily_stacked_tensordicts_go_in() -> None:
    torch = torch_module()
    tensordict = pytest.importorskip("tensordict")
    rows = [
        tensordict.TensorDict({"a": torch.ones(n), "b": torch.ones(2), "s": f"row {n}"}, []) for n in (2, 3)
    ]
    got = restore(sent(tensordict.LazyStackedTensorDict(*rows)))
    assert same(got["a"].unbind(), [torch.ones(2), torch.ones(3)])
    assert same([got["b"]], [torch.ones(2, 2)])
    assert got["s"] == ["row 2", "row 3"]
