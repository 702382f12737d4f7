"""Reading a conversation: the agent's messages, their thought and answer, fenced blocks, and normalised text.

An example in the prompt is an assistant message too. If the record says which messages are the agent's, only those are
read, so that no example earns anything.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult, Message

_THOUGHT_ENDS = "</think>"
_THOUGHT_BEGINS = "<think>"


def last_text(messages: Sequence[Message]) -> str:
    """The whole text of the last assistant message; "" where it says nothing, or there is none.

    Only the last one counts: what an agent said on its way is not its answer.
    """
    for message in reversed(messages):
        if message.role == "assistant":
            return message.text
    return ""


def last_answer(messages: Sequence[Message]) -> str:
    """As `last_text`, without what the model thought: up to the last `</think>`, and a thought that does not end."""
    text = last_text(messages)
    if _THOUGHT_ENDS in text:
        return text.rpartition(_THOUGHT_ENDS)[2].strip()
    return text.partition(_THOUGHT_BEGINS)[0].strip() if _THOUGHT_BEGINS in text else text.strip()


def needed(ground_truth: Any, reward: str) -> Any:
    """The ground truth.

    Raises:
        RewardError: the sample has none, so that the rollout is unscored and not wrong.
    """
    if ground_truth is None:
        raise RewardError(f"{reward} compares with a ground_truth, and the sample has none")
    return ground_truth


def passed(is_right: bool, reason: str) -> EvaluateResult:
    """1 or 0, with the reason."""
    return EvaluateResult(score=float(is_right), reason=reason)


def truncate(text: str, longest: int) -> str:
    """The beginning of an untrusted text on one line, without characters that act on a file or terminal."""
    start = " ".join(text[: 4 * longest].split())
    short = start if len(start) <= longest else start[:longest] + "…"
    return "".join(char if char.isprintable() else "\ufffd" for char in short)


def shown(text: str, longest: int = 60) -> str:
    """The beginning of an untrusted text in quotes; see `truncate`."""
    return f'"{truncate(text, longest)}"'


Part = Literal["whole", "thought", "answer"]
"""Which part of a reply: all of it, what stands in `<think>` or `reasoning_content`, or what is left without it."""
_BEGINS, _ENDS = "<think>", "</think>"
# Scripts that are written without blanks: a character counts as a word.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


def own_messages(messages: Sequence[Message], assistant_turns: Sequence[int] | None) -> list[Message]:
    """The messages that the agent wrote: those at `assistant_turns`, or where that is None all of an assistant."""
    if assistant_turns is None:
        return [message for message in messages if message.role == "assistant"]
    return [messages[position] for position in assistant_turns if 0 <= position < len(messages)]


def last_reply(messages: Sequence[Message], assistant_turns: Sequence[int] | None, part: Part = "whole") -> str:
    """A part of the last message that the agent wrote; "" where it wrote none, or nothing in it."""
    own = own_messages(messages, assistant_turns)
    return part_of(own[-1], part) if own else ""


def part_of(message: Message, part: Part) -> str:
    """A part of a message. What the provider set apart as `reasoning_content` is thought, and comes first."""
    apart, text = message.reasoning_content or "", message.text
    if part == "whole":
        return f"{apart}\n{text}" if apart and text else apart or text
    thought, answer = _split(text)
    if part == "answer":
        return answer
    return f"{apart}\n{thought}" if apart and thought else apart or thought


def word_count(text: str) -> int:
    """How many words have a letter or digit. In scripts without blanks each character counts as one."""
    spaced, characters = _UNSPACED.subn(" ", text)
    return characters + sum(any(char.isalnum() for char in word) for word in spaced.split())


def composed(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """The text in a normal form of Unicode, which takes quadratic time for a letter with a great many marks.

    So marks after the thirtieth on one letter are dropped, where Unicode's Stream-Safe Text Format breaks them apart.
    """
    marks = "".join(re.escape(char) for char in set(text) if unicodedata.combining(char))
    if marks:
        text = re.sub(rf"([{marks}]{{30}})[{marks}]+", r"\1", text)
    return unicodedata.normalize(form, text)


def lines_without_code(text: str) -> Iterator[str]:
    """The lines that stand in no fenced block; a block that does not end hides what follows. Linear in the length."""
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


def _split(text: str) -> tuple[str, str]:
    """Thought and answer of a text, as `texts.last_answer` parts them: at the last end of a thought."""
    if _ENDS in text:
        thought, _, answer = text.rpartition(_ENDS)
        return thought.strip().removeprefix(_BEGINS).strip(), answer.strip()
    answer, _, thought = text.partition(_BEGINS)
    return thought.strip(), answer.strip()


Choice = Literal["last", "first", "joined"]
"""Which of several blocks is meant: the last one, the first one, or all of them as one text."""


class Block(NamedTuple):
    """A fenced block: its tag in lower case, "" where it has none, and its text."""

    tag: str
    text: str


def fenced_blocks(text: str) -> list[Block]:
    """The blocks of a text, in order. One that is not closed runs to the end. Linear in the length of `text`."""
    blocks: list[Block] = []
    fence, tag, lines = "", "", [""]
    for ended in text.split("\n"):  # other line ends may stand in a program's texts
        line = ended.removesuffix("\r")
        stripped = line.strip()
        if not fence:
            fence, tag = _opening(stripped)
            lines = []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            blocks.append(_block(tag, lines))
            fence = ""
        else:
            lines.append(line)
    return [*blocks, _block(tag, lines)] if fence else blocks


def block_of(text: str, tags: Collection[str], choice: Choice) -> str | None:
    """The text of the block that is meant; None if there is none.

    Blocks with one of `tags` are meant; where no block has one, those without a tag. Blocks of other languages, such as
    a shell session or an example of output, never are.
    """
    blocks = fenced_blocks(text)
    fitting = [block.text for block in blocks if block.tag in tags] or [block.text for block in blocks if not block.tag]
    if not fitting:
        return None
    return "\n".join(fitting) if choice == "joined" else fitting[0 if choice == "first" else -1]


def _opening(line: str) -> tuple[str, str]:
    """The fence that a line opens and its tag; "" where it opens none."""
    for mark in ("`", "~"):
        width = len(line) - len(line.lstrip(mark))
        info = line[width:].strip()
        if width >= 3 and not (mark == "`" and "`" in info):
            word = info.strip("{}. ").split(maxsplit=1)
            return mark * width, word[0].strip("{}.").lower() if word else ""
    return "", ""


def _block(tag: str, lines: list[str]) -> Block:
    return Block(tag, textwrap.dedent("\n".join(lines)) if lines and lines[0][:1] in (" ", "\t") else "\n".join(lines))
