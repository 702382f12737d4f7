"""Rewards for the form of a reply: tags, a regular expression, keywords, repetition, and visible reasoning steps."""

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
            raise ConfigError(f"option 'tags': {name!r} is not a name; write names without brackets, such as 'think'")
    if not tags or len(set(tags)) < len(tags):
        raise ConfigError(f"option 'tags': write at least one name, and each once, not {tags!r:.80}")


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
    """1 if each tag stands exactly once, in order, closed, not in another one, and nothing stands outside.

    The format reward of DeepSeek-R1 (2025) without the gaps of its usual regular expression: a repeated tag, or one
    within the content of a tag, even as a quotation, is wrong. A tag is `<think>` to the letter: other case, attributes
    and blanks make it plain text. It does not judge the answer: put it before a `gate`.

    Args:
        messages: the conversation, without `reasoning_content`.
        assistant_turns: the positions of the agent's own messages; by default all assistant messages.
        tags: their names, in order.
        allow_outside: text may stand before, between and after them.
        allow_empty: a tag may have no visible content.
        strict_lines: each tag stands alone on its line.
        partial: earn the share of what is right: each tag that is right by itself and behind those before it, and, once
            all are, that nothing stands outside. Tags without order or content earn nothing.
        turns: "last": the agent's last message; "all": the mean over each of them, each one its step's reward. A
            message that only calls tools has no tags.

    Raises:
        ConfigError: `tags` are not different names.

    Example:
        ```python
        tag_format(messages)  # 1 for "<think>2 + 2</think><answer>4</answer>"
        ```
    """
    _check_tags({"tags": tags})
    rules = _Rules(tags, allow_outside, allow_empty, strict_lines)
    own = agent_messages(messages, assistant_turns)
    if not own:
        return passed(False, "the reply is empty")
    verdicts = [_score_tags(message.text, rules, partial) for message in (own if turns == "all" else own[-1:])]
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
    r"""1 if the agent's last message fits a regular expression of Python's `re`, else 0.

    Backtracking takes forever on a text made for it, so a task runs this reward in the sandbox with its limits; a reply
    that reaches a limit is unscored. A direct call has no limit.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; by default all assistant messages.
        pattern: the expression.
        where: "whole": it fits from the first to the last character; "found": it fits somewhere.
        flags: of `re`, by name.
        strip: leave out white space around the reply.
        of: the "whole" reply, its "thought", or its "answer".

    Raises:
        ConfigError: the pattern is empty or not a regular expression.

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
    verbs = ("fits", "does not fit") if where == "whole" else ("holds a match of", "does not hold a match of")
    return passed(fits, f"{quoted(text)} {verbs[not fits]} {quoted(pattern)}")


class _Rules(NamedTuple):
    tags: tuple[str, ...]
    allow_outside: bool
    allow_empty: bool
    strict_lines: bool


class _Tag(NamedTuple):
    """A tag in a text: its position among all of them, its start and its end."""

    order: int
    start: int
    end: int

    def is_alone(self, text: str) -> bool:
        """Report whether the tag stands alone on its line."""
        before, after = text[: self.start].rpartition("\n")[2], text[self.end :].partition("\n")[0]
        return not before.strip() and not after.strip()


def _score_tags(text: str, rules: _Rules, partial: bool) -> tuple[float, str]:
    """Return the score of one message, and the first fault in it."""
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
            return 1.0, "every tag stands as it must"
        fault = f"{quoted(rest)} stands outside of the tags"
    return right / (len(rules.tags) + (not rules.allow_outside)) if partial else 0.0, fault


def _fault(text: str, name: str, tags: Mapping[str, list[_Tag]], behind: int, rules: _Rules) -> str:
    """Return the fault of a tag, or ""."""
    for key in (name, f"/{name}"):
        if len(tags[key]) != 1:
            return f"<{key}> stands {len(tags[key])} times and not once"
    (begins,), (ends,) = tags[name], tags[f"/{name}"]
    if ends.order < begins.order:
        return f"</{name}> stands before <{name}>"
    if ends.order != begins.order + 1:
        return f"another tag stands inside of <{name}>"
    if begins.start < behind:
        return f"<{name}> stands before the tag that it must follow"
    content = text[begins.end : ends.start]
    if not rules.allow_empty and not any(char.isprintable() and not char.isspace() for char in content):
        return f"<{name}> is empty"
    if rules.strict_lines and not (begins.is_alone(text) and ends.is_alone(text)):
        return f"<{name}> or its end does not stand alone on its line"
    return ""


def _compiled(pattern: str, flags: Sequence[Flag]) -> re.Pattern[str]:
    if not pattern:
        raise ConfigError("option 'pattern': it is empty; write what the reply must fit")
    try:
        return re.compile(pattern, sum(getattr(re, flag.upper()) for flag in set(flags)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"option 'pattern': {pattern!r} is not a regular expression: {error}") from None


# Written without blanks, so that words have no visible ends: Thai to Khmer, kana, Han.
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
    """1 if the agent's last message holds every keyword, else 0. A bare list of the keywords earns 1 too.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; by default all assistant messages.
        keywords: words or phrases; white space in them fits any white space.
        whole_words: "category" does not hold "cat". Next to scripts without blanks, such as Chinese, a word has no
            visible end, and any position counts.
        ignore_case: by Unicode's case folding, so that "STRASSE" is "Straße".
        partial: earn the share of the keywords that are held.
        of: the "whole" reply, its "thought", or its "answer".

    Raises:
        ConfigError: there are no keywords, or an empty one.

    Example:
        ```python
        with_options(contains_all, keywords=("Paris", "Seine"))
        ```
    """
    wanted = _checked(keywords)
    text = _plain(last_reply(messages, assistant_turns, of), ignore_case)
    missing = [word for word in wanted if not _contains_word(text, _plain(word, ignore_case), whole_words)]
    share = 1.0 - len(missing) / len(wanted)
    reason = f"{len(wanted) - len(missing)} of {len(wanted)} keywords are there"
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
    """1 if the agent's last message is not empty and holds none of the keywords, else 0.

    A word that is misspelt on purpose, or written with letters of another script, is not found.

    Args:
        messages, assistant_turns, whole_words, ignore_case, of: as for `contains_all`.
        keywords: the unwanted words or phrases.

    Raises:
        ConfigError: there are no keywords, or an empty one.

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
    return passed(not held, f"it holds {listed}" if held else f"it holds none of {len(unwanted)} keywords")


