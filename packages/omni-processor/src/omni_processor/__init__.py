"""Every modality to the tensors a model was trained on.

`OmniProcessor` turns a conversation (text, images, sound, video) into token ids, media tensors and their
spans; `collate` batches the tensors. Results are numpy; importing this package imports neither torch nor
transformers.
"""

from omni_processor.cancellation import cancellable
from omni_processor.errors import (
    BudgetExceeded,
    Cancelled,
    ConfigError,
    Empty,
    MediaError,
    MessageError,
    OmniProcessorError,
    SourceNotAllowed,
    SpanMismatch,
    TemplateError,
    TemplateRewritesHistory,
    TooLarge,
    Undecodable,
    UnsupportedModality,
)
from omni_processor.processor import OmniProcessor
from omni_processor.sample import OPAQUE, Budget, ItemPlan, Limits, MediaItem, Sample, Span, collate

__all__ = [
    "OPAQUE",
    "Budget",
    "BudgetExceeded",
    "Cancelled",
    "ConfigError",
    "Empty",
    "ItemPlan",
    "Limits",
    "MediaError",
    "MediaItem",
    "MessageError",
    "OmniProcessor",
    "OmniProcessorError",
    "Sample",
    "SourceNotAllowed",
    "Span",
    "SpanMismatch",
    "TemplateError",
    "TemplateRewritesHistory",
    "TooLarge",
    "Undecodable",
    "UnsupportedModality",
    "cancellable",
    "collate",
]
