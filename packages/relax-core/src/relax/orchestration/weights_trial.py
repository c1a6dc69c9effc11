"""How versions would travel on this machine, found by sending two small ones."""

import dcs

from relax.config import ConfigError, RunConfig
from relax.distributed.bus import Endpoint

SECONDS = 20.0
"""Longest time for a version of a few bytes."""


def explain(config: RunConfig, endpoint: Endpoint) -> str:
    """The wire that a run would use here, with the settings that brought it about.

    Raises:
        ConfigError: a version does not arrive.
    """
    weights = config.weights
    wire = _wire(config, endpoint)
    parts = [f"{wire} (weights.wires = {', '.join(weights.wires)})"]
    if "delta" in wire:
        parts.append("only what changed since the version before, bit for bit (weights.delta = true)")
    elif weights.delta:
        parts.append(
            "weights.delta = true has no effect on this machine, as versions are mapped here; "
            "leave shm out of weights.wires to send differences"
        )
    elif weights.delta is None and "tcp" in weights.wires:
        parts.append("whole versions here, differences between machines (weights.delta is not given)")
    else:
        parts.append("whole versions")
    if "tcp" in weights.wires:
        parts.append(f"{weights.streams} TCP streams between machines (weights.streams)")
    return "; ".join(parts)


def _wire(config: RunConfig, endpoint: Endpoint) -> str:
    """Of the second of two versions that differ in one number."""
    import torch

    weights, run = config.weights, "relax-doctor"
    tensors = {"trial": torch.zeros(4096)}
    layout = dcs.layout.of(tensors)
    try:
        with (
            dcs.Publisher(
                endpoint.address, run, layout=layout, token=endpoint.token, wires=weights.wires
            ) as publisher,
            dcs.Subscriber(
                endpoint.address,
                run,
                name="doctor",
                layout=layout,
                token=endpoint.token,
                wires=weights.wires,
                streams=weights.streams,
                delta=weights.delta,
            ) as subscriber,
        ):
            wire, first = "", publisher.version + 1
            for version in range(first, first + 2):
                tensors["trial"][0] = version
                publisher.publish(version, tensors)
                staged = subscriber.next(after=version - 1, timeout=SECONDS)
                if staged is None:
                    raise ConfigError(
                        f"weights.wires = {weights.wires}: no version came within {SECONDS:g} s: "
                        f"{subscriber.health().error or 'for no reason that is known'}; add another wire"
                    )
                wire = staged.wire
                staged.ack()
    except dcs.DcsError as error:
        raise ConfigError(f"weights.wires = {weights.wires}: a version could not be sent: {error}") from error
    return wire
