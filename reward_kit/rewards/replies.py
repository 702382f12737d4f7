"""Functions that read conversations: the agent's messages, their reasoning and answers, and fenced blocks.

Examples in the prompt can also be assistant messages. If the record lists the agent's messages, only those messages are
read, so examples cannot earn a score.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from reward_kit import display_text
from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult, Message

Part = Literal["whole", "thought", "answer"]
"""A part of a reply: the whole reply, the text in `<think>` or `reasoning_content`, or the rest."""
Choice = Literal["last", "first", "joined"]
"""The block to use: the last, the first, or all of them joined."""
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"
# Scripts written without spaces, in which each character counts as a word.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")
_FENCE = re.compile(r"(`{3,}|~{3,})(.*)")


def require_truth(ground_truth: Any, reward: str) -> Any:
    """Return the ground truth, or raise a RewardError if it is missing.

    The error leaves the rollout unscored instead of counting it as wrong.
    """
    if ground_truth is None:
        raise RewardError(f"{reward} requires ground_truth, but the sample has none")
    return ground_truth


def passed(is_right: bool, reason: str) -> EvaluateResult:
    """Return a result that contains the score, 1 or 0, and the reason."""
    return EvaluateResult(score=float(is_right), reason=reason)


def excerpt(text: str, limit: int) -> str:
    """Return the beginning of untrusted text as a single line, with unprintable characters replaced."""
    line = " ".join(text[: 4 * limit].split())
    return display_text.truncate("".join(char if char.isprintable() else "\ufffd" for char in line), limit)


def quoted(text: str, limit: int = 60) -> str:
    """Return an `excerpt` in quotes."""
    return f'"{excerpt(text, limit)}"'


def last_text(messages: Sequence[Message]) -> str:
    """Return the text of the last assistant message, or "" if there is none."""
    return next((message.text for message in reversed(messages) if message.role == "assistant"), "")


def last_answer(messages: Sequence[Message]) -> str:
    """Return the last assistant message without its reasoning.

    The answer is the text after the last `</think>`, or the text before an unclosed `<think>`.
    """
    return _split(last_text(messages))[1]


def agent_messages(messages: Sequence[Message], assistant_turns: Sequence[int] | None) -> list[Message]:
    """Return the messages at `assistant_turns`, or all assistant messages if `assistant_turns` is `None`."""
    if assistant_turns is None:
        return [message for message in messages if message.role == "assistant"]
    return [messages[position] for position in assistant_turns if 0 <= position < len(messages)]


def last_reply(messages: Sequence[Message], assistant_turns: Sequence[int] | None, part: Part = "whole") -> str:
    """Return a part of the agent's last message, or "" if the agent has not written any messages."""
    replies = agent_messages(messages, assistant_turns)
    return message_part(replies[-1], part) if replies else ""


def message_part(message: Message, part: Part) -> str:
    """Return a part of a message.

    If the provider returned `reasoning_content`, it is part of the reasoning and precedes the text.
    """
    thought, answer = _split(message.text)
    if part == "answer":
        return answer
    rest = message.text if part == "whole" else thought
    return "\n".join(filter(None, [message.reasoning_content, rest]))


def _split(text: str) -> tuple[str, str]:
    """Split a reply into its reasoning and its answer at the last `</think>`."""
    if _THOUGHT_ENDS in text:
        thought, _, answer = text.rpartition(_THOUGHT_ENDS)
        return thought.strip().removeprefix(_THOUGHT_BEGINS).strip(), answer.strip()
    answer, _, thought = text.partition(_THOUGHT_BEGINS)
    return thought.strip(), answer.strip()


def word_count(text: str) -> int:
    """Count the words that contain a letter or a digit.

    In scripts written without spaces, each character counts as a word.
    """
    spaced, characters = _UNSPACED.subn(" ", text)
    return characters + sum(any(char.isalnum() for char in word) for word in spaced.split())


def composed(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """Return the text in a Unicode normal form, in linear time.

    Normalizing a letter with many combining marks takes quadratic time, so only the first thirty marks on each letter
    are kept. Unicode's Stream-Safe Text Format would instead split such sequences.
    """
    marks = "".join(re.escape(char) for char in set(text) if unicodedata.combining(char))
    if marks:
        text = re.sub(rf"([{marks}]{{30}})[{marks}]+", r"\1", text)
    return unicodedata.normalize(form, text)


class Block(NamedTuple):
    """A fenced block: its text, and its tag in lower case, or "" if it has no tag."""

    tag: str
    text: str


def fenced_blocks(text: str) -> list[Block]:
    """Return the fenced blocks in a text, in order. This takes linear time.

    A block that is not closed extends to the end of the text.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.split("\n"):  # string literals of a program may contain other line separators
        stripped = line.strip()
        if fence and stripped.startswith(fence) and not stripped.strip(fence[0]):
            fence = ""
        elif fence:
            blocks[-1][1].append(line.removesuffix("\r"))
        elif (match := _FENCE.fullmatch(stripped)) and not (match[1][0] == "`" and "`" in match[2]):
            fence = match[1]
            words = match[2].strip().strip("{}. ").split(maxsplit=1)
            blocks.append((words[0].strip("{}.").lower() if words else "", []))
    texts = [(tag, "\n".join(lines)) for tag, lines in blocks]
    return [Block(tag, textwrap.dedent(text) if text[:1] in (" ", "\t") else text) for tag, text in texts]


def lines_without_code(text: str) -> Iterator[str]:
    """Yield the lines outside fenced blocks. This takes linear time.

    A block that is not closed extends to the end of the text.
    """
    fence = ""
    for line in text.split("\n"):
        bare = line.strip()
        mark = next((mark for mark in ("```", "~~~") if bare.startswith(mark)), "")
        if fence:
            fence = "" if mark == fence and not bare.strip(mark[0]) else fence
        elif mark and mark not in bare[3:].lstrip(mark[0]):
            fence = mark
        else:
            yield line


def select_block(text: str, tags: Collection[str], choice: Choice) -> str | None:
    """Return the text of the chosen block, or None if no block matches.

    Blocks with one of the `tags` match. If there are no such blocks, untagged blocks match. Blocks with other tags
    never match, because they may contain a shell session or sample output.
    """
    blocks = fenced_blocks(text)
    fitting = [block.text for block in blocks if block.tag in tags] or [block.text for block in blocks if not block.tag]
    if not fitting:
        return None
    return "\n".join(fitting) if choice == "joined" else fitting[0 if choice == "first" else -1]
