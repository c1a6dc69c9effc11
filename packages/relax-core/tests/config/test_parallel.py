"""How the trainer may be split over ranks, and which splits are refused in words."""

import pytest
from relax.config import ConfigError, check
from relax.config.parallel import ParallelSettings, parallel_faults
from relax.orchestration.plan import plan


def test_ranks_are_the_product_without_experts():
    split = ParallelSettings(
        data_parallel=2, tensor_parallel=3, pipeline_parallel=5, context_parallel=7, expert_parallel=2
    )
    assert (split.ranks, split.model_ranks) == (210, 105)


@pytest.mark.parametrize(
    ("backend", "split", "expected"),
    [
        (
            "torch_native",
            {"tensor_parallel": 2},
            "actor.tensor_parallel = 2 with actor.backend = torch_native",
        ),
        ("torch_native", {"expert_parallel": 2}, "knows data_parallel only"),
        ("megatron", {"virtual_pipeline": 2}, "interleaved between pipeline ranks"),
        ("megatron", {"expert_parallel": 4, "tensor_parallel": 2}, "does not divide the 2 ranks"),
    ],
)
def test_splits_that_cannot_work_are_named(backend, split, expected):
    (fault,) = parallel_faults(backend, ParallelSettings(**split))
    assert expected in fault


def test_splits_that_work_are_not():
    assert not list(parallel_faults("torch_native", ParallelSettings(data_parallel=8)))
    split = ParallelSettings(tensor_parallel=2, data_parallel=2, expert_parallel=4, pipeline_parallel=2)
    assert not list(parallel_faults("megatron", split))


def test_a_run_refuses_a_split_and_an_adapter_that_cannot_travel(config):
    with pytest.raises(ConfigError, match=r"actor\.context_parallel = 2"):
        check(config("actor.context_parallel=2", "data.answer_column=a"))
    with pytest.raises(ConfigError, match=r"actor\.lora\.sync = adapter with 2 ranks"):
        check(
            config(
                "actor.lora.rank=2",
                "actor.lora.sync=adapter",
                "actor.data_parallel=2",
                "data.answer_column=a",
            )
        )


def test_ranks_are_workers_of_the_actor_and_reserve_what_they_need(config):
    resolved = plan(config("actor.data_parallel=3", "launcher=ray", "actor.device=cuda"))
    actor = resolved.roles[0]
    assert (actor.workers, actor.ranks) == (("actor",), ("actor-1", "actor-2"))
    assert actor.gpus == 3
    assert actor.cpus == pytest.approx(0.05 + 3 * 0.2)
    assert "actor, actor-1, actor-2" in str(next(iter(resolved.table().columns[1].cells)))