def _checked(keywords: Sequence[str]) -> Sequence[str]:
    if not keywords or not all(_plain(word, ignore_case=True) for word in keywords):
        raise ConfigError(f"option 'keywords': write at least one, and none that is empty, not {keywords!r:.80}")
    return tuple(dict.fromkeys(keywords))


def _plain(text: str, ignore_case: bool) -> str:
    """Return the text with composed characters, one blank for each white space, and one case if that is ignored."""
    folded = composed(text, "NFC").casefold() if ignore_case else text
    return " ".join(composed(folded, "NFC").split())


def _contains_word(text: str, word: str, whole_words: bool) -> bool:
    """Report whether a word stands in a text; linear in their length."""
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
    """1 less `max_penalty` times the share of n-grams that stand earlier in the reply already.

    That share is 1 - different n-grams / all n-grams, as in Appendix C.2 of "Demystifying Long Chain-of-Thought
    Reasoning in LLMs" (Yeo et al. 2025, arXiv 2502.03373); the published reward is this one less 1. A reply that is
    shorter than an n-gram repeats nothing and earns 1; an empty one earns 0.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; by default all assistant messages.
        ngram: the number of units compared at a time. Small ones punish ordinary language: 3 words are "one of the".
        unit: "words" between white space, or "characters" for languages without blanks, for which 10 to 20 is a good
            `ngram`. Case is ignored. A word of more than 40 characters counts as pieces of 10, so that leaving out
            blanks hides nothing.
        max_penalty: the loss of a reply of nothing but repetition.
        of: the "whole" reply, its "thought", or its "answer".

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
    reason = f"{total - different} of {total} {ngram}-grams of {unit} stand there already"
    return EvaluateResult(score=1.0 - max_penalty * share, reason=reason)


def _count_distinct(units: list[str], ngram: int) -> int:
    """Count the different n-grams.

    A run of units gets a number, equal for equal runs; numbers of longer runs are made of those of two shorter ones
    that overlap, twice as long each time. That takes O(n log n) for each doubling, and no n-gram is ever held.
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
"""Phrases that open a step before a comma."""
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
    """The number of explicit steps over `at_least`, and 1 from there on.

    A step begins with a number ("1.", "2)", "(3)") or a bullet at the beginning of a line, with "Step 4", or with an
    opener such as "First," at the beginning of a sentence or behind a comma. It counts if it has words, and once if it
    is repeated word for word. It measures form: steps that are not true count like others.

    After the reward of this name of Open-R1 (Hugging Face 2025), which counts bare markers, rules and repetitions.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; by default all assistant messages.
        at_least: steps that earn 1.
        min_words: words or numbers of a step, after its marker.
        openers: phrases, in any case, that open a step before a comma.
        of: the "whole" reply, its "thought", or its "answer". FencedBlock code has no steps.

    Example:
        ```python
        with_options(reasoning_steps, at_least=5, of="thought")
        ```
    """
    text = _TAG.sub("\n", "\n".join(lines_without_code(last_reply(messages, assistant_turns, of))))
    phrases = "|".join(re.escape(phrase.strip()) for phrase in openers if phrase.strip())
    opened = rf"|(?:{phrases})[ \t]?[,，、]" if phrases else ""
    markers = _markers(text, re.compile(rf"{_SENTENCE}(?:{_STEP}[ \t]?[:.)\-–—]?{opened})", re.IGNORECASE))
    steps = []  # the rest of the marker's line, or, if that is too short, all up to the next marker
    for (_, start), end in zip(markers, [*(start for start, _ in markers[1:]), len(text)], strict=False):
        line = text[start:end].partition("\n")[0]
        steps.append(line if word_count(line) >= min_words else text[start:end])
    different = {tuple(_WORDS.findall(step.casefold())) for step in steps if word_count(step) >= min_words}
    reason = f"{len(different)} different steps with words, of {len(steps)} markers; {at_least} are wanted"
    return EvaluateResult(score=min(1.0, len(different) / at_least), reason=reason)


def _markers(text: str, inline: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return start and end of every marker: at most one at the beginning of a line, and any number in its sentences.

    Markers that follow one another with nothing between, as in "- Step 1:", are one.
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
