"""Settings of low-rank adapters (LoRA, arXiv 2106.09685): which layers get one, how weights travel then."""

from typing import Literal

from pydantic import Field

from relax.config.base import Settings


class LoraSettings(Settings):
    """Train a low-rank update of some linear layers; all other weights stay as they are."""

    rank: int = Field(default=0, ge=0)
    """Rank of the update; 0 trains the weights themselves."""
    alpha: float = Field(default=16.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    """Last names of the linear layers that get an adapter."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of the adapter's input, in supervised steps only: an importance ratio compares two distributions, and
    dropout would change one of them.
    """
    sync: Literal["auto", "adapter", "merged"] = "auto"
    """How a version travels: `adapter`, its two small matrices a layer, merged beside each engine, or
    `merged`, whole tensors. `auto` is `adapter` for a trainer of one rank and `merged` for one of many.
    """
