"""Rewards for the form of a reply: tags that stand as they must, and a regular expression that it fits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message, StepOutput
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.reading.replies import Part, last_reply, own_messages
from reward_kit.rewards.reading.texts import passed, shown
from reward_kit.typed_interface import reward_function

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]*")

Flag = Literal["ascii", "dotall", "ignorecase", "multiline", "verbose"]


def _check_tags(options: Mapping[str, Any]) -> None:
    tags = options["tags"]
    for name in tags:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"option 'tags': {name!r} is no name; write names without brackets, such as 'think'")
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
    """1 where each tag stands exactly once, in order, closed, not in another one, and nothing stands outside.

    The format reward of DeepSeek-R1 (2025) without the gaps of its usual regular expression: a tag that is repeated, or
    that stands in the content of one, even as a quotation, is wrong. A tag is `<think>` to the letter: other case,
    attributes and blanks make it plain text. It says nothing of whether the answer is right: put it before a `gate`.

    Args:
        messages: the conversation; what the provider set apart as `reasoning_content` is not read.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        tags: their names, in the order in which they must stand.
        allow_outside: text may stand before, between and after them.
        allow_empty: one may hold nothing that can be seen.
        strict_lines: each tag stands alone on its line.
        partial: earn the share of what is right: each tag that is right by itself and behind those before it, and, once
            all are, that nothing stands outside. Tags without order or content earn nothing.
        turns: "last": the agent's last message; "all": the mean over each of them, each one its step's reward. A
            message that only calls tools has no tags.

    Raises:
        ConfigError: `tags` are no different names.

    Example:
        ```python
        tag_format(messages)  # 1 for "<think>2 + 2</think><answer>4</answer>"
        ```
    """
    _check_tags({"tags": tags})
    rules = _Rules(tags, allow_outside, allow_empty, strict_lines)
    own = own_messages(messages, assistant_turns)
    if not own:
        return passed(False, "there is no reply")
    found = [_score_of(message.text, rules, partial) for message in (own if turns == "all" else own[-1:])]
    if turns == "last":
        return EvaluateResult(score=found[-1][0], reason=found[-1][1])
    steps = [StepOutput(step_index=index, base_reward=score, reason=why) for index, (score, why) in enumerate(found)]
    wrong = [index for index, (score, _) in enumerate(found) if score < 1.0]
    reason = f"{len(wrong)} of {len(found)} messages are wrong"
    return EvaluateResult(
        score=sum(score for score, _ in found) / len(found),
        reason=f"{reason}; the first: {found[wrong[0]][1]}" if wrong else reason,
        step_outputs=steps if assistant_turns is not None else None,
    )


def _check_pattern(options: Mapping[str, Any]) -> None:
    # Without a pattern, that it is required is told where the rollout's values are looked through.
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
    r"""1 where the agent's last message fits a regular expression of Python's `re`, else 0.

    An expression that backtracks takes forever on a text made for it, so a task runs this reward behind walls, with the
    limits of its sandbox; a reply on which the limit is reached is unscored. A call by hand has no limit.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        pattern: the expression.
        where: "whole": it fits from the first to the last character; "found": it fits somewhere.
        flags: of `re`, by name.
        strip: leave out white space around the reply.
        of: the "whole" reply, its "thought", or its "answer".

    Raises:
        ConfigError: the pattern is empty or no regular expression.

    Example:
        ```python
        with_options(regex_format, pattern=r"Answer: \d+", where="found")
        ```
    """
    expression = _compiled(pattern, flags)
    reply = last_reply(messages, assistant_turns, of)
    text = reply.strip() if strip else reply
    if not text.strip():
        return passed(False, "there is no reply")
    fits = (expression.fullmatch(text) if where == "whole" else expression.search(text)) is not None
    verb = "fits" if where == "whole" else "holds a match of"
    return passed(fits, f"{shown(text)} {verb if fits else 'does not ' + _PLAIN[where]} {shown(pattern)}")


_PLAIN = {"whole": "fit", "found": "hold a match of"}


class _Rules(NamedTuple):
    tags: tuple[str, ...]
    allow_outside: bool
    allow_empty: bool
    strict_lines: bool


class _Tag(NamedTuple):
    """A tag in a text: its position among all of them, and where it begins and ends."""

    place: int
    start: int
    end: int


def _score_of(text: str, rules: _Rules, partial: bool) -> tuple[float, str]:
    """The score of one message, and what was found first that is wrong."""
    right, fault, outside = _inspect(text, rules)
    if right == len(rules.tags):
        if rules.allow_outside or not outside.strip():
            return 1.0, "every tag stands as it must"
        fault = f"{shown(outside.strip())} stands outside of the tags"
    parts = len(rules.tags) + (not rules.allow_outside)
    return right / parts if partial else 0.0, fault


def _inspect(text: str, rules: _Rules) -> tuple[int, str, str]:
    """How many tags are right, what is wrong with the first that is not, and, where none is, the text outside."""
    found = _found(text, rules.tags)
    right, fault, behind, outside = 0, "", 0, []
    for name in rules.tags:
        problem = _fault(text, name, found, behind, rules)
        if not problem:
            (begins,), (ends,) = found[name], found[f"/{name}"]
            outside.append(text[behind : begins.start])
            right, behind = right + 1, ends.end
        fault = fault or problem
    return right, fault, "".join([*outside, text[behind:]])


def _found(text: str, tags: Sequence[str]) -> dict[str, list[_Tag]]:
    """Each tag, and its end under "/" and its name, with where they stand."""
    found: dict[str, list[_Tag]] = {mark + name: [] for name in tags for mark in ("", "/")}
    names = "|".join(re.escape(name) for name in tags)
    for place, match in enumerate(re.finditer(f"<(/?(?:{names}))>", text)):
        found[match[1]].append(_Tag(place, *match.span()))
    return found


def _fault(text: str, name: str, found: dict[str, list[_Tag]], behind: int, rules: _Rules) -> str:
    """What is wrong with a tag; "" where nothing is."""
    for key in (name, f"/{name}"):
        if len(found[key]) != 1:
            return f"<{key}> stands {len(found[key])} times and not once"
    (begins,), (ends,) = found[name], found[f"/{name}"]
    if ends.place < begins.place:
        return f"</{name}> stands before <{name}>"
    if ends.place != begins.place + 1:
        return f"another tag stands inside of <{name}>"
    if begins.start < behind:
        return f"<{name}> stands before the tag that it must follow"
    if not rules.allow_empty and not _is_visible(text[begins.end : ends.start]):
        return f"<{name}> is empty"
    if rules.strict_lines and not (_is_alone(text, begins) and _is_alone(text, ends)):
        return f"<{name}> or its end does not stand alone on its line"
    return ""


def _is_visible(content: str) -> bool:
    return any(char.isprintable() and not char.isspace() for char in content)


def _is_alone(text: str, tag: _Tag) -> bool:
    before, after = text[: tag.start].rpartition("\n")[2], text[tag.end :].partition("\n")[0]
    return not before.strip() and not after.strip()


def _compiled(pattern: str, flags: Sequence[Flag]) -> re.Pattern[str]:
    if not pattern:
        raise ConfigError("option 'pattern': it is empty; write what the reply must fit")
    try:
        return re.compile(pattern, sum(getattr(re, flag.upper()) for flag in set(flags)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"option 'pattern': {pattern!r} is no regular expression: {error}") from None
