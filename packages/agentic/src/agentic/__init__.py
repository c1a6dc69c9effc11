"""Episodes, environments and exact transcripts for multi-turn reinforcement learning."""

from .errors import AgenticError, EpisodeError, InvalidValue, TranscriptError, UnknownEnvironment
from .generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    MediaItem,
    Sampling,
    VersionSpan,
)

__all__ = [
    "AgenticError",
    "EpisodeError",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "InvalidValue",
    "MediaItem",
    "Sampling",
    "TranscriptError",
    "UnknownEnvironment",
    "VersionSpan",
]
