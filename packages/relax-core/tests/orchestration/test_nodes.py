"""Nodes that are started for one run: all of them, each once, with the same code and words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax.config import ConfigError, check
from relax.orchestration.nodes import CODE, RANK, WORDS, await_nodes, labels_of

Node = dict[str, Any]


def node(rank: int | None, *, alive: bool = True, code: str = "c", words: str = "w") -> Node:
    """As `ray.nodes()` has it; the last number of its address is 10 + rank."""
    labels = {} if rank is None else {RANK: str(rank), CODE: code, WORDS: words}
    return {"NodeManagerAddress": f"10.0.0.{10 + (rank or 0)}", "Alive": alive, "Labels": labels}


def looks(*rounds: list[Node]) -> Callable[[], list[Node]]:
    """The nodes at each look; the last round stays."""
    left = list(rounds)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_nodes_that_join_one_after_the_other_are_waited_for(monkeypatch):
    monkeypatch.setattr("relax.orchestration.nodes.LOOK_SECONDS", 0.0)
    await_nodes(looks([node(0)], [node(0), node(2)], [node(0), node(2), node(1)]), 3, 60)


def test_a_cluster_of_somebody_elses_is_only_counted():
    await_nodes(looks([node(None), node(None)]), 2, 0)
    with pytest.raises(
        ConfigError, match=r"within 0 s \(ray.start_seconds\) 2 of 3 nodes \(ray.nodes\) had joined; "
    ):
        await_nodes(looks([node(None), node(None)]), 3, 0)


@pytest.mark.parametrize(
    ("nodes", "count", "message"),
    [
        ([node(0), node(2)], 4, "2 of 4 nodes .* had joined: no node of rank 1, 3; look at what"),
        (
            [node(0), node(1, alive=False)],
            2,
            r"no node of rank 1 \(rank 1 at 10.0.0.11 had joined and left\)",
        ),
        ([node(0), node(1), node(1)], 3, "NODE_RANK = 1: two nodes have it, 10.0.0.11 and 10.0.0.11"),
        (
            [node(0), node(1, code="d")],
            2,
            r"rank 1 \(10.0.0.11\) has other code .* than that of rank 0 \(10.0.0.10\)",
        ),
        ([node(1, words="v"), node(0)], 2, "rank 1 .* has another configuration or other words"),
    ],
)
def test_what_is_wrong_with_nodes_is_named(nodes, count, message):
    with pytest.raises(ConfigError, match=message):
        await_nodes(looks(nodes), count, 0)


def test_a_node_that_was_replaced_is_not_missing():
    await_nodes(looks([node(0), node(1, alive=False), node(1)]), 2, 0)


def test_labels_are_those_of_the_words_and_the_file(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("steps: 1")
    first = labels_of(0, file, ["actor.lr=1"])
    assert labels_of(3, file, ["actor.lr=1"]) == first | {RANK: "3"}
    assert labels_of(0, file, ["actor.lr=2"])[WORDS] != first[WORDS]
    file.write_text("steps: 2")
    assert labels_of(0, file, ["actor.lr=1"])[WORDS] != first[WORDS]
    with pytest.raises(ConfigError, match=r"none\.yaml: it cannot be read"):
        labels_of(0, tmp_path / "none.yaml", [])


def test_code_that_differs_by_a_character_is_other_code(tmp_path: Path, monkeypatch):
    package = tmp_path / "ours_in_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("A = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("relax.orchestration.nodes.PACKAGES", ("ours_in_a_test",))
    first = labels_of(0, None, [])[CODE]
    assert labels_of(0, None, [])[CODE] == first
    (package / "__init__.py").write_text("A = 2")
    assert labels_of(0, None, [])[CODE] != first


def test_nodes_are_for_a_ray_that_is_visited(config):
    with pytest.raises(ConfigError, match=r"ray\.nodes = 2 is for a Ray with a ray\.address"):
        check(config("ray.nodes=2", "data.answer_column=a"))
