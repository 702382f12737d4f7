"""A reward for replying in the right language.

Languages are detected by their script; py3langid distinguishes languages that share a script.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.option_types import check_extra
from reward_kit.rewards.replies import Part, agent_messages, composed, last_reply, lines_without_code, passed
from reward_kit.typed_interface import reward_function

if TYPE_CHECKING:
    from py3langid.langid import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        LanguageIdentifier,
    )

# Languages that are not listed here use the Latin script. Serbian and Kurdish use both scripts.
_LANGUAGES_BY_SCRIPT: Final = {
    "ARABIC": "ar fa ku ps ug ur",
    "ARMENIAN": "hy",
    "BENGALI": "as bn",
    "CJK": "ja zh",
    "CYRILLIC": "ba be bg kk ky mk mn ru sr tg tt uk",
    "DEVANAGARI": "hi mr ne sa",
    "ETHIOPIC": "am",
    "GEORGIAN": "ka",
    "GREEK": "el",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "HANGUL": "ko",
    "HEBREW": "he",
    "HIRAGANA": "ja",
    "KANNADA": "kn",
    "KATAKANA": "ja",
    "KHMER": "km",
    "LAO": "lo",
    "MALAYALAM": "ml",
    "MYANMAR": "my",
    "ORIYA": "or",
    "SINHALA": "si",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
    "TIBETAN": "dz",
}
_BOTH_SCRIPTS: Final = frozenset({"ku", "sr"})
_COMMON_CODES: Final = (
    "am ar bg bn cs da de el en es fa fi fr gu he hi hu hy id it ja ka km kn ko lo ml mr my nl or pa pl pt ro ru si sv "
    "ta te th tr uk ur vi zh"
)
_COMMON: Final = frozenset(_COMMON_CODES.split())
"""The candidate languages for any text. If all languages were candidates, short English sentences could be
mistaken for Afrikaans.
"""
_CONFIDENT: Final = 0.8
_MOST_PIECES: Final = 1_000
_NOT_LANGUAGE: Final = re.compile(
    r"""
    `[^`\n]{1,300}`                                 # code in a line
    | (?:https?://|www\.)[!-~]{1,2000}
    | [\w.+-]{1,64}@[\w.-]{1,255}
    | </?[A-Za-z][^<>\n]{0,100}>                    # a tag
    | \$(?=\S)[^$\n]{0,299}(?<=\S)\$(?!\d)          # a formula, but not two amounts of money
    | \\end\{[^{}\n]{0,40}\}
    | \\[A-Za-z]{1,40}
    """,
    re.VERBOSE,
)
_FORMULAS: Final = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("\\begin{", "\\end{"))
_SENTENCE_ENDS: Final = frozenset(".!?;:\n。！？；：।॥؟؛…")
_WORD_PER_LETTER: Final = frozenset({"CJK", "HIRAGANA", "KATAKANA"})
_WITHOUT_BLANKS: Final = frozenset({"THAI", "LAO", "KHMER", "MYANMAR"})
_LETTERS_PER_WORD: Final = 4


def _check_language(options: Mapping[str, Any]) -> None:
    check_extra("languages", "py3langid")
    if options["language"] is not None:
        _target(options["language"])


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
    """Score the share of the agent's last message that is in the expected language, divided by `enough`.

    The maximum score is 1. This is the language consistency reward of DeepSeek-R1 (2025), in which the expected
    language is the language of the prompt. The reward counts words. In Chinese and Japanese, each character counts as a
    word, and in Thai, Lao, Khmer and Burmese, every four letters count as a word. Fenced and inline code, formulas,
    links, tags, numbers and names with an underscore are ignored. A reply that contains nothing but ignored parts
    scores 1, and an empty reply scores 0.

    Words in a different script are wrong. Languages that share a script are distinguished by py3langid, which the
    `languages` extra installs. It identifies each sentence's language among the common languages and the expected
    language. Uncertain sentences are joined and checked again. A name or a few words in a different language are
    therefore detected only if they are in a different script. Simplified and traditional Chinese count as one language.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        language: the ISO 639-1 code of the expected language, such as "de". A region or script suffix is ignored. If
            None, the expected language is the language of the last user message before the reply. If only the script of
            that message is certain, only the script is checked.
        enough: the share that is sufficient for a score of 1. For example, 0.9 leaves room for names in a different
            script.
        unknown: how to treat a reply in the expected script whose language is uncertain: "right" to score 1, or
            "unscored" to leave the rollout unscored.
        of: the part of the reply to check: the "whole" reply, its "thought" or its "answer".

    Raises:
        ConfigError: If the language is unknown, or if the `languages` extra is not installed.
        RewardError: If the prompt has no words in a known script, or if the language of the reply is uncertain and
            `unknown` is "unscored".

    Example:
        ```python
        with_options(same_language, language="de", of="answer")
        ```
    """
    _check_language({"language": language})
    reply = last_reply(messages, assistant_turns, of)
    if not reply.strip():
        return passed(False, "the reply is empty")
    target = _prompt_language(messages, assistant_turns) if language is None else _target(language)
    right, uncertain, others = _count(reply, target)
    if not right + uncertain + others.total():
        return passed(True, "the reply has no words in any language")
    if not right + others.total():
        if unknown == "unscored":
            raise RewardError(f"same_language: the language of the reply is uncertain; expected {target.name}")
        return passed(True, f"the language of {uncertain} words in the script of {target.name} is uncertain")
    share = right / (right + others.total())
    reason = f"{right} of {right + others.total()} words are in {target.name}"
    if others:
        reason += f"; the others are in {', '.join(name for name, _ in others.most_common(3))}"
    return EvaluateResult(score=min(1.0, share / enough), reason=reason)


class _Target(NamedTuple):
    """The expected language. `language` is "" if every language of the script is accepted."""

    name: str
    language: str
    scripts: frozenset[str]


class _Sentence(NamedTuple):
    """The number and the text of a sentence's words, keyed by script."""

    words: Mapping[str, int]
    texts: Mapping[str, str]


@functools.cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        MODEL_FILE,
        LanguageIdentifier,
    )

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@functools.cache
def known_languages() -> frozenset[str]:
    """Return the ISO 639-1 codes of all supported languages."""
    return frozenset(label for label in _identifier().labels if len(label) == 2)


@functools.cache
def _script_languages(script: str) -> frozenset[str]:
    if script == "LATIN":
        others = frozenset(" ".join(_LANGUAGES_BY_SCRIPT.values()).split())
        return known_languages() - others | _BOTH_SCRIPTS
    return frozenset(_LANGUAGES_BY_SCRIPT.get(script, "").split())


def _target(language: str) -> _Target:
    code = re.split(r"[-_]", language.strip())[0].lower()
    if code not in known_languages():
        raise ConfigError(
            f"option 'language': unknown language {language!r:.40}; known: {', '.join(sorted(known_languages()))}"
        )
    scripts = ("LATIN", *_LANGUAGES_BY_SCRIPT)
    return _Target(code, code, frozenset(script for script in scripts if code in _script_languages(script)))


def _prompt_language(messages: Sequence[Message], assistant_turns: Sequence[int] | None) -> _Target:
    """Return the language of the last user message before the agent's last message."""
    own = agent_messages(messages, assistant_turns)
    end = next((place for place, message in enumerate(messages) if own and message is own[-1]), len(messages))
    prompt = next((message.text for message in reversed(messages[:end]) if message.role == "user"), "")
    whole = _joined(list(_sentences(prompt)))
    known = {script: count for script, count in whole.words.items() if _script_languages(script)}
    if not known:
        raise RewardError("same_language: the prompt has no words in a known script; set the option `language`")
    script = max(known, key=lambda name: known[name])
    language = _identified(
        whole, frozenset(_WORD_PER_LETTER & known.keys()) if script in _WORD_PER_LETTER else frozenset({script}), ""
    )
    if language not in known_languages():
        if script != "CJK":
            return _Target(f"the {script.capitalize()} script", "", frozenset({script}))
        language = "zh"  # a few characters without kana
    return _target(language)


def _count(text: str, target: _Target) -> tuple[int, int, Counter[str]]:
    """Count the words in the expected language, the uncertain words, and the words in each other language or script."""
    right = 0
    others: Counter[str] = Counter()

    def own_words(sentence: _Sentence) -> int:
        return sum(count for script, count in sentence.words.items() if script in target.scripts)

    def is_certain(sentence: _Sentence) -> bool:
        nonlocal right
        own, language = own_words(sentence), target.language
        if own and language:
            language = _identified(sentence, target.scripts, language)
        if language == target.language:
            right += own
        elif language:
            others[language] += own
        return language == target.language or bool(language)

    unsure = []
    for sentence in _sentences(text):
        for script, count in sentence.words.items():
            if script not in target.scripts:
                languages = _script_languages(script)
                others[next(iter(languages)) if len(languages) == 1 else f"{script.capitalize()} script"] += count
        if not is_certain(sentence):
            unsure.append(sentence)
    whole = _joined(sorted(unsure, key=lambda sentence: sorted(sentence.texts.items())))
    return right, 0 if is_certain(whole) else own_words(whole), +others


def _identified(sentence: _Sentence, scripts: frozenset[str], target: str) -> str:
    """Return the language of a sentence's words in these scripts, or "" if the language is uncertain."""
    candidates = frozenset().union(*(_script_languages(script) for script in scripts)) & (_COMMON | {target})
    if len(candidates) == 1:
        return next(iter(candidates))
    text = " ".join(text for script, text in sentence.texts.items() if script in scripts)
    if not text:
        return ""
    ranked = _identifier().rank(text)
    among = [(language, chance) for language, chance in ranked if language in candidates]
    if among and among[0][1] >= _CONFIDENT * math.fsum(chance for _, chance in among):
        return str(among[0][0])
    # The result may be an uncommon language, or noise (code "zxx").
    return str(ranked[0][0]) if ranked[0][1] >= _CONFIDENT else ""


def _sentences(text: str) -> Iterator[_Sentence]:
    """Yield the sentences in a text, excluding code and other ignored parts.

    If there are too many sentences, groups of sentences are joined.
    """
    text = "\n".join(lines_without_code(text))
    for opening, closing in _FORMULAS:  # takes linear time; a delimiter that is not closed is ignored
        kept, position = [], 0
        while (begin := text.find(opening, position)) >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
            kept.append(text[position:begin])
            position = end if closing == "\\end{" else end + len(closing)  # followed by the name of the environment
        text = " ".join([*kept, text[position:]])
    plain = _NOT_LANGUAGE.sub(" ", composed(text, "NFKC").lower())
    scripts = {}  # the script of each letter, from the start of its Unicode name
    for char in set(plain):
        name = re.split("[ -]", unicodedata.name(char, ""))[0] if char.isalpha() else ""
        scripts[char] = "CJK" if name == "IDEOGRAPHIC" else name
    table = {ord(char): _kept(char, script) for char, script in scripts.items()}
    lines = [line for line in plain.translate(table).split("\n") if not line.isspace() and line]
    size = math.ceil(len(lines) / _MOST_PIECES) or 1
    for start in range(0, len(lines), size):
        words: dict[str, int] = {}
        texts: dict[str, list[str]] = {}
        for word in " ".join(lines[start : start + size]).split():
            script = scripts.get(word[0], "")
            if script and "_" not in word:  # otherwise a number or an identifier
                weight = -(-len(word) // _LETTERS_PER_WORD) if script in _WITHOUT_BLANKS else 1
                words[script] = words.get(script, 0) + weight
                texts.setdefault("CJK" if script in _WORD_PER_LETTER else script, []).append(word)
        if words:
            yield _Sentence(words, _texts(texts))


def _texts(parts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {script: ("" if script == "CJK" else " ").join(words) for script, words in parts.items()}


def _kept(char: str, script: str) -> str:
    """Return the replacement for a character: the character itself if it is part of a word, a newline, or a space.

    A character that ends a sentence becomes a newline, and other characters become a space.
    """
    if char in _SENTENCE_ENDS:
        return "\n"
    if script in _WORD_PER_LETTER:
        return f" {char} "
    return char if script or char == "_" or char.isdigit() or unicodedata.category(char)[0] == "M" else " "


def _joined(sentences: Sequence[_Sentence]) -> _Sentence:
    words: Counter[str] = Counter()
    texts: dict[str, list[str]] = {}
    for sentence in sentences:
        words.update(sentence.words)
        for script, text in sentence.texts.items():
            texts.setdefault(script, []).append(text)
    return _Sentence(words, _texts(texts))
