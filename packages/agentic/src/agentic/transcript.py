"""Exact transcripts: the very ids the engine saw and sampled, and who wrote each of them.

A transcript is a prompt followed by a response. The response alternates what the policy sampled (mask 1) with
what it was shown between its turns (mask 0). Nothing is re-tokenised: the prompt of turn k+1 is the ids of
turn k, the sampled ids, and the encoded observation.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidValue, TranscriptError
from .generation import Encoded, Generation, MediaItem, check_routes, check_vector


class Transcript(msgspec.Struct, frozen=True, eq=False):
    """A finished transcript. It cannot be changed: the struct is frozen and its arrays are read-only.

    With n tokens, r = n - prompt_length of them response, and k spans:

    Attributes:
        tokens: int32 [n], ids >= 0.
        prompt_length: tokens before the first one the policy could sample, 1 <= prompt_length <= n.
        loss_mask: uint8 [r]; 1 = sampled by the policy, 0 = observation, tool output or template.
        logprobs: float32 [r]; the engine's log-probability where the mask is 1, exactly 0 where it is 0.
        versions: int32 [k, 3], rows (version, start, end) over the response: response tokens [start, end)
            were sampled by policy version `version` >= 0. start < end; rows ascend and do not overlap;
            together they cover exactly the positions whose mask is 1 (an observation has no version); two
            rows that touch differ in version.
        media: what the placeholders among the tokens stand for, in order.
        routes: uint8, int16 or int32 [m, layers, top_k], the experts of the first m tokens, each as the
            engine told when it saw the token first; None where it told none. The last token that was sampled
            was never fed, nor was what came after it: m is n - 1 where it ends the transcript, and otherwise
            the index of that token.

    Raises:
        InvalidValue: any of these does not hold. Arrays that are still writable are copied first.
    """

    tokens: npt.NDArray[np.int32]
    prompt_length: int
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    media: tuple[MediaItem, ...] = ()
    routes: npt.NDArray[Any] | None = None

    def __post_init__(self) -> None:
        check_vector("the tokens of a transcript", self.tokens, np.int32)
        check_vector("the loss_mask of a transcript", self.loss_mask, np.uint8)
        check_vector("the logprobs of a transcript", self.logprobs, np.float32)
        if not (1 <= self.prompt_length <= len(self.tokens)):
            raise InvalidValue(
                f"prompt_length is {self.prompt_length}; expected 1 to {len(self.tokens)}, all tokens"
            )
        if len(self.tokens) and int(self.tokens.min()) < 0:
            raise InvalidValue(f"a transcript holds token id {self.tokens.min()}; expected ids >= 0")
        response = len(self.tokens) - self.prompt_length
        if len(self.loss_mask) != response or len(self.logprobs) != response:
            raise InvalidValue(
                f"loss_mask has {len(self.loss_mask)} and logprobs {len(self.logprobs)} entries; expected "
                f"{response}, one for each response token"
            )
        if (self.loss_mask > 1).any():
            raise InvalidValue(f"loss_mask holds {self.loss_mask.max()}; expected only 0 and 1")
        if not np.isfinite(self.logprobs).all():
            raise InvalidValue("logprobs hold a number that is not finite; expected finite numbers")
        if self.logprobs[self.loss_mask == 0].any():
            raise InvalidValue(
                "a logprob is not 0 where the mask is 0; expected 0, as nobody sampled that token"
            )
        _check_versions(self.versions, self.loss_mask)
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            msgspec.structs.force_setattr(self, name, _frozen(getattr(self, name)))
        msgspec.structs.force_setattr(self, "media", tuple(self.media))
        if self.routes is not None:
            check_routes("a transcript", self.routes)
            if len(self.routes) >= len(self.tokens):
                raise InvalidValue(
                    f"a transcript of {len(self.tokens)} tokens has {len(self.routes)} routes; expected at "
                    f"most {len(self.tokens) - 1}, as the last token is never fed"
                )
            msgspec.structs.force_setattr(self, "routes", _frozen(self.routes))

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, sampled or not."""
        return len(self.loss_mask)

    @property
    def sampled_length(self) -> int:
        """Tokens the policy sampled: those with mask 1."""
        return int(self.loss_mask.sum())


