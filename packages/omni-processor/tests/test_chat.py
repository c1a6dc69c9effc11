"""The chat template: rendered as transformers does it, and extended turn by turn without re-encoding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_processor import MessageError, OmniProcessor, TemplateError, TemplateRewritesHistory

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]

# Drops what the assistant thought once a later message exists, as several published templates do.
FORGETS_REASONING = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and not loop.last -%}{{- message.content.split('</think>')[-1] -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Numbers the turns from the end, so that every new message changes all earlier text.
COUNTS_DOWN = """\
{%- for message in messages -%}{{- loop.revindex ~ message.role ~ message.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '0assistant' -}}{%- endif -%}
"""

# No end token between turns, and blanks trimmed.
PLAIN = """\
{%- for message in messages -%}{{- message.role + ': ' + (message.content | trim) + '\\n\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

USES_TOOLS = "{{ tools | tojson }}{{ note }}{% for m in messages %}{{ m.content }}{% endfor %}"

HISTORY = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "calc(2+2)"},
]
RESULT = [{"role": "tool", "content": "4"}]


def whole(processor, messages):
    return processor(messages, add_generation_prompt=True).tokens


def test_tokens_equal_apply_chat_template(text_processor, tokenizer):
    conversations = [
        [{"role": "user", "content": "hi"}],
        HISTORY + RESULT,
        [{"role": "user", "content": "ünï <|im_end|> <image> \n\n"}, {"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"x": 1}}]}],
    ]
    for messages in conversations:
        for prompt in (True, False):
            expected = tokenizer.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False
            )
            sample = text_processor(messages, add_generation_prompt=prompt)
            np.testing.assert_array_equal(sample.tokens, expected)
            assert sample.tokens.dtype == np.int32
            assert sample.media == sample.spans == []
            assert sample.token_counts == {"text": len(sample.tokens)}


def test_tools_and_template_arguments_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer(USES_TOOLS)
    sample = OmniProcessor(tokenizer)([{"role": "user", "content": "x"}], tools=TOOLS, note="!")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tools=TOOLS, note="!", tokenize=False
    )
    assert '"add"' in text
    assert tokenizer.decode(sample.tokens) == text


