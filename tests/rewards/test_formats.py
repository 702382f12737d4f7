"""Test tags and regular expressions, with known gaps of published format rewards."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.rewards.formats import regex_format, tag_format
from tests.rewards.forms import ask, histories, long, said, texts, turns

GOOD = "<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>"
SHORT = "<think>2 + 2</think><answer>4</answer>"
TAGS: dict[str, tuple[str | None, dict, float]] = {
    "open-r1's form": (GOOD, {}, 1.0),
    "newlines are not needed": (SHORT, {}, 1.0),
    "white space around": (f"\n  {GOOD}\n\n", {}, 1.0),
    "several lines": ("<think>a\n\nb</think>\n\n\n<answer>4\n5</answer>", {}, 1.0),
    "unicode": ("<think>漢字</think><answer>é</answer>", {}, 1.0),
    "other markup inside": ("<think>x < 3 and <b>y</b></think><answer>4</answer>", {}, 1.0),
    "empty": ("", {}, 0.0),
    "nothing": (None, {}, 0.0),
    "plain": ("4", {}, 0.0),
    "no answer": ("<think>2 + 2</think>", {}, 0.0),
    "no thought": ("<answer>4</answer>", {}, 0.0),
    "not closed": ("<think>2 + 2</think><answer>4", {}, 0.0),
    "thought not closed": ("<think>2 + 2<answer>4</answer>", {}, 0.0),
    "not opened": ("2 + 2</think><answer>4</answer>", {}, 0.0),
    "wrong order": ("<answer>4</answer><think>2 + 2</think>", {}, 0.0),
    "nested": ("<think>2 + 2<answer>4</answer></think>", {}, 0.0),
    "crossed": ("<think>2 + 2<answer></think>4</answer>", {}, 0.0),
    "closed before opened": ("</think>2<think><answer>4</answer>", {}, 0.0),
    "open-r1: thought repeated inside": ("<think>a</think><think>b</think><answer>4</answer>", {}, 0.0),
    "open-r1: answer repeated": (SHORT + "<answer>5</answer>", {}, 0.0),
    "open-r1: text behind on a new line": (GOOD + "\nand so on", {}, 0.0),
    "open-r1: tags quoted in the thought": (
        "<think>I write <answer>4</answer> at the end</think><answer>4</answer>",
        {},
        0.0,
    ),
    "the whole form twice": (GOOD + GOOD, {}, 0.0),
    "text before": ("Sure! " + SHORT, {}, 0.0),
    "text between": ("<think>a</think>so<answer>4</answer>", {}, 0.0),
    "invisible text behind": (SHORT + "\u200b", {}, 0.0),
    "attributes": ('<think id="1">a</think><answer>4</answer>', {}, 0.0),
    "blank in the tag": ("<think >a</think><answer>4</answer>", {}, 0.0),
    "capitals": ("<Think>a</Think><Answer>4</Answer>", {}, 0.0),
    "self-closing": ("<think/><answer>4</answer>", {}, 0.0),
    "escaped": ("&lt;think&gt;a&lt;/think&gt;<answer>4</answer>", {}, 0.0),
    "full-width brackets": ("＜think＞a＜/think＞<answer>4</answer>", {}, 0.0),
    "in a code block": (f"```\n{SHORT}\n```", {}, 0.0),
    "empty thought": ("<think></think><answer>4</answer>", {}, 0.0),
    "blank thought": ("<think> \n </think><answer>4</answer>", {}, 0.0),
    "invisible thought": ("<think>\u200b\u2060\x00</think><answer>4</answer>", {}, 0.0),
    "empty thought allowed (Qwen3)": ("<think>\n\n</think>\n<answer>4</answer>", {"allow_empty": True}, 1.0),
    "outside allowed": ("Sure! " + SHORT + " Bye", {"allow_outside": True}, 1.0),
    "outside allowed, repeated is not": (SHORT + " <answer>", {"allow_outside": True}, 0.0),
    "strict: open-r1's form": (GOOD, {"strict_lines": True}, 1.0),
    "strict: windows lines": (GOOD.replace("\n", "\r\n"), {"strict_lines": True}, 1.0),
    "strict: on one line": (SHORT, {"strict_lines": True}, 0.0),
    "strict: text beside a tag": (GOOD.replace("\n4", "4"), {"strict_lines": True}, 0.0),
    "one tag": ("<answer>4</answer>", {"tags": ("answer",)}, 1.0),
    "thought alone, text behind": ("<think>a</think>\n4", {"tags": ("think",), "allow_outside": True}, 1.0),
    "three tags": ("<a>1</a><b>2</b><c>3</c>", {"tags": ("a", "b", "c")}, 1.0),
    "a name that begins another": ("<a>1</a><ab>2</ab>", {"tags": ("a", "ab")}, 1.0),
    "a name with a dot is no pattern": ("<a.b>1</a.b>", {"tags": ("a.b",)}, 1.0),
    "a name with a dot is no pattern (2)": ("<axb>1</axb>", {"tags": ("a.b",)}, 0.0),
    "partial: all": (GOOD, {"partial": True}, 1.0),
    "partial: text outside": ("Sure " + SHORT, {"partial": True}, 2 / 3),
    "partial: one of two": ("<think>a</think>4", {"partial": True}, 1 / 3),
    "partial: one of two, outside allowed": ("<think>a</think>4", {"partial": True, "allow_outside": True}, 1 / 2),
    "partial: tag count's reversed tags": ("</answer></think><answer><think>", {"partial": True}, 0.0),
    "partial: wrong order": ("<answer>4</answer><think>a</think>", {"partial": True}, 1 / 3),
    "partial: empty": ("", {"partial": True}, 0.0),
    "partial: bare tags": ("<think></think><answer></answer>", {"partial": True}, 0.0),
    "partial: nested": ("<think>2 + 2<answer>4</answer></think>", {"partial": True}, 1 / 3),
    "partial: repeated earns for the other": (SHORT + "<answer>", {"partial": True}, 1 / 3),
}


@pytest.mark.parametrize(("reply", "options", "score"), TAGS.values(), ids=TAGS)
def test_tags_must_occur_once_in_order_and_closed(reply, options, score):
    assert ask(tag_format, reply, **options).score == pytest.approx(score)


def test_the_reason_names_the_fault():
    assert "<answer> occurs 2 times" in ask(tag_format, SHORT + "<answer>5</answer>").reason
    assert '"Sure!" is outside' in ask(tag_format, "Sure! " + SHORT).reason
    assert "inside <think>" in ask(tag_format, "<think>a<answer>4</answer></think>").reason


def test_turns_option_scores_every_turn_as_a_step_output():
    history = [*said("example"), *said(SHORT), *said("4"), *said(SHORT), Message(role="tool", content="x")]
    result = tag_format(history, [3, 5, 7], turns="all")
    assert result.score == pytest.approx(2 / 3)
    assert [(step.step_index, step.base_reward) for step in result.step_outputs] == [(0, 1.0), (1, 0.0), (2, 1.0)]
    assert "1 of 3" in result.reason
    assert tag_format(history, [3, 5, 7]).score == 1.0
    assert tag_format(history, [3, 5]).score == 0.0
    assert tag_format(history, None, turns="all").score == pytest.approx(2 / 4)
    assert tag_format(history, None, turns="all").step_outputs is None
    assert tag_format(history, [], turns="all").score == 0.0, "the agent has not spoken"


@pytest.mark.parametrize("tags", [(), ("a", "a"), ("",), ("<think>",), ("1",), ("a b",)])
def test_invalid_tag_names_are_rejected(tags):
    with pytest.raises(ConfigError, match="option 'tags'"):
        ask(tag_format, "x", tags=tags)


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "a", " "]


@given(st.lists(st.sampled_from(PIECES), max_size=7).map("".join))
def test_tag_format_agrees_with_a_grammar(reply):
    grammar = r"\s*<think>([^<]*[^<\s][^<]*)</think>\s*<answer>([^<]*[^<\s][^<]*)</answer>\s*"
    assert ask(tag_format, reply).score == float(re.fullmatch(grammar, reply) is not None)


@given(texts, st.booleans(), st.booleans(), st.booleans())
def test_more_permissive_options_never_lower_the_score(reply, outside, empty, strict):
    plain = ask(tag_format, reply, allow_outside=outside, allow_empty=empty, strict_lines=strict)
    assert ask(tag_format, reply, allow_outside=True, allow_empty=True).score >= plain.score
    partial = ask(tag_format, reply, allow_outside=outside, allow_empty=empty, strict_lines=strict, partial=True)
    assert plain.score <= partial.score <= 1
    assert (partial.score == 1) == (plain.score == 1)


@given(histories, turns, st.sampled_from(["last", "all"]))
def test_tag_format_scores_any_history(history, own, which):
    assert 0 <= tag_format(history, own, turns=which, partial=True).score <= 1


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<", "<think>a</think>", " ", "\n", "<answer ", "</"])
def test_a_megabyte_is_read_in_linear_time(piece):
    assert ask(tag_format, long(piece), partial=True, strict_lines=True).score <= 1 / 3


REGEX: dict[str, tuple[str | None, dict, float]] = {
    "whole": ("Answer: 42", {"pattern": r"Answer: \d+"}, 1.0),
    "whole: a line more": ("Answer: 42\nBye", {"pattern": r"Answer: \d+"}, 0.0),
    "whole: text before": ("So Answer: 42", {"pattern": r"Answer: \d+"}, 0.0),
    "whole: $ and a new line": ("42\n", {"pattern": r"^\d+$", "strip": False}, 0.0),
    "whole: white space is left out": ("\n 42 \n", {"pattern": r"\d+"}, 1.0),
    "whole: white space counts": (" 42", {"pattern": r"\d+", "strip": False}, 0.0),
    "whole: an alternative is whole": ("ab", {"pattern": r"a|ab"}, 1.0),
    "whole: multiline matches no single line": ("x\n42", {"pattern": r"^\d+$", "flags": ("multiline",)}, 0.0),
    "found": ("So Answer: 42.", {"pattern": r"Answer: \d+", "where": "found"}, 1.0),
    "found: nowhere": ("So Answer: ?", {"pattern": r"Answer: \d+", "where": "found"}, 0.0),
    "found: anchored": ("x 42", {"pattern": r"^\d+", "where": "found"}, 0.0),
    "found: a line": ("x\n42\ny", {"pattern": r"^\d+$", "where": "found", "flags": ("multiline",)}, 1.0),
    "found: an empty match": ("x", {"pattern": r"\d*", "where": "found"}, 1.0),
    "no dotall": ("a\nb", {"pattern": r"a.b"}, 0.0),
    "dotall": ("a\nb", {"pattern": r"a.b", "flags": ("dotall",)}, 1.0),
    "case": ("ANSWER", {"pattern": r"answer"}, 0.0),
    "ignorecase": ("ANSWER", {"pattern": r"answer", "flags": ("ignorecase",)}, 1.0),
    "verbose": ("42", {"pattern": r"\d+  # digits", "flags": ("verbose",)}, 1.0),
    "unicode digits": ("٤٢", {"pattern": r"\d+"}, 1.0),
    "ascii digits": ("٤٢", {"pattern": r"\d+", "flags": ("ascii",)}, 0.0),
    "flags twice": ("A\nB", {"pattern": r"a.b", "flags": ("dotall", "ignorecase", "dotall")}, 1.0),
    "inline flags": ("ANSWER", {"pattern": r"(?i)answer"}, 1.0),
    "empty reply": ("", {"pattern": r".*"}, 0.0),
    "no text": (None, {"pattern": r".*"}, 0.0),
    "blank reply": (" \n", {"pattern": r"\s*", "strip": False}, 0.0),
    "open-r1's form": (
        GOOD,
        {"pattern": r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>", "flags": ("dotall",)},
        1.0,
    ),
    "back reference": ("<a>x</a>", {"pattern": r"<(\w)>x</\1>"}, 1.0),
    "look ahead": ("a1", {"pattern": r"(?=.*\d).+"}, 1.0),
    "of the answer": ("<think>hm</think>42", {"pattern": r"\d+", "of": "answer"}, 1.0),
    "of the thought": ("<think>hm</think>42", {"pattern": r"hm", "of": "thought"}, 1.0),
    "of the whole": ("<think>hm</think>42", {"pattern": r"\d+"}, 0.0),
    "surrogate": ("\ud800", {"pattern": r"."}, 1.0),
    "unicode": ("Größe", {"pattern": r"\w+"}, 1.0),
}


@pytest.mark.parametrize(("reply", "options", "score"), REGEX.values(), ids=REGEX)
def test_reply_is_matched_against_the_pattern(reply, options, score):
    assert ask(regex_format, reply, **options).score == score


@pytest.mark.parametrize("pattern", ["", "(", "[a", "*", "x{99999999999}", "(?P<a>x)(?P<a>y)", "\\"])
def test_invalid_pattern_is_rejected(pattern):
    with pytest.raises(ConfigError, match="option 'pattern'"):
        ask(regex_format, "x", pattern=pattern)


def test_unknown_regex_flags_are_rejected():
    with pytest.raises(ConfigError, match="flags"):
        with_options(regex_format, pattern="x", flags=("debug",))


@given(
    histories, turns, st.sampled_from([r"\w+", "(a|b)*c?", "<think>.*</think>"]), st.sampled_from(["whole", "found"])
)
def test_regex_format_scores_any_history_zero_or_one(history, own, pattern, where):
    assert regex_format(history, own, pattern=pattern, where=where).score in (0, 1)


@given(texts, texts)
def test_escaped_text_matches_itself(text, more):
    if text.strip():
        assert ask(regex_format, text, pattern=re.escape(text.strip())).score == 1
        assert ask(regex_format, more + text, pattern=re.escape(text), where="found", strip=False).score == 1


async def test_backtracking_pattern_times_out_in_the_sandbox():
    loaded = load_reward("reward_kit.rewards:regex_format", None, SandboxChoice(reward_time_s=1), {"pattern": "(a+)+b"})
    async with make_scorer(loaded.reward) as scorer:
        for text, score in (("aab", 1.0), ("a" * 60, None), ("b", 0.0)):
            scored = await scorer.score(ScoringRequest("r", said(text), assistant_turns=[1]))
            assert (scored.score, scored.sandbox["level"]) == (score, "warm")
