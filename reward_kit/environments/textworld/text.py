"""Text to and from a game: which commands an agent may give, and what of an answer is the game's own.

An interpreter of interactive fiction also takes commands to itself. Those that leave the game or change it behind the
back of the tracked state (`restart`, `restore`, `undo`), write files (`save`, `script`), change what it says from then
on (`brief`), or were left in by TextWorld's compiler (`print_state` tells everything) are refused.
"""

from __future__ import annotations

import re

from reward_kit.errors import ToolError

LONGEST_COMMAND = 180
"""In characters; the interpreter's line holds little more, and drops the rest without a word."""

_REFUSED = (
    *("quit", "q", "restart", "restore", "undo", "oops", "o", "save", "script", "unscript", "noscript", "transcript"),
    *("brief", "superbrief", "verbose", "short", "long", "normal", "notify", "verify", "version"),
    *("print_state", "enable", "disable", "restrict", "tw"),
)
# The interpreter reads the first nine letters of a word.
_REFUSED_WORDS = frozenset(word[:9] for word in _REFUSED)
_COMMANDS = re.compile(r"[.,;]|\bthen\b")
_FIRST_WORD = re.compile(r"[a-z_]+")

_LOGO = re.compile(r"\A(?:[ _|\\/$<>]*\n)+")
_STATUS_LINE = re.compile(r">?[ ]{10,}-= .+? =-\s*-?\d+/\d+\s*\Z")
_PROMPT = re.compile(r"\n>\s*\Z")
_AT_THE_END = re.compile(r"\s*Would you like to RESTART\b.*\Z", re.DOTALL)
_CENTRED = re.compile(r"^[ ]{10,}", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")


def command_line(text: str) -> str:
    """A command as the interpreter gets it.

    Raises:
        ToolError: it is too long, not plain ASCII, or meant for the interpreter.
    """
    command = " ".join(text.split())
    if len(command) > LONGEST_COMMAND:
        raise ToolError(f"a command has {LONGEST_COMMAND} characters at most, this one {len(command)}")
    if not (command.isascii() and command.isprintable()):
        raise ToolError("a command is plain ASCII text")
    for part in _COMMANDS.split(command.lower()):
        word = _FIRST_WORD.match(part.strip())
        if word and word[0][:9] in _REFUSED_WORDS:
            raise ToolError(f"{word[0]!r} is a command to the interpreter, which takes none here")
    return command


def answer_text(feedback: str) -> str:
    """What the game said, without TextWorld's logo, the status line, the prompt and the offer to restart."""
    text = _STATUS_LINE.sub("", _LOGO.sub("", feedback))
    text = _AT_THE_END.sub("", _PROMPT.sub("", text))
    return _BLANK_LINES.sub("\n\n", _CENTRED.sub("", text)).strip()


def asks(answer: str) -> bool:
    """Whether the game waits for an answer of its own ("Which do you mean, …?"), so that the next command is one."""
    return answer.endswith("?")
