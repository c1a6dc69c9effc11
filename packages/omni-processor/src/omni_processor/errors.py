"""One exception family: everything this package raises on purpose is an `OmniProcessorError`.

`MediaError` and its kinds are about one media item and carry it (`item`, `source`, `reason`), so that a run
may drop the sample and count the reason. The others are about the model folder, the conversation or the chat
template.
"""

from __future__ import annotations


class OmniProcessorError(Exception):
    """Base of every error of omni_processor."""


class ConfigError(OmniProcessorError):
    """A model folder, tokenizer or option cannot be used as given."""


class MessageError(OmniProcessorError):
    """A conversation or one of its parts has a shape that is not understood."""


class TemplateError(OmniProcessorError):
    """The chat template is missing or failed on this conversation."""


class TemplateRewritesHistory(TemplateError):
    """The chat template renders earlier turns differently once later ones exist; appending would be wrong."""


class Cancelled(OmniProcessorError):
    """The work was given up by whoever asked for it (`omni_processor.cancellable`)."""


class MediaError(OmniProcessorError):
    """One media item cannot be used.

    Attributes:
        item: which item of the sample, for example ``"image 0"``.
        source: where it came from, shortened.
        reason: what is wrong and what to do about it.
    """

    def __init__(self, reason: str, *, item: str = "media", source: str = "") -> None:
        super().__init__(reason, item, source)
        self.reason = reason
        self.item = item
        self.source = source

    def __str__(self) -> str:
        origin = f" ({self.source})" if self.source else ""
        return f"{self.item}{origin}: {self.reason}"

    def __reduce__(self) -> tuple:
        # Exceptions with keyword-only arguments do not survive a process boundary by default.
        return _rebuild, (type(self), self.reason, self.item, self.source)


def _rebuild(kind: type[MediaError], reason: str, item: str, source: str) -> MediaError:
    return kind(reason, item=item, source=source)


class SourceNotAllowed(MediaError):
    """The source is of a kind that is not opened here: a network address, another host's file, a device."""


class Undecodable(MediaError):
    """The bytes are not a picture this package decodes, or they are damaged or cut off."""


class TooLarge(MediaError):
    """The item exceeds the byte or pixel limit; found from its header, before anything is decoded."""


class Empty(MediaError):
    """The item holds no bytes or no pixels."""


class BudgetExceeded(MediaError):
    """The items of a sample cost more tokens than its budget; found before anything is decoded."""


class UnsupportedModality(MediaError):
    """The model takes no media of this kind."""


class SpanMismatch(MediaError):
    """Placeholder tokens and media items do not correspond one to one."""
