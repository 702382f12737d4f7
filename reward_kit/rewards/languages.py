"""The reward for a reply in the right language: by script, and where several languages share one by their small words.

No statistics were trained for this. What it can tell and what it cannot is in the docstring of the reward.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.reading.language_words import LANGUAGES_OF_LETTER, LANGUAGES_OF_WORD, SCRIPTS
from reward_kit.rewards.reading.replies import Part, composed, last_reply, lines_without_code, own_messages
from reward_kit.rewards.reading.texts import passed
from reward_kit.typed_interface import reward_function

_NOT_LANGUAGE: Final = re.compile(
    r"""
    `[^`\n]{1,300}`                                 # code in a line
    | (?:https?://|www\.)[!-~]{1,2000}
    | [\w.+-]{1,64}@[\w.-]{1,255}
    | </?[A-Za-z][^<>\n]{0,100}>                    # a tag
    | \$(?=\S)[^$\n]{0,299}(?<=\S)\$(?!\d)          # a formula, and not two sums of money
    | \\end\{[^{}\n]{0,40}\}
    | \\[A-Za-z]{1,40}
    """,
    re.VERBOSE,
)
_FORMULAS: Final = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("\\begin{", "\\end{"))
_ENDS: Final = frozenset(".!?;:\n。！？；：।॥؟؛…")
_COMMAS: Final = frozenset(",，、،")
_ONE_BY_ONE: Final = frozenset({"CJK", "HIRAGANA", "KATAKANA"})
_RUN_ON: Final = frozenset({"THAI", "LAO", "KHMER", "MYANMAR"})
_LETTERS_A_WORD: Final = 4
_LEAD = 2
"""Small words by which another language must lead before a sentence is said to be in it."""
_LONG_RUN = 12
"""Words without a comma or number among which a known language has at least one small word."""


def _check_language(options: Mapping[str, Any]) -> None:
    if options["language"] is not None:
        _given(options["language"])


@reward_function
@checks_options(_check_language)
def same_language(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    language: str | None = None,
    enough: Annotated[float, Field(gt=0, le=1)] = 1.0,
    unknown: Literal["right", "unscored"] = "right",
    of: Part = "whole",
) -> EvaluateResult:
    """The share of the agent's last message that is in the right language, over `enough`, and 1 from there on.

    The language consistency reward of DeepSeek-R1 (2025), whose target language is that of the prompt. Words are
    counted; of Chinese and Japanese characters, and of Thai, Lao, Khmer and Burmese every four letters. Fenced and
    inline code, formulas, links, tags, numbers and names with an underscore count for nothing; a reply of nothing else
    earns 1, and an empty one 0.

    Where no other known language has the script, the script decides. Languages that share one are told apart by the
    small words of each sentence (in Latin script: cs da de en es fi fr hu id it nl pl pt ro sv tr vi; Cyrillic: bg ru
    uk; Arabic: ar fa ur; Devanagari: hi mr; Chinese and Japanese by kana). A sentence is in another language where that
    leads by two small words; twelve running words without any of the right one are not in it. Short sentences without
    small words are left out.

    So a name, or a word or two of another language in a sentence, is not seen in the same script, and is in another
    one; languages that are not listed pass for whatever comes near, in short sentences for the right one; simplified
    and traditional Chinese are one language.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        language: an ISO 639-1 code such as "de"; a region or script after it counts for nothing. Without it, the
            language of the last user message before the reply; where that can be told by its script alone, only the
            script counts.
        enough: the share that earns 1, such as 0.9 where names of another script are expected.
        unknown: what is said of a reply in the right script whose language cannot be told: that it is "right", or
            nothing, so that it stays "unscored".
        of: the "whole" reply with what the provider set apart as thought, its "thought", or its "answer".

    Raises:
        ConfigError: the language is not known.
        RewardError: the prompt has no words of a known script, or the reply's language cannot be told and is to be left
            unscored.

    Example:
        ```python
        with_options(same_language, language="de", of="answer")
        ```
    """
    given = None if language is None else _given(language)
    reply = last_reply(messages, assistant_turns, of)
    if not reply.strip():
        return passed(False, "there is no reply")
    target = given or _of_prompt(messages, assistant_turns)
    found = _count(reply, target)
    if not found.right + found.wrong + found.untold:
        return passed(True, "there are no words that would be in a language")
    if not found.right + found.wrong:
        if unknown == "unscored":
            raise RewardError(f"same_language: the language of the reply cannot be told; {target.name} is wanted")
        return passed(True, f"the language of {found.untold} words in the script of {target.name} cannot be told")
    share = found.right / (found.right + found.wrong)
    reason = f"{found.right} of {found.right + found.wrong} words are in {target.name}"
    if found.others:
        reason += f"; others are in {', '.join(name for name, _ in found.others.most_common(3))}"
    return EvaluateResult(score=min(1.0, share / enough), reason=reason)


class _Target(NamedTuple):
    """What a reply is to be in: a language, or any of a script where no more is known."""

    name: str
    language: str
    scripts: frozenset[str]
    rivals: tuple[str, ...] = ()

    @classmethod
    def of(cls, code: str) -> _Target:
        """The target for a known language, with the others that are written in a script of its."""
        scripts = SCRIPTS[code]
        return cls(code, code, scripts, tuple(other for other in SCRIPTS if other != code and SCRIPTS[other] & scripts))


class _Found(NamedTuple):
    """The words of a reply by the language that they are in."""

    right: int
    wrong: int
    untold: int
    others: Counter[str]


class _Sentence(NamedTuple):
    """Words by script, the small words and letters of each language, and the longest run without a comma."""

    words: Mapping[str, int]
    hits: Mapping[str, int]
    longest_run: int


class _Word(NamedTuple):
    """The script of a word, how much it counts, and the languages that it speaks for."""

    script: str
    weight: int
    languages: Collection[str]


def _given(language: str) -> _Target:
    code = re.split(r"[-_]", language.strip())[0].lower()
    if code not in SCRIPTS:
        known = ", ".join(sorted(SCRIPTS))
        raise ConfigError(f"option 'language': {language!r:.40} is unknown; known: {known}")
    return _Target.of(code)


def _of_prompt(messages: Sequence[Message], assistant_turns: Sequence[int] | None) -> _Target:
    """The language of the last user message before the agent's last message."""
    own = own_messages(messages, assistant_turns)
    end = next((place for place, message in enumerate(messages) if own and message is own[-1]), len(messages))
    prompt = next((message.text for message in reversed(messages[:end]) if message.role == "user"), "")
    whole = _sum(list(_sentences(prompt)))
    known = {script: count for script, count in whole.words.items() if any(script in of for of in SCRIPTS.values())}
    if not known:
        raise RewardError("same_language: the prompt has no words of a known script; give the option `language`")
    script = max(known, key=lambda name: known[name])
    candidates = [language for language, scripts in SCRIPTS.items() if script in scripts]
    ranked = Counter({language: whole.hits.get(language, 0) for language in candidates}).most_common(2)
    if len(ranked) == 1 or ranked[0][1] > ranked[1][1]:
        return _Target.of(ranked[0][0])
    if script == "CJK":  # a few characters without kana
        return _Target.of("zh")
    return _Target(f"the {script.capitalize()} script", "", frozenset({script}))


def _count(text: str, target: _Target) -> _Found:
    """What is in the target language. Sentences that cannot be told are looked at once more, all together."""
    right = wrong = untold = 0
    others: Counter[str] = Counter()
    unsure: list[_Sentence] = []
    for sentence in _sentences(text):
        own = 0
        for script, count in sentence.words.items():
            if script in target.scripts:
                own += count
            else:
                others[_script_name(script)] += count
        verdict = _verdict(sentence, target) if own else None
        if verdict == target.name:
            right += own
        elif verdict is not None:
            others[verdict] += own
        elif own:
            unsure.append(sentence)
    if unsure:
        pooled = _sum(unsure)
        own = sum(pooled.words.get(script, 0) for script in target.scripts)
        verdict = _verdict(pooled, target, strict=False)
        right += own if verdict == target.name else 0
        untold = own if verdict is None else 0
        if verdict not in (None, target.name):
            others[str(verdict)] += own
    wrong = others.total()
    return _Found(right, wrong, untold, others)


def _verdict(sentence: _Sentence, target: _Target, strict: bool = True) -> str | None:
    """The language of a sentence in the script of the target; None where it cannot be told.

    Where the target and another one have equally many small words, it is the target's unless `strict`.
    """
    if not target.rivals:
        return target.name
    hits = sentence.hits
    best = max(target.rivals, key=lambda language: hits.get(language, 0)) if hits else target.rivals[0]
    own, most = hits.get(target.language, 0), hits.get(best, 0)
    if own > most or (own and own == most and not strict):
        return target.name
    if most - own >= _LEAD:
        return best
    return "no known language" if not own and sentence.longest_run >= _LONG_RUN else None


def _sentences(text: str) -> Iterator[_Sentence]:
    """The sentences of a text, without what is in no language."""
    plain = composed(_without_formulas("\n".join(lines_without_code(text))), "NFKC").lower()
    plain = _NOT_LANGUAGE.sub(" ", plain)
    scripts = {char: _script_of(char) for char in set(plain)}
    table = {ord(char): _kept(char, script) for char, script in scripts.items()}
    known: dict[str, _Word | None] = {}
    for line in plain.translate(table).split("\n"):
        words = line.split()
        for word in words:
            if word not in known:
                known[word] = _word(word, scripts.get(word[0], ""))
        if words:
            yield _sentence([known[word] for word in words])


def _kept(char: str, script: str) -> str:
    """What stands for a character: itself in a word, else a blank, a comma, or a line end for the end of a sentence."""
    if char in _ENDS:
        return "\n"
    if char in _COMMAS:
        return " , "
    if script in _ONE_BY_ONE:
        return f" {char} "
    return char if script or char == "_" or char.isdigit() or unicodedata.category(char)[0] == "M" else " "


def _script_of(char: str) -> str:
    """The script of a letter, as its name in Unicode begins; "" for all else."""
    if not char.isalpha():
        return ""
    script = re.split("[ -]", unicodedata.name(char, ""))[0]
    return "CJK" if script == "IDEOGRAPHIC" else script


def _word(word: str, script: str) -> _Word | None:
    """A word; None for a comma, and for what is none, such as a number or a name of a program."""
    if not script or "_" in word:
        return None
    return _Word(script, -(-len(word) // _LETTERS_A_WORD) if script in _RUN_ON else 1, _languages_of(word))


def _sentence(words: Sequence[_Word | None]) -> _Sentence:
    counts: dict[str, int] = {}
    hits: dict[str, int] = {}
    run = longest = 0
    for word in words:
        if word is None:
            run = 0
            continue
        run += 1
        longest = max(longest, run)
        counts[word.script] = counts.get(word.script, 0) + word.weight
        for language in word.languages:
            hits[language] = hits.get(language, 0) + 1
    if counts.keys() & _ONE_BY_ONE:
        # Japanese has kana in nearly every phrase; eight characters without one are Chinese.
        kana = counts.get("HIRAGANA", 0) + counts.get("KATAKANA", 0)
        hits |= {"ja": kana, "zh": max(0, counts.get("CJK", 0) - 4 * kana) // 4}
    return _Sentence(counts, hits, longest)


def _languages_of(word: str) -> Collection[str]:
    if languages := LANGUAGES_OF_WORD.get(word):
        return languages
    if word.isascii():
        return ()
    possible = [set(LANGUAGES_OF_LETTER[char]) for char in word if char in LANGUAGES_OF_LETTER]
    return set.intersection(*possible) if possible else ()


def _sum(sentences: Sequence[_Sentence]) -> _Sentence:
    words: dict[str, int] = {}
    hits: dict[str, int] = {}
    for sentence in sentences:
        for script, count in sentence.words.items():
            words[script] = words.get(script, 0) + count
        for language, count in sentence.hits.items():
            hits[language] = hits.get(language, 0) + count
    return _Sentence(words, hits, max((sentence.longest_run for sentence in sentences), default=0))


@functools.cache
def _script_name(script: str) -> str:
    """A language where a script has only one, else the script. There are some hundred scripts in Unicode."""
    languages = [language for language, scripts in SCRIPTS.items() if script in scripts]
    return languages[0] if len(languages) == 1 else f"{script.capitalize()} script"


def _without_formulas(text: str) -> str:
    """The text without what stands between delimiters. A delimiter that is not closed delimits nothing. Linear."""
    for opening, closing in _FORMULAS:
        kept, position = [], 0
        while (start := text.find(opening, position)) >= 0:
            end = text.find(closing, start + len(opening))
            if end < 0:
                break
            kept.append(text[position:start])
            position = end if closing == "\\end{" else end + len(closing)  # its name follows
        text = " ".join([*kept, text[position:]])
    return text
