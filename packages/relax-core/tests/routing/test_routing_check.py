"""A run that cannot replay routes is refused before it starts, and told why."""

import json

import pytest
from relax.backends.routes import Routing
from relax.backends.tiny import write_tiny
from relax.config import ConfigError
from relax.orchestration.routing_check import replayed_routing


class Silent:
    """An engine that says nothing of routes."""


class Telling:
    """An engine that can tell them."""

    captures_routes = True


ON = "actor.routing_replay=true"
HERE = __name__


def test_a_run_without_replay_asks_nothing(config, tmp_path):
    assert replayed_routing(config(), write_tiny(tmp_path)) is None


def test_a_mixture_of_experts_is_taken_with_every_engine_that_can_tell(config, tmp_path):
    folder = write_tiny(tmp_path, "qwen3_moe")

    for engine in ("transformers", "sglang"):
        assert replayed_routing(config(ON, f"rollout.engine={engine}"), folder) == Routing(8, 2, (0, 1))


def test_a_thinker_and_the_omni_it_belongs_to_are_taken_too(config, tmp_path):
    folder = write_tiny(tmp_path, "qwen3_omni")
    thinker = json.loads((folder / "config.json").read_text())
    for content in (thinker, {"model_type": "qwen3_omni_moe", "thinker_config": thinker}):
        (folder / "config.json").write_text(json.dumps(content))
        for engine in ("transformers", "sglang"):
            found = replayed_routing(config(ON, f"rollout.engine={engine}"), folder)
            assert found == Routing(8, 2, (0, 1))


def test_a_dense_model_is_refused_by_name(config, tmp_path):
    with pytest.raises(ConfigError, match=r"with model.path = 'tiny': a qwen3 is dense"):
        replayed_routing(config(ON), write_tiny(tmp_path))


def test_routers_that_cannot_be_read_or_led_are_refused_by_name(config, tmp_path):
    folder = write_tiny(tmp_path, "qwen3_moe")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "mixtral"}))

    with pytest.raises(ConfigError, match=r"rollout.engine = transformers: .* qwen3_moe.*, not of mixtral"):
        replayed_routing(config(ON), folder)
    with pytest.raises(ConfigError, match=r"actor.backend = torch_native: .* qwen3_moe.*, not of mixtral"):
        replayed_routing(config(ON, "rollout.engine=sglang"), folder)


def test_an_engine_that_does_not_say_it_can_tell_is_refused_by_name(config, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "engines_of_this_test", sys.modules[HERE])
    folder = write_tiny(tmp_path, "qwen3_moe")

    with pytest.raises(ConfigError, match=r"engines_of_this_test:Silent: .* captures_routes"):
        replayed_routing(config(ON, "rollout.engine=engines_of_this_test:Silent"), folder)
    assert replayed_routing(config(ON, "rollout.engine=engines_of_this_test:Telling"), folder) is not None
