"""Workers that belong together, and the nodes they would go to."""

import pytest
from relax.config import resolve
from relax.config.cluster import Node
from relax.orchestration.placement import Bundle, bundles, place
from relax.orchestration.plan import plan


def node(name, gpus, cpus=64):
    return Node(name, cpus, gpus, 80 << 30, 1 << 40)


def planned(**settings):
    content = {"data": {"path": "d.jsonl"}, **settings}
    return plan(resolve(content, {}, "a test"))


def test_a_run_without_gpus_needs_no_bundles():
    assert bundles(planned()) == ()


def test_ranks_of_a_tensor_parallel_group_are_one_bundle_and_every_server_is_one():
    resolved = planned(
        actor={"backend": "megatron", "device": "cuda", "tensor_parallel": 2, "data_parallel": 2},
        rollout={"engine": "sglang", "replicas": 2, "sglang": {"tensor_parallel": 4}},
        algorithm={"kl_coef": 0.01},
        ray={"cpus_per_worker": 1},
    )
    assert bundles(resolved) == (
        Bundle("actor", ("actor", "actor-1"), 2, 2),
        Bundle("actor", ("actor-2", "actor-3"), 2, 2),
        Bundle("rollout", ("engine-0",), 1, 4),
        Bundle("rollout", ("engine-1",), 1, 4),
        Bundle("reference", ("reference", "reference-1"), 2, 2),
        Bundle("reference", ("reference-2", "reference-3"), 2, 2),
    )
    assert sum(role.gpus for role in resolved.roles) == 16


def test_roles_that_take_turns_share_the_gpus_of_the_trainer():
    resolved = planned(
        mode="colocate",
        actor={"device": "cuda", "data_parallel": 2},
        rollout={"engine": "transformers", "device": "cuda", "replicas": 2},
    )
    (shared,) = bundles(resolved)
    assert shared.workers == ("actor", "actor-1", "rollout", "engine-0", "engine-1")
    assert shared.gpus == 2


@pytest.mark.parametrize(
    ("rollout", "gpus"),
    [
        ({"engine": "transformers"}, 0),
        ({"engine": "transformers", "device": "cuda"}, 1),
        ({"engine": "sglang", "sglang": {"device": "cpu"}}, 0),
        ({"engine": "sglang", "sglang": {"tensor_parallel": 2}}, 2),
        ({"engine": "sglang", "sglang": {"urls": ["http://a:1"], "tensor_parallel": 2}}, 0),
    ],
)
def test_what_an_engine_reserves(rollout, gpus):
    resolved = planned(actor={"device": "cuda"}, rollout={"replicas": 1, **rollout})
    role = next(role for role in resolved.roles if role.name == "rollout")
    assert role.gpus_of("engine-0") == gpus
    assert role.gpus_of("rollout") == 0


def test_the_largest_come_first_and_a_role_stays_together():
    wanted = [Bundle("rollout", (f"engine-{n}",), 1, 2) for n in range(4)]
    wanted += [Bundle("actor", tuple(f"a{n}{m}" for m in range(4)), 4, 4) for n in range(2)]
    placed, left = place(wanted, [node("a", 8), node("b", 8)])
    assert left == []
    assert [{bundle.role for bundle in at.bundles} for at in placed] == [{"actor"}, {"rollout"}]
    assert [at.free_gpus for at in placed] == [0, 0]


def test_what_fits_into_a_gap_is_put_there():
    placed, left = place(
        [Bundle("actor", ("a",), 1, 6), Bundle("rollout", ("e",), 1, 2)], [node("a", 8), node("b", 8)]
    )
    assert left == []
    assert [len(at.bundles) for at in placed] == [2, 0]


def test_what_no_node_has_room_for_is_told():
    wide = Bundle("actor", ("a",), 1, 8)
    hungry = Bundle("rollout", ("e",), 65, 1)
    placed, left = place([wide, hungry], [node("a", 4), node("b", 4)])
    assert left == [wide, hungry]
    assert [at.bundles for at in placed] == [[], []]
