"""Whether a run's model, engine and trainer can replay routes, found out before anything starts."""

import json
from pathlib import Path
from typing import Any

from relax.backends.inference.registry import ENGINES, engine_class
from relax.backends.models import WHOLE_OMNI
from relax.backends.routes import Routing, routing_of
from relax.backends.train.omni import MODEL_TYPE as OMNI
from relax.config import ConfigError, RunConfig

_OMNI = (OMNI, *sorted(WHOLE_OMNI))
_LED = ("qwen3_moe", *_OMNI)
"""Model types whose routers torch_native can lead."""
_READ = ("qwen3_moe", "qwen3_vl_moe", *_OMNI)
"""Model types whose routers the embedded engine can read."""


def replayed_routing(config: RunConfig, folder: Path) -> Routing | None:
    """How the model routes, if the run replays that; None if it does not.

    Args:
        config: of the run.
        folder: of its model.

    Raises:
        ConfigError: with actor.routing_replay, a dense model, or an engine or a trainer that cannot do its
            part.
    """
    if not config.actor.routing_replay:
        return None
    content = json.loads((folder / "config.json").read_text())
    kind = content.get("model_type")
    routing = routing_of(content)
    if routing is None:
        raise ConfigError(
            f"actor.routing_replay = true with model.path = {config.model.path!r}: a {kind} is dense, so no "
            f"token is routed; leave actor.routing_replay out, or take a mixture of experts (tiny_moe is one)"
        )
    _check_engine(config.rollout.engine, kind)
    if config.actor.backend == "torch_native" and kind not in _LED:
        raise ConfigError(
            f"actor.routing_replay = true with actor.backend = torch_native: it leads the routers of "
            f"{', '.join(_LED)}, not of {kind}; take actor.backend=megatron, or leave "
            f"actor.routing_replay out"
        )
    return routing


def _check_engine(engine: str, kind: Any) -> None:
    if engine == "transformers" and kind not in _READ:
        raise ConfigError(
            f"actor.routing_replay = true with rollout.engine = transformers: it reads the routers of "
            f"{', '.join(_READ)}, not of {kind}; take rollout.engine=sglang, or leave "
            f"actor.routing_replay out"
        )
    if engine in ENGINES.entries:
        return
    if not getattr(engine_class(engine), "captures_routes", False):
        raise ConfigError(
            f"actor.routing_replay = true with rollout.engine = {engine}: it does not say that it can tell "
            f"routes (a class attribute captures_routes = True, and Generation.routes when EngineSpec.routes "
            f"asks); take transformers or sglang, or leave actor.routing_replay out"
        )
