"""What several folders of tests need: small configurations, groups of samples, a queue that is there."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from relax.config import RunConfig, resolve
from relax.distributed.bus import Endpoint, Sample

Config = Callable[..., RunConfig]
Group = Callable[..., list[Sample]]


@pytest.fixture
def config() -> Config:
    """A configuration from words: config("steps=3", "actor.micro_batch_tokens=40")."""

    def build(*words: str) -> RunConfig:
        from relax.config.load import parse_overrides

        small = [
            "data=none.jsonl",
            "launcher=local",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=2",
            "actor.micro_batch_size=4",
        ]
        return resolve({}, parse_overrides([*small, *words]), "a test")

    return build


@pytest.fixture
def group() -> Group:
    """One group as rollout puts it: group(7, version=3, response=5) has 2 members of 3 + 5 tokens each."""

    def build(ordinal: int, version: int = 0, response: int = 5, members: int = 2) -> list[Sample]:
        return [
            Sample(
                prompt_key="p",
                group=f"{ordinal:08d}",
                ordinal=ordinal,
                member=member,
                tokens=np.arange(3 + response, dtype=np.int32),
                prompt_length=3,
                loss_mask=np.ones(response, np.uint8),
                rollout_logprobs=np.zeros(response, np.float32),
                policy_versions=np.array([[version, 0, response]], np.int32),
                reward=float(member),
                reward_parts={},
                truncated=False,
                turns=1,
            )
            for member in range(members)
        ]

    return build


@pytest.fixture
def queue() -> Iterator[Callable[..., Endpoint]]:
    """Starts a queue, as a run does: queue(max_bytes=1000)."""
    started: list[tq.Server] = []

    def start(transport: str = "auto", **options: Any) -> Endpoint:
        server = tq.serve(token="t", **options)
        started.append(server)
        return Endpoint(server.address, "t", transport)

    yield start
    for server in started:
        server.close()