def test_text_survives_encode_and_decode(text_processor):
    for text in ("plain", "ünïcode 🙂", " blanks  around ", "a<|im_end|>b", ""):
        tokens = text_processor.encode_text(text)
        assert tokens.dtype == np.int32
        assert text_processor.decode(tokens) == text
    assert text_processor.decode(text_processor.encode_text("a<|im_end|>b"), skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut off"])
def test_prompt_sampled_and_suffix_are_the_whole_conversation(text_processor, special, ended):
    sampled = text_processor.encode_text("calc(2+2)")
    if ended:
        sampled = np.append(sampled, special["<|im_end|>"]).astype(np.int32)
    prompt = whole(text_processor, HISTORY[:-1])
    suffix = text_processor.template_suffix(HISTORY, RESULT, sampled=sampled).tokens
    assert suffix.dtype == np.int32
    np.testing.assert_array_equal(
        np.concatenate([prompt, sampled, suffix]), whole(text_processor, HISTORY + RESULT)
    )


def test_several_turns_grow_into_the_whole_conversation(text_processor, special):
    messages = HISTORY[:2]
    tokens = whole(text_processor, messages)
    for turn in range(4):
        answer = f"calc({turn})"
        sampled = np.append(text_processor.encode_text(answer), special["<|im_end|>"])
        messages = [*messages, {"role": "assistant", "content": answer}]
        new = [{"role": "tool", "content": str(turn)}, {"role": "user", "content": "and now?"}]
        suffix = text_processor.template_suffix(messages, new, sampled=sampled)
        tokens = np.concatenate([tokens, sampled, suffix.tokens])
        messages = messages + new
        np.testing.assert_array_equal(tokens, whole(text_processor, messages))


@settings(max_examples=30, deadline=None)
@given(answer=st.text(max_size=30), reply=st.text(max_size=30))
def test_the_suffix_depends_on_the_new_message_only(text_processor, answer, reply):
    history = [*HISTORY[:-1], {"role": "assistant", "content": answer}]
    suffix = text_processor.template_suffix(history, [{"role": "tool", "content": reply}])
    assert (
        text_processor.decode(suffix.tokens)
        == f"<|im_end|>\n<|im_start|>tool\n{reply}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_history_a_stand_in_conversation_gives_the_same_suffix(text_processor):
    np.testing.assert_array_equal(
        text_processor.template_suffix(None, RESULT).tokens,
        text_processor.template_suffix(HISTORY, RESULT).tokens,
    )


def test_structured_tool_calls_are_not_repeated_in_the_suffix(text_processor):
    call = {"name": "add", "arguments": {"x": 2}}
    history = [*HISTORY[:-1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    np.testing.assert_array_equal(
        text_processor.template_suffix(history, RESULT).tokens,
        text_processor.template_suffix(HISTORY, RESULT).tokens,
    )


def test_another_end_token_does_not_end_the_turn(text_processor, special):
    suffix = text_processor.template_suffix(HISTORY, RESULT, sampled=[special["<|endoftext|>"]]).tokens
    assert suffix[0] == special["<|im_end|>"]


def test_ordinary_tokens_at_the_seam_are_never_taken_for_an_end(make_tokenizer):
    processor = OmniProcessor(make_tokenizer(PLAIN))
    sampled = processor.encode_text("so\n")
    suffix = processor.template_suffix(HISTORY, RESULT, sampled=sampled)
    assert processor.decode(suffix.tokens) == "\n\ntool: 4\n\nassistant: "


def test_a_template_that_trims_blanks_is_accepted(make_tokenizer):
    processor = OmniProcessor(make_tokenizer(PLAIN))
    history = [*HISTORY[:-1], {"role": "assistant", "content": " four \n"}]
    assert processor.decode(processor.template_suffix(history, RESULT).tokens).startswith("\n\ntool: 4")


def test_a_template_that_forgets_reasoning_is_refused_only_where_it_forgets(make_tokenizer):
    processor = OmniProcessor(make_tokenizer(FORGETS_REASONING))
    thoughtful = [*HISTORY[:-1], {"role": "assistant", "content": "<think>hm</think>calc(2+2)"}]
    with pytest.raises(TemplateRewritesHistory, match="<think>hm"):
        processor.template_suffix(thoughtful, RESULT)
    assert processor.template_suffix(HISTORY, RESULT).tokens.size


def test_a_template_that_rewrites_the_prompt_is_refused(make_tokenizer):
    processor = OmniProcessor(make_tokenizer(COUNTS_DOWN))
    with pytest.raises(TemplateRewritesHistory, match="character 0"):
        processor.template_suffix(HISTORY, RESULT)


def test_a_template_that_hides_or_repeats_the_assistant_is_refused(make_tokenizer):
    for body, times in (("", 0), ("{{ m.content }}{{ m.content }}", 2)):
        template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}" + body + "{% else %}{{ m.content }}"
            "{% endif %}{% endfor %}"
        )
        with pytest.raises(TemplateRewritesHistory, match=f"{times} times"):
            OmniProcessor(make_tokenizer(template)).template_suffix(HISTORY, RESULT)


def test_the_suffix_needs_a_sampled_turn_and_a_new_message(text_processor):
    with pytest.raises(TemplateError, match="assistant"):
        text_processor.template_suffix(HISTORY[:2], RESULT)
    with pytest.raises(MessageError, match="no new message"):
        text_processor.template_suffix(HISTORY, [])


def test_a_new_message_may_bring_an_image_and_history_images_need_no_source(processor, picture, special):
    first = [{"role": "user", "content": [{"type": "image", "image": picture}, "what?"]}]
    answered = [*first, {"role": "assistant", "content": "a square"}]
    new = [{"role": "user", "content": ["and this?", {"type": "image", "image": picture.resize((256, 32))}]}]
    sampled = np.append(processor.encode_text("a square"), special["<|im_end|>"])
    suffix = processor.template_suffix(answered, new, sampled=sampled)
    expected = processor([*answered, *new])
    joined = np.concatenate([processor(first).tokens, sampled, suffix.tokens])
    np.testing.assert_array_equal(joined, expected.tokens)
    assert [item["image_grid_thw"].tolist() for item in suffix.media] == [[[1, 2, 16]]]
    assert (suffix.tokens[suffix.spans[0].start : suffix.spans[0].end] == special["<|image_pad|>"]).all()

    bare = [{"role": "user", "content": [{"type": "image"}, "what?"]}, *answered[1:]]
    np.testing.assert_array_equal(processor.template_suffix(bare, new, sampled=sampled).tokens, suffix.tokens)


@pytest.mark.parametrize("word", ["video", "vidoes", "imagse", "audio", "use_audio_in_vidoe", "tool"])
def test_a_misspelt_argument_is_no_word_for_the_template(processor, word):
    for messages in ("a <video>", HISTORY):
        with pytest.raises(TypeError, match=rf"no argument '{word}'; did you mean '\w+'"):
            processor(messages, **{word: ["a.mp4"]})
    with pytest.raises(TypeError, match="did you mean"):
        processor.template_suffix(HISTORY, RESULT, **{word: 1})


def test_a_plain_string_has_no_template_to_take_other_words(processor):
    with pytest.raises(TypeError, match="goes through no template"):
        processor("hello", enable_thinking=False)
    assert len(processor(HISTORY[:1], enable_thinking=False).tokens)
