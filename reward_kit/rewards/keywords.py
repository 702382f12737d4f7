"""Rewards for words that a reply must hold, and for words that it must not."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.reading.replies import Part, composed, last_reply
from reward_kit.rewards.reading.texts import passed, shown
from reward_kit.typed_interface import reward_function

# Written without blanks, so that words have no ends that could be seen: Thai to Khmer, kana, Han.
_UNSPACED = (range(0x0E00, 0x0F00), range(0x1000, 0x10A0), range(0x1780, 0x1800), range(0x3040, 0xA000))


def _check_keywords(options: Mapping[str, Any]) -> None:
    # Without any, that they are required is told with the rollout's values.
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
    """1 where the agent's last message holds every keyword, else 0.

    It is satisfied by a bare list of the keywords, and says nothing of what is said of them.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        keywords: words or phrases; white space in them fits any white space.
        whole_words: "cat" is not held by "category". Next to scripts without blanks, such as Chinese, a word has no
            visible end, and any place counts.
        ignore_case: as Unicode folds it, so that "STRASSE" is "Straße".
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
    missing = [word for word in wanted if not _holds(text, _plain(word, ignore_case), whole_words)]
    share = 1.0 - len(missing) / len(wanted)
    told = f"{len(wanted) - len(missing)} of {len(wanted)} keywords are there"
    reason = f"{told}; missing: {', '.join(shown(word, 20) for word in missing[:5])}" if missing else told
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
    """1 where the agent's last message says something and holds none of the keywords, else 0.

    A reply that says nothing earns nothing. A word that is misspelt on purpose, or written with letters of another
    script, is not found.

    Args:
        messages, assistant_turns, whole_words, ignore_case, of: as for `contains_all`.
        keywords: the words or phrases that must not be there.

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
        return passed(False, "there is no reply")
    found = [word for word in unwanted if _holds(text, _plain(word, ignore_case), whole_words)]
    told = ", ".join(shown(word, 20) for word in found[:5])
    return passed(not found, f"it holds {told}" if found else f"it holds none of {len(unwanted)} keywords")


def _checked(keywords: Sequence[str]) -> Sequence[str]:
    if not keywords or not all(_plain(word, ignore_case=True) for word in keywords):
        raise ConfigError(f"option 'keywords': write at least one, and none that is empty, not {keywords!r:.80}")
    return tuple(dict.fromkeys(keywords))


def _plain(text: str, ignore_case: bool) -> str:
    """Composed characters, one blank for each white space, and one case where that is ignored."""
    folded = composed(text, "NFC").casefold() if ignore_case else text
    return " ".join(composed(folded, "NFC").split())


def _holds(text: str, word: str, whole_words: bool) -> bool:
    """Whether a word stands in a text; linear in their length."""
    start = text.find(word)
    while start >= 0:
        end = start + len(word)
        if not whole_words or not (_joined(text, start) or _joined(text, end)):
            return True
        start = text.find(word, start + 1)
    return False


def _joined(text: str, place: int) -> bool:
    """Whether the characters before and after a place belong to one word."""
    if not 0 < place < len(text):
        return False
    return all(_is_of_word(char) for char in text[place - 1 : place + 1])


def _is_of_word(char: str) -> bool:
    if char.isascii():
        return char.isalnum() or char == "_"
    if any(ord(char) in block for block in _UNSPACED):
        return False
    return char.isalnum() or unicodedata.category(char)[0] == "M"
