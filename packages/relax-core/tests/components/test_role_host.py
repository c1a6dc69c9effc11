"""A role's life: what fails before there is anything is told to all who wait for it."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from relax.backends.inference.errors import EngineError, EngineNotBuilt
from relax.components.context import RunContext
from relax.components.host import RoleHost
from relax.distributed.bus import Endpoint


async def test_whoever_waits_for_an_engine_that_is_never_built_is_told_why(
    config: Any, tmp_path: Path
) -> None:
    servers = "rollout.sglang.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"
    words = ["rollout.engine=sglang", servers, "rollout.sglang.api_key_env=NO_SUCH_KEY_OF_A_TEST"]
    nowhere = Endpoint("")
    host = RoleHost("engine-0", RunContext(config(*words), tmp_path, tmp_path, nowhere, nowhere))
    waiting = asyncio.ensure_future(host.engine())
    with pytest.raises(Exception) as built:  # noqa: PT011 - whatever it is, the other has to hold it
        await host.build()
    with pytest.raises(EngineNotBuilt) as told:
        await waiting
    assert str(built.value) in str(told.value)
    assert str(told.value).startswith("engine-0 could not be built: ")
    assert isinstance(told.value, EngineError)
    again = pickle.loads(pickle.dumps(told.value))  # noqa: S301 - as Ray brings it to the rollout
    assert str(again) == str(told.value)