class TranscriptBuilder:
    """A transcript being written, turn by turn. One owner; not for use from several threads.

    `append_generation` and `append_observation` follow the episode; `snapshot` reads what is there, `close`
    ends it.
    """

    def __init__(self, prompt: Encoded) -> None:
        """Start with the encoded prompt, generation prompt included.

        Raises:
            InvalidValue: the prompt has no tokens.
        """
        if len(prompt.tokens) == 0:
            raise InvalidValue("the prompt of a transcript has no tokens; expected at least one")
        self._prompt_length = len(prompt.tokens)
        self._tokens: list[npt.NDArray[np.int32]] = [prompt.tokens.copy()]
        self._masks: list[npt.NDArray[np.uint8]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._versions: list[tuple[int, int, int]] = []
        self._media: list[MediaItem] = list(prompt.media)
        self._routes: list[npt.NDArray[Any]] = []
        self._routed = 0
        self._unrouted = False
        self._length = self._prompt_length
        self._closed: Transcript | None = None

    def __len__(self) -> int:
        """Tokens written so far, the prompt included."""
        return self._length

    @property
    def closed(self) -> bool:
        """It takes no more tokens."""
        return self._closed is not None

    @property
    def media(self) -> list[MediaItem]:
        """A copy of the list of media so far."""
        return list(self._media)

    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [len(self)]: all ids so far, in a new array: the prompt of the next turn."""
        return np.concatenate(self._tokens)

    def append_generation(self, generation: Generation) -> None:
        """Add what the policy sampled (mask 1), with its logprobs and versions. An empty one adds nothing.

        Of its routes only those of tokens that have none yet are taken: what an engine tells of a token that
        it was shown again is how it would go now, not how it went when it was sampled.

        Raises:
            InvalidValue: the generation's routes are none of this transcript: of another shape or type than
                those before, or of another number of tokens than it and the generation have.
            TranscriptError: the transcript is closed.
        """
        self._check_open("a generation")
        if len(generation.tokens):
            self._take_routes(generation)
        offset = self._length - self._prompt_length
        self._extend(generation.tokens, 1, generation.logprobs)
        for version, start, end in generation.spans:
            start, end = start + offset, end + offset
            if self._versions and self._versions[-1][0] == version and self._versions[-1][2] == start:
                start = self._versions.pop()[1]
            self._versions.append((version, start, end))

    def append_observation(self, observation: Encoded) -> None:
        """Add what the policy is shown next (mask 0, logprob 0, no version), and append its media.

        Raises:
            TranscriptError: the transcript is closed.
        """
        self._check_open("an observation")
        self._extend(observation.tokens, 0, np.zeros(len(observation.tokens), np.float32))
        self._media.extend(observation.media)

    def snapshot(self) -> Transcript:
        """What is there by now, as a transcript that later appends do not touch."""
        if self._closed is not None:
            return self._closed
        return Transcript(
            tokens=_frozen_concatenation(self._tokens, np.int32),
            prompt_length=self._prompt_length,
            loss_mask=_frozen_concatenation(self._masks, np.uint8),
            logprobs=_frozen_concatenation(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32).reshape(-1, 3),
            media=tuple(self._media),
            routes=self._all_routes(),
        )

    def close(self) -> Transcript:
        """End it and return the transcript; further calls return the same one, and appends are refused."""
        if self._closed is None:
            self._closed = self.snapshot()
        return self._closed

    def _take_routes(self, generation: Generation) -> None:
        found, length = generation.routes, self._length + len(generation.tokens)
        if found is None or self._unrouted:
            self._unrouted = True  # a hole cannot be filled later
            return
        if len(found) != length - 1:
            raise InvalidValue(
                f"a generation that makes a transcript of {length} tokens has {len(found)} routes; expected "
                f"{length - 1}: of its prompt too, and none of the last token"
            )
        if self._routes:
            first = self._routes[0]
            if (found.shape[1:], found.dtype) != (first.shape[1:], first.dtype):
                raise InvalidValue(
                    f"routes of a generation are {found.dtype} {list(found.shape[1:])} a token, those before "
                    f"it {first.dtype} {list(first.shape[1:])}; were they captured from one model?"
                )
        self._routes.append(found[self._routed :].copy())
        self._routed = len(found)

    def _all_routes(self) -> npt.NDArray[Any] | None:
        if not self._routes:
            return None
        array = self._routes[0] if len(self._routes) == 1 else np.concatenate(self._routes)
        array.setflags(write=False)
        return array

    def _extend(self, tokens: npt.NDArray[np.int32], mask: int, logprobs: npt.NDArray[np.float32]) -> None:
        # Copied, so that an engine that reuses its buffers cannot rewrite history.
        self._tokens.append(tokens.copy())
        self._masks.append(np.full(len(tokens), mask, np.uint8))
        self._logprobs.append(logprobs.copy())
        self._length += len(tokens)

    def _check_open(self, what: str) -> None:
        if self._closed is not None:
            raise TranscriptError(
                f"the transcript was closed with {self._length} tokens and takes no more; {what} came after"
            )


def _frozen(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        array = array.copy()
        array.setflags(write=False)
    return array


def _frozen_concatenation(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    array = np.concatenate(parts) if parts else np.zeros(0, dtype)
    array.setflags(write=False)
    return array


def _check_versions(versions: object, loss_mask: npt.NDArray[np.uint8]) -> None:
    if not isinstance(versions, np.ndarray) or versions.dtype != np.int32 or versions.shape[1:] != (3,):
        found = (
            f"{versions.dtype}{versions.shape}"
            if isinstance(versions, np.ndarray)
            else type(versions).__name__
        )
        raise InvalidValue(
            f"versions of a transcript: found {found}; expected a numpy array of int32 [spans, 3]"
        )
    rows = versions.tolist()
    covered = np.zeros(len(loss_mask), np.uint8)
    previous_version, previous_end = -1, 0
    for version, start, end in rows:
        if version < 0 or not (previous_end <= start < end <= len(loss_mask)):
            raise InvalidValue(
                f"version span ({version}, {start}, {end}) of a transcript follows position {previous_end}; "
                f"expected version >= 0 and {previous_end} <= start < end <= {len(loss_mask)}"
            )
        if start == previous_end and version == previous_version:
            raise InvalidValue(
                f"two version spans of version {version} touch at position {start}; expected them merged"
            )
        covered[start:end] = 1
        previous_version, previous_end = version, end
    if not np.array_equal(covered, loss_mask):
        at = int(np.flatnonzero(covered != loss_mask)[0])
        raise InvalidValue(
            f"response token {at} has mask {loss_mask[at]} but is covered by {covered[at]} version spans; "
            "expected the spans to cover exactly the tokens with mask 1"
        )
