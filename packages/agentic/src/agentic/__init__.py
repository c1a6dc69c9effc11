"""Episodes, environments and exact transcripts for multi-turn reinforcement learning.

`run_episode` plays one task of an `Environment` with a `Policy` and returns an `Episode`, whose `Transcript`
holds the very ids the engine saw and sampled.
"""

from .environment import Action, Environment, Message, Observation, Step, Task
from .episode import Episode, EpisodeEnd, Limits
from .episodes import EpisodeStart, run_episodes
from .errors import AgenticError, EpisodeError, InvalidValue, TranscriptError, UnknownEnvironment
from .generation import (
    Encoded,
    FinishReason,
    Generation,
    GenerationRequest,
    MediaItem,
    Sampling,
    VersionSpan,
)
from .policy import Policy
from .reward import Reward, Score
from .runner import run_episode
from .seeds import derive_seed
from .transcript import Transcript, TranscriptBuilder

__all__ = [
    "Action",
    "AgenticError",
    "Encoded",
    "Environment",
    "Episode",
    "EpisodeEnd",
    "EpisodeError",
    "EpisodeStart",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "InvalidValue",
    "Limits",
    "MediaItem",
    "Message",
    "Observation",
    "Policy",
    "Reward",
    "Sampling",
    "Score",
    "Step",
    "Task",
    "Transcript",
    "TranscriptBuilder",
    "TranscriptError",
    "UnknownEnvironment",
    "VersionSpan",
    "derive_seed",
    "run_episode",
    "run_episodes",
]
