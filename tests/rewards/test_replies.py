"""Replies and their parts in a conversation."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.models import Message
from reward_kit.rewards.replies import composed, last_answer, last_reply, lines_without_code, message_part, word_count
from tests.rewards.forms import MEGABYTE, histories, messages, said, turns

PARTS = {
    "plain": ("yes", None, "yes", "", "yes"),
    "empty": ("", None, "", "", ""),
    "nothing": (None, None, "", "", ""),
    "thought and answer": ("<think>hm</think>yes", None, "<think>hm</think>yes", "hm", "yes"),
    "template opened the thought": ("hm</think>yes", None, "hm</think>yes", "hm", "yes"),
    "thought does not end": ("well <think>hm", None, "well <think>hm", "hm", "well"),
    "two ends": ("<think>a</think>b</think>c", None, "<think>a</think>b</think>c", "a</think>b", "c"),
    "set apart": ("yes", "hm", "hm\nyes", "hm", "yes"),
    "set apart, no text": (None, "hm", "hm", "hm", ""),
    "set apart and in the text": ("<think>b</think>yes", "a", "a\n<think>b</think>yes", "a\nb", "yes"),
}


@pytest.mark.parametrize(("text", "apart", "whole", "thought", "answer"), PARTS.values(), ids=PARTS)
def test_a_reply_has_a_thought_and_an_answer(text, apart, whole, thought, answer):
    message = Message(role="assistant", content=text, reasoning_content=apart)
    assert [message_part(message, part) for part in ("whole", "thought", "answer")] == [whole, thought, answer]


@given(messages)
def test_answer_part_equals_last_answer(message):
    assert message_part(message, "answer") == last_answer([message.model_copy(update={"role": "assistant"})])


def test_example_in_the_prompt_is_not_a_reply():
    history = [*said("example"), *said("mine")]
    assert last_reply(history, [3]) == "mine"
    assert last_reply(history[:3], []) == "", "the agent has not spoken"
    assert last_reply(history[:3], None) == "example", "a transcript without a record of who spoke"


@given(histories, turns)
def test_last_reply_accepts_any_history(history, own):
    assert isinstance(last_reply(history, own), str)


WORDS = [
    ("", 0), (" \n", 0), ("one", 1), ("one two", 2), ("one-two", 1), ("- ... !", 0), ("x = 3 + 4", 3), ("don't", 1),
    ("漢字", 2), ("使用 GPU 模型", 5), ("ได้", 3), ("हिन्दी में", 2), ("값 은", 2), ("\ud800", 0), ("½ apple", 2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "count"), WORDS)
def test_words_have_a_letter_or_digit(text, count):
    assert word_count(text) == count


CODE = {
    "none": ("a\nb", ["a", "b"]),
    "fenced": ("a\n```python\nx\n```\nb", ["a", "b"]),
    "tildes": ("a\n~~~\n```\nx\n~~~\nb", ["a", "b"]),
    "not closed": ("a\n```\nx", ["a"]),
    "indented": ("a\n  ```\nx\n  ```\nb", ["a", "b"]),
    "closing has no tag": ("```\nx\n```python\ny\n```\nb", ["b"]),
    "inline": ("a ```x``` b", ["a ```x``` b"]),
    "inline at the beginning": ("```x``` b\nc", ["```x``` b", "c"]),
}


@pytest.mark.parametrize(("text", "lines"), CODE.values(), ids=CODE)
def test_fenced_code_is_left_out(text, lines):
    assert list(lines_without_code(text)) == lines


def test_a_letter_with_a_million_marks_is_composed_in_linear_time():
    text = "a" + "\u0315\u0300" * (MEGABYTE // 2)  # unicodedata.normalize takes minutes for this
    assert len(composed(text, "NFC")) < 40


@given(st.text(max_size=50))
def test_composed_agrees_with_unicode_normalization(text):
    assert composed(text, "NFKC") == unicodedata.normalize("NFKC", text)
    assert composed("e\u0301" + text, "NFC") == unicodedata.normalize("NFC", "e\u0301" + text)
