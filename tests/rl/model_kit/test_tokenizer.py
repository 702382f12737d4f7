"""Test the domain tokenizer: lossless for known text, with counts of unknown pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from reward_kit.errors import ConfigError
from reward_kit.rl.model_kit.models import build_tokenizer, unknown_pieces

HOUSE = [
    "You see a fridge 1, and (on the cabinet 12) a cup 3.\n\nYou  wait...",
    "take cup 3 from cabinet 12",
    '{"name": "act", "arguments": {"command": "go to fridge 1"}}',
]
THINGS = [r"[a-z]+ \d+"]
BYTES = build_tokenizer(level="byte")
WORDS = build_tokenizer(HOUSE, units=THINGS)


def pieces(text: str) -> list[str]:
    return [WORDS.decode([token]) for token in WORDS.encode(text, add_special_tokens=False)]


def test_multi_word_unit_is_a_single_token() -> None:
    assert pieces("take cup 3 from cabinet 12") == ["take", " cup 3", " from", " cabinet 12"]


def test_the_first_unit_that_matches_counts() -> None:
    tokenizer = build_tokenizer(HOUSE, units=[r'\{"name": "act", "arguments": \{"command": "', *THINGS])
    ids = tokenizer.encode(HOUSE[2], add_special_tokens=False)
    assert len(ids) == 7  # the head, go, to, fridge 1, and three signs at the end


@pytest.mark.parametrize("text", HOUSE)
def test_text_of_known_pieces_round_trips(text: str) -> None:
    assert WORDS.decode(WORDS.encode(text, add_special_tokens=False)) == text
    assert unknown_pieces(WORDS, [text]) == {}


@given(st.lists(st.sampled_from([" fridge 1", "\n", ".", " ", " cup 3", " (", ")", " to"]), max_size=8))
def test_known_pieces_in_any_order_round_trip(chosen: list[str]) -> None:
    text = "".join(["go", *chosen])
    assert WORDS.decode(WORDS.encode(text, add_special_tokens=False)) == text


def test_decoded_tokens_concatenate_to_the_text() -> None:
    assert "".join(pieces(HOUSE[0])) == HOUSE[0]


def test_words_are_known_with_and_without_a_leading_space() -> None:
    assert pieces("cup 3 take") == ["cup 3", " take"]


def test_unknown_pieces_are_counted() -> None:
    found = unknown_pieces(WORDS, ["take spoon 1", "eat spoon 1 from fridge 1"])
    assert found == {" spoon 1": 2, "eat": 1}
    assert WORDS.decode(WORDS.encode("take spoon 1")) == "take<|unknown|>"
    assert unknown_pieces(BYTES, ["ÿ"]) == {}


def test_vocabulary_can_be_built_from_words_only() -> None:
    tokenizer = build_tokenizer(words=["go to", "fridge 1"], units=THINGS)
    assert unknown_pieces(tokenizer, ["go to fridge 1"]) == {}


def test_single_spaces_save_tokens_and_lose_line_breaks() -> None:
    tokenizer = build_tokenizer(HOUSE, units=THINGS, spaces="single")
    assert (
        tokenizer.decode(tokenizer.encode(HOUSE[0]))
        == "You see a fridge 1, and (on the cabinet 12) a cup 3. You wait..."
    )


def test_dropped_patterns_are_removed() -> None:
    tokenizer = build_tokenizer(HOUSE, units=THINGS, spaces="none", dropped=[r"(?i)\b(?:you|a|the|on)\b", r"[^\w\s]"])
    ids = tokenizer.encode(HOUSE[0], add_special_tokens=False)
    assert tokenizer.decode(ids) == "see fridge 1 and cabinet 12 cup 3 wait"
    # A word has one form, whatever stands before it.
    assert tokenizer.encode("(cup 3)\n cup 3", add_special_tokens=False) == [ids[4]] * 2
    assert unknown_pieces(tokenizer, HOUSE) == {}


def test_dropped_patterns_can_include_spaces() -> None:
    tokenizer = build_tokenizer(HOUSE, units=THINGS, dropped=[r" from [a-z]+ \d+"])
    assert tokenizer.decode(tokenizer.encode(HOUSE[1])) == "take cup 3"
    bytewise = build_tokenizer(level="byte", dropped=["[aeiou]"], spaces="single")
    assert bytewise.decode(bytewise.encode("take  cup 3 ")) == "tk cp 3"


def test_lossy_tokenizer_is_saved_and_loaded(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(HOUSE, units=THINGS, spaces="none", dropped=[r"[^\w\s]", "act"])
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in HOUSE:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30))  # marks begin with "<"
def test_byte_level_tokenizer_is_lossless(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    assert BYTES.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert len(BYTES) == 256 + 10


def test_special_tokens_come_first_and_are_one_token_each() -> None:
    for tokenizer in (WORDS, BYTES):
        marks = [
            "<|pad|>",
            "<|unknown|>",
            "<|end|>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|tool|>",
            "<|tools|>",
        ]
        assert tokenizer.encode("".join(marks), add_special_tokens=False) == list(range(8))
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
        # A call's markers are text that is parsed.
        call = tokenizer.encode("<tool_call></tool_call><|end|>", add_special_tokens=False)
        assert call == [8, 9, 2]
        assert tokenizer.decode(call, skip_special_tokens=True) == "<tool_call></tool_call>"


@pytest.mark.parametrize("tokenizer", [WORDS, BYTES], ids=["words", "bytes"])
def test_tokenizer_is_saved_and_loaded(tokenizer: object, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "take cup 3"}, {"role": "assistant", "content": "(You wait...)"}]
    for add in (True, False):
        options = {"add_generation_prompt": add, "return_dict": False}
        assert loaded.apply_chat_template(chat, **options) == tokenizer.apply_chat_template(chat, **options)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.decode(loaded.encode(HOUSE[0])) == HOUSE[0]
    assert (loaded.pad_token, loaded.eos_token, loaded.unk_token) == (
        tokenizer.pad_token,
        tokenizer.eos_token,
        tokenizer.unk_token,
    )


def test_equal_texts_give_equal_ids() -> None:
    assert build_tokenizer(HOUSE, units=THINGS).get_vocab() == WORDS.get_vocab()


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ConfigError, match="requires texts or words"):
        build_tokenizer()
    with pytest.raises(ConfigError, match="builds no vocabulary"):
        build_tokenizer(HOUSE, level="byte")
    with pytest.raises(ConfigError, match=r"units: '\(' is not a valid regular expression"):
        build_tokenizer(HOUSE, units=["("])
    with pytest.raises(ConfigError, match=r"dropped: '\(' is not a valid regular expression"):
        build_tokenizer(HOUSE, dropped=["("])
    with pytest.raises(ConfigError, match="unknown spaces 'some'"):
        build_tokenizer(HOUSE, spaces="some")
    with pytest.raises(ConfigError, match="unknown level 'letter'"):
        build_tokenizer(HOUSE, level="letter")
