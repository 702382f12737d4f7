"""The reward for multiple choice: one letter, or the text of its option, and never two.

A letter counts where it is stated as a choice. "A" and "I" in a sentence are words: "A dog", "I think" choose nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.mathematics.text import LONGEST_TEXT, unwrap
from reward_kit.rewards.reading.found_answers import find_answer
from reward_kit.rewards.reading.normalising import normalised
from reward_kit.rewards.reading.texts import last_answer, needed, passed, shown
from reward_kit.typed_interface import reward_function

_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox|left|right)\b|[{}$`\"“”]|\*\*|__")
_ALONE = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\].:]?")
_LABELLED = re.compile(r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])\s*[).:\]])\s*[-–—:.]?\s*(.*)", re.DOTALL)
_PREFIX = re.compile(
    r"(?i)(?:(?:both|either)\s+)?"
    r"(?:(?:the\s+)?(?:correct\s+|right\s+|best\s+)?(?:option|choice|letter|answer)s?\b\s*(?:(?:is|are)\b)?\s*:?\s*)?"
)
# "C depends" behind an "or" is a second choice; "A dog" and "I think" are words.
_LEADING = re.compile(r"([B-HJ-Z])\b.*", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,|;|/|&|\b(?:and|or)\b)\s*", re.IGNORECASE)
_LAST = re.compile(r"(?:\(|\*\*\(?|\[)\s*([A-Z])\s*(?:\)?\*\*|\)|\])|^[ \t]*([A-Z])[).:]?[ \t]*\.?$", re.MULTILINE)
_FOLD = ("nfkc", "casefold", "punctuation", "whitespace")


class _Options(NamedTuple):
    letters: str
    texts: Mapping[str, str]


def _check_letters(options: Mapping[str, Any]) -> None:
    letters = options["letters"]
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]+", letters):
        raise ConfigError(f"option 'letters': write different capitals, such as 'ABCD', not {letters!r:.80}")


@reward_function
@checks_options(_check_letters)
def choice_answer(
    messages: list[Message],
    ground_truth: Any,
    sample: Any = None,
    *,
    letters: str = "ABCDEFGHIJ",
    unmarked: Literal["refuse", "last_letter"] = "refuse",
    zero_based: bool = True,
) -> EvaluateResult:
    r"""1 where the reply chooses the right option and no other, else 0. As in MMLU (Hendrycks 2021) and MMLU-Pro.

    The choice is the last `\boxed{…}`, what follows the last "the answer is" or "answer:", or a reply of one short
    line. It is a letter ("B", "(B)", "b", "**B**", "B) Paris", `\text{B}`, "option B") or the text of an option, where
    the sample or the ground truth gives it. Several different choices earn nothing; neither does a letter with another
    option's text.

    Args:
        messages: the conversation; its last assistant message is read.
        ground_truth: a letter, "B) Paris", the text of an option of the sample, or the position of one as a whole
            number.
        sample: the row; its `choices` or `options` (a list of texts, a mapping from letters to texts, or ARC's mapping
            of `label` and `text`) name the options.
        letters: those that may be chosen, in order.
        unmarked: what is done with a longer reply that marks no answer: "refuse" it, or take the "last_letter" that
            stands in brackets, in bold type or alone on its line.
        zero_based: a position counts from 0, as in MMLU; else from 1.

    Raises:
        ConfigError: letters are no different capital letters.
        RewardError: the ground truth is missing or none of the letters and options, so that the rollout is unscored.

    Example:
        ```python
        choice_answer(messages, "B) Paris")  # 1 for "The answer is (B).", "**B**" and "Paris"
        ```
    """
    _check_letters({"letters": letters})
    texts = _texts_of(sample, letters)
    right, text = _right(needed(ground_truth, "choice_answer"), letters, texts, zero_based)
    options = _Options(letters, {**texts, **({right: text} if text else {})})
    chosen, where = _chosen(last_answer(messages), options, unmarked)
    if not chosen:
        return passed(False, f"no choice: {where}")
    if len(chosen) > 1:
        return passed(False, f"several choices, {', '.join(sorted(chosen))}, in {where}")
    letter = next(iter(chosen))
    return passed(letter == right, f"the choice {letter} {'is' if letter == right else 'is not'} {right}")


def _chosen(reply: str, options: _Options, unmarked: str) -> tuple[set[str], str]:
    """The letters that a reply chooses, and where it does, or why it chooses none."""
    found = find_answer(reply)
    if found.text:
        chosen = _read(found.text[:LONGEST_TEXT], options)
        if chosen or unmarked == "refuse":
            return chosen, shown(found.text)
    if unmarked == "last_letter":
        last = [match[1] or match[2] for match in _LAST.finditer(reply)]
        known = [letter for letter in last if letter in options.letters]
        return set(known[-1:]), "no letter stands alone, in brackets or in bold type"
    return set(), found.why


def _read(text: str, options: _Options) -> set[str]:
    """The letters that a stated answer names."""
    plain = unwrap(_COMMAND.sub(" ", text).strip())
    if whole := _one(plain, options):
        return whole
    pieces = [piece for piece in _BETWEEN.split(plain) if piece]
    if len(pieces) < 2:
        return set()
    return set().union(*(_one(piece, options) or _leading(piece, options) for piece in pieces))


def _leading(piece: str, options: _Options) -> set[str]:
    match = _LEADING.fullmatch(piece)
    return {match[1]} & set(options.letters) if match else set()


def _one(piece: str, options: _Options) -> set[str]:
    """The letter that a piece of text is, or is the option of. Two where letter and text contradict one another."""
    piece = _PREFIX.sub("", piece.strip(), count=1).strip()
    by_text = {letter for letter, text in options.texts.items() if _folded(text) == _folded(piece) != ""}
    if by_text:
        return by_text
    if alone := _ALONE.fullmatch(piece):
        return {alone[1].upper()} & set(options.letters)
    labelled = _LABELLED.fullmatch(piece)
    if labelled is None:
        return set()
    letter, rest = (labelled[1] or labelled[2]).upper(), labelled[3]
    if letter not in options.letters:
        return set()
    other = {key for key, text in options.texts.items() if _folded(rest) and _folded(text) == _folded(rest)}
    more = {
        found
        for between in _BETWEEN.split(rest)[1:]
        if between
        for found in _letters_of(between) & set(options.letters)
    }
    return {letter} | other | more


def _letters_of(piece: str) -> set[str]:
    match = _ALONE.fullmatch(piece.strip()) or re.fullmatch(r"[(\[]\s*([A-Za-z])\s*[)\]].*", piece.strip(), re.DOTALL)
    return {match[1]} if match and match[1].isupper() else set()


def _right(given: Any, letters: str, texts: Mapping[str, str], zero_based: bool) -> tuple[str, str]:
    """The right letter, and the text that the ground truth gives with it."""
    if isinstance(given, int) and not isinstance(given, bool):
        position = given - (not zero_based)
        if 0 <= position < len(letters):
            return letters[position], ""
    text = str(given).strip()
    by_text = [letter for letter, option in texts.items() if _folded(option) == _folded(text) != ""]
    if len(by_text) == 1:
        return by_text[0], ""
    if (alone := _ALONE.fullmatch(text)) and alone[1].upper() in letters:
        return alone[1].upper(), ""
    if (labelled := _LABELLED.fullmatch(text)) and (letter := (labelled[1] or labelled[2]).upper()) in letters:
        return letter, labelled[3].strip()
    raise RewardError(f"choice_answer: the ground_truth {shown(text)} is none of {letters} and of the sample's options")


def _texts_of(sample: Any, letters: str) -> dict[str, str]:
    """The texts of the options by their letters, as the sample names them."""
    row = sample if isinstance(sample, Mapping) else {}
    given = row.get("choices", row.get("options"))
    if isinstance(given, Mapping) and "label" in given and "text" in given:
        given = dict(zip(given["label"], given["text"], strict=False))
    if isinstance(given, Mapping):
        return {str(key).upper(): str(text) for key, text in given.items() if str(key).upper() in letters}
    if isinstance(given, Sequence) and not isinstance(given, str):
        pairs = zip(letters, (str(text) for text in given), strict=False)
        return {letter: re.sub(rf"^\(?{letter}[).:]\s*", "", text) for letter, text in pairs}
    return {}


def _folded(text: str) -> str:
    return normalised(text, _FOLD)  # type: ignore[arg-type]
