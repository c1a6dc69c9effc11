"""Rewards: what a response is worth. One file a reward, one registry line, weighted mixtures of them.

A reward is an async callable from `RewardInput` to `Score`. Imports neither torch nor a verifier: what is
heavy or can hang runs in a child process of the reward that needs it.
"""

from relax.engine.rewards.base import Reward, RewardError, RewardInput, Score, close
from relax.engine.rewards.registry import build, names

__all__ = ["Reward", "RewardError", "RewardInput", "Score", "build", "close", "names"]
