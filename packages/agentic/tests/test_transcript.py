"""Transcripts against a model that is a list of single tokens."""

import msgspec
import numpy as np
import pytest
from agentic import Encoded, Generation, InvalidValue, Transcript, TranscriptBuilder, TranscriptError
from hypothesis import given
from hypothesis import strategies as st

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
media = st.lists(st.text(max_size=2), max_size=2)


@st.composite
def generations(draw):
    """A generation with any lengths of version spans, also touching ones of one version."""
    lengths = draw(st.lists(st.integers(1, 4), max_size=4))
    count, spans = 0, []
    for length in lengths:
        spans.append((draw(st.integers(0, 2)), count, count + length))
        count += length
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=count, max_size=count))
    reason = draw(st.sampled_from(["stop", "length", "abort"])) if count else "abort"
    return Generation(np.array(ids, np.int32), np.array(logprobs, np.float32), spans, reason)


@st.composite
def observations(draw):
    return Encoded(np.array(draw(tokens), np.int32), draw(media))


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=5),
    media,
    st.lists(st.one_of(generations(), observations()), max_size=6),
)
def test_every_response_token_is_marked_as_what_it_was(prompt, prompt_media, events):
    builder = TranscriptBuilder(Encoded(np.array(prompt, np.int32), prompt_media))
    model = []  # (token, mask, logprob, version) for each response token
    seen = list(prompt_media)
    for event in events:
        assert builder.tokens().tolist() == prompt + [token for token, *_ in model]
        if isinstance(event, Generation):
            builder.append_generation(event)
            versions = [version for version, start, end in event.spans for _ in range(start, end)]
            model += zip(event.tokens.tolist(), [1] * 100, event.logprobs.tolist(), versions, strict=False)
        else:
            builder.append_observation(event)
            model += [(token, 0, 0.0, None) for token in event.tokens.tolist()]
            seen += event.media
        assert len(builder) == len(prompt) + len(model)
    transcript = builder.close()
    assert transcript.tokens.tolist() == prompt + [token for token, *_ in model]
    assert transcript.prompt_length == len(prompt)
    assert transcript.loss_mask.tolist() == [mask for _, mask, *_ in model]
    assert transcript.logprobs.tolist() == [logprob for _, _, logprob, _ in model]
    assert transcript.media == tuple(seen)
    versions = [None] * len(model)
    for version, start, end in transcript.versions.tolist():
        versions[start:end] = [version] * (end - start)
    assert versions == [version for *_, version in model]
    boundaries = sum(
        1
        for before, now in zip([None, *versions], versions, strict=False)
        if now is not None and now != before
    )
    assert len(transcript.versions) == boundaries, "spans that touch and have one version are one span"
    assert transcript.response_length == len(model)
    assert transcript.sampled_length == sum(mask for _, mask, *_ in model)


def built() -> TranscriptBuilder:
    builder = TranscriptBuilder(Encoded(np.array([9, 8], np.int32), ["a"]))
    builder.append_generation(
        Generation(np.array([1, 2], np.int32), np.array([-1, -2], np.float32), [(4, 0, 2)], "stop")
    )
    builder.append_observation(Encoded(np.array([7], np.int32), ["b"]))
    return builder


def test_a_closed_transcript_cannot_change():
    builder = built()
    transcript = builder.close()
    assert builder.close() is transcript
    with pytest.raises(TranscriptError, match="closed with 5 tokens"):
        builder.append_observation(Encoded(np.array([7], np.int32)))
    with pytest.raises(AttributeError):
        transcript.prompt_length = 1  # pyright: ignore[reportAttributeAccessIssue]
    for array in (transcript.tokens, transcript.loss_mask, transcript.logprobs, transcript.versions):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_snapshot_is_not_touched_by_later_turns():
    builder = built()
    snapshot = builder.snapshot()
    builder.append_observation(Encoded(np.array([6], np.int32), ["c"]))
    assert snapshot.tokens.tolist() == [9, 8, 1, 2, 7]
    assert snapshot.media == ("a", "b")


def test_buffers_that_are_reused_do_not_rewrite_history():
    ids, logprobs = np.array([1, 2], np.int32), np.array([-1, -2], np.float32)
    builder = TranscriptBuilder(Encoded(ids))
    builder.append_generation(Generation(ids, logprobs, [(0, 0, 2)], "stop"))
    ids[:], logprobs[:] = 0, 0
    transcript = builder.close()
    assert transcript.tokens.tolist() == [1, 2, 1, 2]
    assert transcript.logprobs.tolist() == [-1, -2]


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidValue, match="has no tokens"):
        TranscriptBuilder(Encoded(np.array([], np.int32)))


def test_arrays_given_to_a_transcript_may_be_reused():
    fields = msgspec.structs.asdict(built().close())
    fields["tokens"] = fields["tokens"].copy()
    transcript = Transcript(**fields)
    fields["tokens"][:] = 0
    assert transcript.tokens.tolist() == [9, 8, 1, 2, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([9, 8, 1, 2, 7])}, "int64"),
        ({"tokens": np.array([9, 8, 1, -2, 7], np.int32)}, "holds token id -2"),
        ({"prompt_length": 0}, "prompt_length is 0; expected 1 to 5"),
        ({"prompt_length": 6}, "prompt_length is 6"),
        ({"prompt_length": 3}, "loss_mask has 3 and logprobs 3 entries; expected 2"),
        ({"loss_mask": np.array([1, 2, 0], np.uint8)}, "loss_mask holds 2"),
        ({"loss_mask": np.array([1, 1, 0])}, "int64"),
        ({"logprobs": np.array([-1, -2, -1], np.float32)}, "not 0 where the mask is 0"),
        ({"logprobs": np.array([-1, np.nan, 0], np.float32)}, "not finite"),
        ({"versions": np.array([4, 0, 2], np.int32)}, r"int32\(3,\)"),
        ({"versions": np.array([[4, 0, 2]])}, "int64"),
        ({"versions": np.array([[4, 0, 1]], np.int32)}, "token 1 has mask 1 but is covered by 0"),
        ({"versions": np.array([[4, 0, 3]], np.int32)}, "token 2 has mask 0 but is covered by 1"),
        ({"versions": np.array([[4, 0, 4]], np.int32)}, r"\(4, 0, 4\)"),
        ({"versions": np.array([[4, 0, 1], [4, 1, 2]], np.int32)}, "touch at position 1"),
        ({"versions": np.array([[4, 0, 2], [5, 1, 2]], np.int32)}, r"\(5, 1, 2\) .* follows position 2"),
        ({"versions": np.array([[-1, 0, 2]], np.int32)}, "version >= 0"),
    ],
)
def test_a_transcript_that_does_not_line_up_is_refused(change, message):
    fields = msgspec.structs.asdict(built().close()) | change
    with pytest.raises(InvalidValue, match=message):
        Transcript(**fields)
