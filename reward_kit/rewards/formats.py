"""Rewards for the form of a reply: tags, regular expressions, keywords, repetition and explicit reasoning steps."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message, StepOutput
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.replies import (
    Part,
    agent_messages,
    composed,
    last_reply,
    lines_without_code,
    passed,
    quoted,
    word_count,
)
from reward_kit.typed_interface import reward_function

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]*")
Flag = Literal["ascii", "dotall", "ignorecase", "multiline", "verbose"]


def _check_tags(options: Mapping[str, Any]) -> None:
    tags = options["tags"]
    for name in tags:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"option 'tags': {name!r} is not a name; write names without angle brackets, such as 'think'"
            )
    if not tags or len(set(tags)) < len(tags):
        raise ConfigError(
            f"option 'tags' must contain at least one name, and all names must be distinct, got {tags!r:.80}"
        )


@reward_function
@checks_options(_check_tags)
def tag_format(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    tags: tuple[str, ...] = ("think", "answer"),
    allow_outside: bool = False,
    allow_empty: bool = False,
    strict_lines: bool = False,
    partial: bool = False,
    turns: Literal["last", "all"] = "last",
) -> EvaluateResult:
    """Score 1 if each tag occurs exactly once, tags are in order and not nested, and there is no text outside them.

    In all other cases, score 0. This is the format reward of DeepSeek-R1 (2025), but without the gaps in the regular
    expression with which it is usually implemented. A repeated tag or a tag inside another tag is wrong, even in a
    quotation. A tag must be written exactly as in `<think>`. A tag in a different case, or with attributes or spaces,
    counts as plain text. The reward does not judge the answer, so use it as the condition of a `gate`.

    Args:
        messages: the conversation. `reasoning_content` is not read.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        tags: the names of the tags, in order.
        allow_outside: True to allow text before, between and after tags.
        allow_empty: True to allow tags without visible content.
        strict_lines: True to require that each opening and closing tag is alone on its line.
        partial: True to score the share of correct parts. Each tag is a part, which is correct if the tag is valid and
            follows all preceding tags. The absence of text outside the tags is an additional part, which counts only if
            all tags are correct.
        turns: "last" to read the agent's last message, or "all" to average over all of the agent's messages and give
            each message a step reward. A message that only calls tools has no tags.

    Raises:
        ConfigError: If `tags` are not distinct names.

    Example:
        ```python
        tag_format(messages)  # 1 for "<think>2 + 2</think><answer>4</answer>"
        ```
    """
    _check_tags({"tags": tags})
    rules = _Rules(tags, allow_outside, allow_empty, strict_lines)
    replies = agent_messages(messages, assistant_turns)
    if not replies:
        return passed(False, "the reply is empty")
    verdicts = [_score_tags(message.text, rules, partial) for message in (replies if turns == "all" else replies[-1:])]
    if turns == "last":
        return EvaluateResult(score=verdicts[-1][0], reason=verdicts[-1][1])
    steps = [StepOutput(step_index=index, base_reward=score, reason=why) for index, (score, why) in enumerate(verdicts)]
    wrong = [why for score, why in verdicts if score < 1.0]
    reason = f"{len(wrong)} of {len(verdicts)} messages are wrong"
    return EvaluateResult(
        score=sum(score for score, _ in verdicts) / len(verdicts),
        reason=f"{reason}; the first: {wrong[0]}" if wrong else reason,
        step_outputs=steps if assistant_turns is not None else None,
    )


def _check_pattern(options: Mapping[str, Any]) -> None:
    # A missing pattern is reported together with the rollout's missing values.
    if "pattern" in options:
        _compiled(options["pattern"], options["flags"])


@reward_function(sandbox="warm")
@checks_options(_check_pattern)
def regex_format(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    pattern: str,
    where: Literal["whole", "found"] = "whole",
    flags: tuple[Flag, ...] = (),
    strip: bool = True,
    of: Part = "whole",
) -> EvaluateResult:
    r"""Score 1 if the agent's last message matches a regular expression, and 0 otherwise.

    Backtracking can take unlimited time on malicious text, so tasks run this reward in the sandbox, where limits apply.
    If a reply causes a limit to be exceeded, the rollout is unscored. A direct call has no limits.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        pattern: the regular expression, in Python syntax.
        where: "whole" to match the whole text, or "found" to search for a match anywhere in the text.
        flags: the names of flags in the `re` module.
        strip: True to ignore leading and trailing white space in the reply.
        of: the part of the reply to match: the "whole" reply, its "thought" or its "answer".

    Raises:
        ConfigError: If the pattern is empty or is not a valid regular expression.

    Example:
        ```python
        with_options(regex_format, pattern=r"Answer: \d+", where="found")
        ```
    """
    expression = _compiled(pattern, flags)
    reply = last_reply(messages, assistant_turns, of)
    text = reply.strip() if strip else reply
    if not text.strip():
        return passed(False, "the reply is empty")
    fits = (expression.fullmatch(text) if where == "whole" else expression.search(text)) is not None
    verbs = (
        ("matches", "does not match") if where == "whole" else ("contains a match of", "does not contain a match of")
    )
    return passed(fits, f"{quoted(text)} {verbs[not fits]} {quoted(pattern)}")


class _Rules(NamedTuple):
    tags: tuple[str, ...]
    allow_outside: bool
    allow_empty: bool
    strict_lines: bool


class _Tag(NamedTuple):
    """A tag in a text: its index among all tags, and the positions of its start and end."""

    order: int
    start: int
    end: int

    def is_alone(self, text: str) -> bool:
        before, after = text[: self.start].rpartition("\n")[2], text[self.end :].partition("\n")[0]
        return not before.strip() and not after.strip()


def _score_tags(text: str, rules: _Rules, partial: bool) -> tuple[float, str]:
    """Return the score of one message and a description of its first fault."""
    tags: dict[str, list[_Tag]] = {mark + name: [] for name in rules.tags for mark in ("", "/")}
    names = "|".join(re.escape(name) for name in rules.tags)
    for index, match in enumerate(re.finditer(f"<(/?(?:{names}))>", text)):
        tags[match[1]].append(_Tag(index, *match.span()))
    right, fault, behind, outside = 0, "", 0, []
    for name in rules.tags:
        problem = _fault(text, name, tags, behind, rules)
        if not problem:
            (begins,), (ends,) = tags[name], tags[f"/{name}"]
            outside.append(text[behind : begins.start])
            right, behind = right + 1, ends.end
        fault = fault or problem
    rest = "".join([*outside, text[behind:]]).strip()
    if right == len(rules.tags):
        if rules.allow_outside or not rest:
            return 1.0, "all tags are right"
        fault = f"{quoted(rest)} is outside of the tags"
    return right / (len(rules.tags) + (not rules.allow_outside)) if partial else 0.0, fault


def _fault(text: str, name: str, tags: Mapping[str, list[_Tag]], behind: int, rules: _Rules) -> str:
    """Return a description of a tag's fault, or "" if the tag is valid."""
    for key in (name, f"/{name}"):
        if len(tags[key]) != 1:
            return f"<{key}> occurs {len(tags[key])} times instead of once"
    (begins,), (ends,) = tags[name], tags[f"/{name}"]
    if ends.order < begins.order:
        return f"</{name}> comes before <{name}>"
    if ends.order != begins.order + 1:
        return f"another tag is inside <{name}>"
    if begins.start < behind:
        return f"<{name}> comes before the tag that it must follow"
    content = text[begins.end : ends.start]
    if not rules.allow_empty and not any(char.isprintable() and not char.isspace() for char in content):
        return f"<{name}> is empty"
    if rules.strict_lines and not (begins.is_alone(text) and ends.is_alone(text)):
        return f"<{name}> or its closing tag is not alone on its line"
    return ""


