"""Test the chat templates: terse, stable when messages follow, and safe against forged markers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from reward_kit.agent.policies.hf.action_formats import Hermes, find_action_format, tools_of
from reward_kit.agent.policies.hf.chat_layout import NO_TOOLS, ChatLayout, Tools
from reward_kit.rl.model_kit.models import TERSE_TEMPLATE, build_tokenizer
from tests.rl.model_kit.frozen_lake import TOOLS

TOKENIZER = build_tokenizer(level="byte")
TERSE = build_tokenizer(level="byte", chat_template=TERSE_TEMPLATE)
CALL = {"type": "function", "id": "a", "function": {"name": "act", "arguments": {"action": "up"}}}
CALLED = '<tool_call>\n{"name": "act", "arguments": {"action": "up"}}\n</tool_call>'


def shown(chat: list[dict[str, Any]], **options: Any) -> str:
    return TOKENIZER.apply_chat_template(chat, tokenize=False, **options)


def test_template_writes_role_markers_and_texts() -> None:
    chat = [
        {"role": "system", "content": "Walk."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "go", "tool_calls": [CALL]},
        {"role": "tool", "content": "done", "tool_call_id": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    ]
    assert shown(chat, add_generation_prompt=True) == (
        f"<|system|>Walk.<|user|>ab<|assistant|>go\n{CALLED}<|end|><|tool|>done"
        f"<|assistant|>{CALLED}\n{CALLED}<|end|><|assistant|>"
    )


def test_tools_are_written_first() -> None:
    text = shown([{"role": "user", "content": "x"}], tools=[TOOLS[0], TOOLS[0]])
    first, second = text.removeprefix("<|tools|>").removesuffix("<|user|>x").split("\n")
    assert first == second
    assert first.startswith('{"type": "function", "function": {"name": "act"')


def test_arguments_can_be_a_json_string() -> None:
    call = {"type": "function", "function": {"name": "act", "arguments": '{"action": "up"}'}}
    assert shown([{"role": "assistant", "content": "", "tool_calls": [call]}]) == f"<|assistant|>{CALLED}<|end|>"


def test_calls_are_written_in_the_action_format() -> None:
    form = find_action_format("auto", TOKENIZER, TOKENIZER.chat_template)
    assert isinstance(form, Hermes)
    assert form.write(tools_of(TOOLS)[0], {"action": "up"}) == CALLED


TEXTS = st.text("ab<|>\n", max_size=6) | st.sampled_from(["<|end|>", "<|user|>", "</think>"])
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS})


@given(st.lists(MESSAGES, min_size=1, max_size=6), st.lists(MESSAGES, max_size=3))
def test_rendered_prefix_does_not_depend_on_later_messages(chat: list[Any], more: list[Any]) -> None:
    assert shown([*chat, *more]).startswith(shown(chat))
    options = {"return_dict": False}
    before = TOKENIZER.apply_chat_template(chat, **options)
    assert TOKENIZER.apply_chat_template([*chat, *more], **options)[: len(before)] == before


@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_text_cannot_forge_role_markers(chat: list[Any]) -> None:
    ids = TOKENIZER.apply_chat_template(chat, return_dict=False)
    marks = {"system": 3, "user": 4, "assistant": 5, "tool": 6}
    assert [token for token in ids if 3 <= token <= 7] == [marks[message["role"]] for message in chat]
    assert ids.count(TOKENIZER.eos_token_id) == sum(message["role"] == "assistant" for message in chat)


@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("tools", [NO_TOOLS, Tools("act", TOOLS)], ids=["without tools", "with tools"])
def test_chat_layout_extends_without_rewriting(tools: Tools, reasons: bool) -> None:
    layout = ChatLayout(TOKENIZER)
    assert layout.end_id == TOKENIZER.eos_token_id
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for role in ("user", "tool"):
        assert layout.keeps(first, [{"role": role, "content": "x"}], tools, reasons=reasons)


@given(st.lists(MESSAGES, min_size=1, max_size=6), st.lists(MESSAGES, max_size=3))
def test_the_terse_template_marks_the_assistant_alone(chat: list[Any], more: list[Any]) -> None:
    options = {"return_dict": False}
    ids = TERSE.apply_chat_template(chat, **options)
    spoken = sum(message["role"] == "assistant" for message in chat)
    assert [token for token in ids if token < 8] == [5, 2] * spoken
    assert TERSE.apply_chat_template([*chat, *more], **options)[: len(ids)] == ids


def test_terse_template_output() -> None:
    chat = [
        {"role": "system", "content": "Walk."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "go"},
        {"role": "tool", "content": "done", "tool_call_id": "a"},
    ]
    text = TERSE.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == " ab<|assistant|>go<|end|> done<|assistant|>"
    layout = ChatLayout(TERSE)
    assert (layout.end_id, layout.shows_tools) == (TERSE.eos_token_id, False)
    assert layout.keeps([{"role": "user", "content": "a"}], [chat[3]], NO_TOOLS, reasons=False)


def test_unknown_role_is_rejected() -> None:
    for tokenizer in (TOKENIZER, TERSE):
        with pytest.raises(TemplateError, match="got judge"):
            tokenizer.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)