def _compiled(pattern: str, flags: Sequence[Flag]) -> re.Pattern[str]:
    if not pattern:
        raise ConfigError("option 'pattern' must not be empty; write a pattern that the reply must match")
    try:
        return re.compile(pattern, sum(getattr(re, flag.upper()) for flag in set(flags)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"option 'pattern': {pattern!r} is not a regular expression: {error}") from None


# Scripts written without spaces, in which words have no visible boundaries: Thai to Khmer, kana, Han.
_UNSPACED = (range(0x0E00, 0x0F00), range(0x1000, 0x10A0), range(0x1780, 0x1800), range(0x3040, 0xA000))


def _check_keywords(options: Mapping[str, Any]) -> None:
    # Missing keywords are reported together with the rollout's missing values.
    if "keywords" in options:
        _checked(options["keywords"])


@reward_function
@checks_options(_check_keywords)
def contains_all(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    keywords: tuple[str, ...],
    whole_words: bool = True,
    ignore_case: bool = True,
    partial: bool = False,
    of: Part = "answer",
) -> EvaluateResult:
    """Score 1 if the agent's last message contains every keyword, and 0 otherwise.

    A reply that merely lists the keywords also scores 1.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        keywords: words or phrases. White space in a keyword matches any white space.
        whole_words: True to require word boundaries, so "category" does not contain "cat". In scripts written without
            spaces, such as Chinese, any position counts as a boundary.
        ignore_case: True to compare text using Unicode case folding, so "STRASSE" equals "Straße".
        partial: True to score the share of keywords that were found.
        of: the part of the reply to search: the "whole" reply, its "thought" or its "answer".

    Raises:
        ConfigError: If there are no keywords, or if a keyword is empty.

    Example:
        ```python
        with_options(contains_all, keywords=("Paris", "Seine"))
        ```
    """
    wanted = _checked(keywords)
    text = _plain(last_reply(messages, assistant_turns, of), ignore_case)
    missing = [word for word in wanted if not _contains_word(text, _plain(word, ignore_case), whole_words)]
    share = 1.0 - len(missing) / len(wanted)
    reason = f"{len(wanted) - len(missing)} of {len(wanted)} keywords were found"
    if missing:
        reason += f"; missing: {', '.join(quoted(word, 20) for word in missing[:5])}"
    return EvaluateResult(score=share if partial else float(not missing), reason=reason)


@reward_function
@checks_options(_check_keywords)
def contains_none(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    keywords: tuple[str, ...],
    whole_words: bool = True,
    ignore_case: bool = True,
    of: Part = "answer",
) -> EvaluateResult:
    """Score 1 if the agent's last message is not empty and contains none of the keywords.

    In all other cases, score 0. Deliberate misspellings and similar-looking letters from a different script are not
    detected. The other arguments have the same meaning as in `contains_all`.

    Args:
        keywords: the unwanted words or phrases.

    Raises:
        ConfigError: If there are no keywords, or if a keyword is empty.

    Example:
        ```python
        with_options(contains_none, keywords=("as an AI", "I cannot"))
        ```
    """
    unwanted = _checked(keywords)
    text = _plain(last_reply(messages, assistant_turns, of), ignore_case)
    if not text:
        return passed(False, "the reply is empty")
    held = [word for word in unwanted if _contains_word(text, _plain(word, ignore_case), whole_words)]
    listed = ", ".join(quoted(word, 20) for word in held[:5])
    return passed(
        not held, f"the reply contains {listed}" if held else f"the reply contains none of {len(unwanted)} keywords"
    )


def _checked(keywords: Sequence[str]) -> Sequence[str]:
    if not keywords or not all(_plain(word, ignore_case=True) for word in keywords):
        raise ConfigError(
            f"option 'keywords' must contain at least one keyword, and no keyword may be empty, got {keywords!r:.80}"
        )
    return tuple(dict.fromkeys(keywords))


def _plain(text: str, ignore_case: bool) -> str:
    """Normalize characters and white space in `text`, and fold its case if `ignore_case` is set."""
    folded = composed(text, "NFC").casefold() if ignore_case else text
    return " ".join(composed(folded, "NFC").split())


def _contains_word(text: str, word: str, whole_words: bool) -> bool:
    """Return True if the text contains the word. This takes linear time."""
    start = text.find(word)
    while start >= 0:
        ends = (start, start + len(word))
        if not whole_words or not any(
            0 < end < len(text) and _is_word_char(text[end - 1]) and _is_word_char(text[end]) for end in ends
        ):
            return True
        start = text.find(word, start + 1)
    return False


def _is_word_char(char: str) -> bool:
    if char.isascii():
        return char.isalnum() or char == "_"
    if any(ord(char) in block for block in _UNSPACED):
        return False
    return char.isalnum() or unicodedata.category(char)[0] == "M"


_LONGEST_WORD, _PIECE = 40, 10


@reward_function
def no_repetition(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    ngram: Annotated[int, Field(ge=1, le=1000)] = 3,
    unit: Literal["words", "characters"] = "words",
    max_penalty: Annotated[float, Field(ge=0, le=1)] = 1.0,
    of: Part = "whole",
) -> EvaluateResult:
    """Score 1 minus `max_penalty` times the share of n-grams that occurred earlier in the reply.

    This share is 1 minus the ratio of distinct n-grams to all n-grams, as in Appendix C.2 of "Demystifying Long
    Chain-of-Thought Reasoning in LLMs" (Yeo et al. 2025, arXiv 2502.03373). The published reward is this score minus 1.
    A reply shorter than one n-gram scores 1, and an empty reply scores 0.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        ngram: the number of units in each n-gram. Small values penalize ordinary phrases. For example, the value 3
            penalizes "one of the".
        unit: "words", which are separated by white space, or "characters" for languages without spaces. For such
            languages, a value from 10 to 20 works well for `ngram`. Case is ignored. A word of more than 40 characters
            is divided into pieces of 10 characters, so omitting spaces does not hide repetition.
        max_penalty: the penalty for a reply that consists only of repetition.
        of: the part of the reply to check: the "whole" reply, its "thought" or its "answer".

    Example:
        ```python
        with_options(no_repetition, ngram=20, of="thought")
        ```
    """
    text = last_reply(messages, assistant_turns, of).casefold()
    units = [char for char in text if not char.isspace()] if unit == "characters" else []
    for word in text.split() if unit == "words" else ():
        size = len(word) if len(word) <= _LONGEST_WORD else _PIECE
        units += [word[start : start + size] for start in range(0, len(word), size)]
    if not units:
        return passed(False, "the reply is empty")
    total = max(0, len(units) - ngram + 1)
    different = _count_distinct(units, ngram) if total else 0
    share = 1.0 - different / total if total else 0.0
    reason = f"{total - different} of {total} {ngram}-grams of {unit} are repetitions"
    return EvaluateResult(score=1.0 - max_penalty * share, reason=reason)


def _count_distinct(units: list[str], ngram: int) -> int:
    """Count the distinct n-grams.

    Each run of units gets a number, and equal runs get equal numbers. The numbers for longer runs are computed from
    pairs of overlapping shorter runs, and the run length doubles each time. Each doubling takes O(n log n) time, and no
    n-gram is stored.
    """
    known: dict[str, int] = {}
    numbers: NDArray[np.int64] = np.array([known.setdefault(unit, len(known)) for unit in units], dtype=np.int64)
    length = 1
    while length < ngram:
        step = min(length, ngram - length)
        pairs = numbers[:-step] * len(units) + numbers[step:]
        numbers = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        length += step
    return int(np.unique(numbers).size)


OPENERS = (
    *("first", "firstly", "first of all", "second", "secondly", "third", "thirdly", "fourth", "fifth"),
    *("next", "then", "after that", "finally", "lastly"),
)
"""Phrases that start a step if a comma follows."""
_DECORATION = re.compile(r"[\s>#*_]*")
_BULLET = re.compile(r"[-*+•–](?=[ \t])")
_NUMBER = re.compile(r"(?:\(\d{1,3}\)|\d{1,3}[.)])(?:\*\*|__)?(?=\s|$)")
_STEP = r"step[ \t]{1,3}\d{1,3}\b"
_SENTENCE = r"(?:^[\s>#*_]{0,8}|(?<=[.!?:;,][ \t]))"
_TAG = re.compile(r"</?[A-Za-z]{1,20}>")
_WORDS = re.compile(r"\w+")


@reward_function
def reasoning_steps(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    at_least: Annotated[int, Field(ge=1)] = 3,
    min_words: Annotated[int, Field(ge=1)] = 3,
    openers: tuple[str, ...] = OPENERS,
    of: Part = "whole",
) -> EvaluateResult:
    """Score the number of explicit reasoning steps divided by `at_least`, up to a maximum of 1.

    A step starts with a number ("1.", "2)", "(3)") or a bullet at the start of a line, with "Step 4", or with an opener
    such as "First," at the start of a sentence or after a comma. Steps without words are ignored, and identical steps
    count only once. The reward measures only the form of the reply, so incorrect steps count as well.

    This reward is based on the reward of the same name in Open-R1 (Hugging Face 2025). Unlike this reward, the Open-R1
    reward also counts markers without text, horizontal rules and repeated steps.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        at_least: the number of steps required for a score of 1.
        min_words: the minimum number of words or numbers after the marker of a step.
        openers: phrases that start a step if they are followed by a comma. Case is ignored.
        of: the part of the reply to check: the "whole" reply, its "thought" or its "answer". Fenced code is ignored.

    Example:
        ```python
        with_options(reasoning_steps, at_least=5, of="thought")
        ```
    """
    text = _TAG.sub("\n", "\n".join(lines_without_code(last_reply(messages, assistant_turns, of))))
    phrases = "|".join(re.escape(phrase.strip()) for phrase in openers if phrase.strip())
    opened = rf"|(?:{phrases})[ \t]?[,，、]" if phrases else ""
    markers = _markers(text, re.compile(rf"{_SENTENCE}(?:{_STEP}[ \t]?[:.)\-–—]?{opened})", re.IGNORECASE))
    steps = []  # the rest of the line after the marker or, if that is too short, the text up to the next marker
    for (_, start), end in zip(markers, [*(start for start, _ in markers[1:]), len(text)], strict=False):
        line = text[start:end].partition("\n")[0]
        steps.append(line if word_count(line) >= min_words else text[start:end])
    different = {tuple(_WORDS.findall(step.casefold())) for step in steps if word_count(step) >= min_words}
    reason = (
        f"{len(different)} different steps with words were found after {len(steps)} markers; {at_least} are required"
    )
    return EvaluateResult(score=min(1.0, len(different) / at_least), reason=reason)


def _markers(text: str, inline: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return the start and end of every marker in the text.

    A line can have one marker at its start and any number of markers within its sentences. Adjacent markers, as in
    "- Step 1:", count as one.
    """
    markers: list[tuple[int, int]] = []
    position = 0
    for line in text.split("\n"):
        spans: list[tuple[int, int]] = []
        after = begins = len(line) - len(line.lstrip())
        bullet = _BULLET.match(line, begins)
        decoration = _DECORATION.match(line, bullet.end() if bullet else begins)
        number = _NUMBER.match(line, decoration.end() if decoration else begins)
        if last := number or bullet:
            spans.append((begins, last.end()))
            after = last.end()
        spans += [(after + match.start(), after + match.end()) for match in inline.finditer(line[after:])]
        for start, end in spans if line.strip() else ():
            start, end = position + start, position + end
            if markers and markers[-1][0] >= position and not text[markers[-1][1] : start].strip("*_ \t"):
                markers[-1] = (markers[-1][0], end)
            else:
                markers.append((start, end))
        position += len(line) + 1
    return markers
