r"""Rewards for final answers (strings, options and lists), and extraction of final answers from replies.

The final answer is the first of the following that is present:

1. The last `\boxed{…}` or `\fbox{…}` that is not empty. Boxes that are separated only by "and", "or" or a comma form
   one answer that has multiple values, so "\boxed{3} or \boxed{4}" does not equal 4.
2. The text after the last explicit mark: "#### 42", "the answer is …", "final answer: …" or "<answer>…</answer>".
3. The whole reply if it is one short line.
4. The last number in the reply, but only if the option `unmarked` allows this.

In a multiple-choice question, a letter counts only if it is stated as a choice. For example, "A dog" and "I think" do
not choose an option.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.quantities import LONGEST_TEXT, read_number, unwrap
from reward_kit.rewards.replies import composed, last_answer, last_text, passed, quoted, require_truth
from reward_kit.typed_interface import reward_function

Unmarked = Literal["refuse", "last_number"]
"""The handling of a reply that has no marked answer."""
LONGEST_LINE = 200
_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|([0-9]+|[A-Za-z])(?![0-9A-Za-z]))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GAP = re.compile(
    r"(?:[\s$.:()\[\]\\*,;/&{}]|\b(?:text|mathrm|quad|and|or|either|also)\b|\b[a-z](?:_\{?[0-9]\}?)?\s*=)*",
    re.IGNORECASE,
)
_CONNECTED = re.compile(r"[,;/&]|\b(?:and|or)\b|\\(?:lor|vee)\b", re.IGNORECASE)
_OR = re.compile(r"\bor\b|\\(?:lor|vee)\b", re.IGNORECASE)
_STOP = re.compile(r"[.?!](?=\s)|\n")
_MARK = re.compile(
    r"(?i)####[ \t]*|\b(?:final[ \t]+)?(?:answer|result|solution|option|choice)\b"
    r"(?:[ \t]+(?:to|for|of)\b[^.\n:=]{0,60}?)?[ \t]*(?:\*\*)?[ \t]*"
    r"(?:(?:is|are|equals|was|will be)\b(?:[ \t]+therefore|[ \t]+then)?[ \t]*:?|[:=])[ \t]*(?:\*\*(?=\s))?[ \t]*"
)
_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
_INLINE = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"))
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[ \t]+(?:because|since|as|so|which|where|when)\b|\n")
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}.,])[-+−]\s?)?(?<![\w.,])[$€£]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:\s?/\s?[0-9]+)?%?"
)


class FinalAnswer(NamedTuple):
    """The final answer of a reply.

    Attributes:
        text: the answer, or "" if the reply has no final answer.
        how: the way in which the answer was marked.
        why: the reason why the reply has no final answer, or "" if there is a final answer.
    """

    text: str
    how: Literal["box", "mark", "whole", "last_number", "none"]
    why: str = ""


def find_answer(text: str, unmarked: Unmarked = "refuse") -> FinalAnswer:
    """Return the final answer in a reply according to this module's rules. This takes linear time."""
    if (boxed := _boxed(text)) is not None:
        return boxed
    if marked := _marked(text):
        return FinalAnswer(marked, "mark")
    short = text.strip()
    if short and len(short) <= LONGEST_LINE and "\n" not in short:
        return FinalAnswer(short, "whole")
    if unmarked == "last_number" and (number := last_number(text)):
        return FinalAnswer(number, "last_number")
    return FinalAnswer("", "none", "the reply has no marked final answer" if short else "the reply is empty")


def last_number(text: str) -> str:
    """Return the last number in `text`, as written, or "" without a number."""
    last = ""
    for match in _NUMBER.finditer(text):
        last = match[0]
    return "".join(last.split())


def truth_text(text: str) -> str:
    """Return the answer that a ground truth contains.

    The answer is the text after the last "####", the content of the last box, or the whole ground truth.
    """
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = _boxed(text)
    return boxed.text if boxed is not None and boxed.text else text.strip()


def _boxed(text: str) -> FinalAnswer | None:
    """Return the contents of the last boxes as one answer, or None if nothing is boxed."""
    boxes: list[tuple[int, int, str]] = []  # start, end and content of each outermost box
    position = 0
    while match := _BOX.search(text, position):
        end, content = match.end(), match[2]
        if not content:
            depth, closing = 1, None
            for brace in _BRACE.finditer(text, end):
                depth += (brace[0] == "{") - (brace[0] == "}")
                if not depth:
                    closing = brace.start()
                    break
            if closing is None:
                return FinalAnswer("", "none", "the last \\boxed{ is not closed")
            content, end = text[end:closing], closing + 1
        if content.strip(" .…"):
            boxes.append((match.start(), end, content))
        position = end
    if not boxes:
        return None
    first = len(boxes) - 1
    while first:
        gap = text[boxes[first - 1][1] : boxes[first][0]]
        # An "or" within the same sentence joins boxes: a reply that offers alternatives has not chosen one.
        offers = _OR.search(gap) and not _STOP.search(gap)
        if len(gap) > LONGEST_LINE or not (offers or (_CONNECTED.search(gap) and _GAP.fullmatch(gap))):
            break
        first -= 1
    return FinalAnswer(" and ".join(dict.fromkeys(content.strip() for _, _, content in boxes[first:])), "box")


def _last_mark(text: str) -> tuple[str, str]:
    """Return the text that the last mark introduces, and the mark.

    For `<answer>`, the text is the content of the tag. For all other marks, it is the text after the mark.
    """
    closed = text.rfind(_TAG_CLOSE)
    opened = text.rfind(_TAG_OPEN, 0, closed) if closed >= 0 else -1
    last = None
    for match in _MARK.finditer(text):
        last = match
    if opened >= 0 and opened > (last.end() if last else -1):
        return text[opened + len(_TAG_OPEN) : closed].strip(), _TAG_OPEN
    return (text[last.end() :].lstrip(), last[0]) if last else ("", "")


def _marked(text: str) -> str:
    """Return the text from the last explicit mark to the end of its sentence, or "" without a mark."""
    rest, mark = _last_mark(text)
    if mark == _TAG_OPEN or not mark:
        return rest
    rest = rest[:4_000]
    if mark.startswith("#"):
        return rest.partition("\n")[0].strip()
    # Use inline math or bold text, unless the answer continues after it ("$3$ or $4$", "$5$ cm"); otherwise use all
    # words.
    for start, end in _INLINE:
        if rest.startswith(start):
            inner, closed, after = rest[len(start) :].partition(end)
            tail = _SENTENCE_END.split(after, maxsplit=1)[0].strip()
            if closed and (not tail or tail in {".", "!", "**", "$"}):
                return inner.strip()
            break
    line = _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
    return line[:-2].rstrip() if line.endswith("**") and line.count("**") == 1 else line


LONGEST = 100_000
"""The maximum number of characters in an answer. A longer answer counts as wrong."""
Normalization = Literal["strip", "casefold", "nfkc", "punctuation", "articles", "whitespace", "numbers"]
SQUAD: Final[tuple[Normalization, ...]] = ("casefold", "punctuation", "articles", "whitespace")
"""The normalization steps of the SQuAD 1.1 evaluation (Rajpurkar 2016), in order."""
_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


def normalize_text(text: str, steps: tuple[Normalization, ...]) -> str:
    """Apply the normalization steps to `text` in the given order.

    "strip" removes white space at both ends. "whitespace" also replaces each run of white space with one space.
    "casefold" ignores case. "nfkc" unifies compatible Unicode characters. "punctuation" removes characters in the
    Unicode class P and ASCII characters in class S. "articles" removes "a", "an" and "the". "numbers" replaces equal
    numbers with identical strings.
    """
    for step in steps:
        text = _STEPS[step](text)
    return text


_STEPS: Final[dict[str, Callable[[str], str]]] = {
    "strip": str.strip,
    "casefold": str.casefold,
    "nfkc": lambda text: composed(text, "NFKC"),
    "punctuation": lambda text: "".join(
        char for char in text if (kind := unicodedata.category(char)[0]) != "P" and not (kind == "S" and char.isascii())
    ),
    "articles": lambda text: _ARTICLES.sub(" ", text),
    "whitespace": lambda text: " ".join(text.split()),
    "numbers": lambda text: text if (number := read_number(text)) is None else str(number),
}


@reward_function
def exact_answer(
    messages: list[Message],
    ground_truth: str | int | float | list[str | int | float],
    *,
    normalise: tuple[Normalization, ...] = ("strip",),
    answer: Literal["whole", "marked"] = "whole",
) -> EvaluateResult:
    """Score 1 if the answer is one of the accepted strings, and 0 otherwise.

    Args:
        messages: the conversation. Only the last assistant message is read, and its reasoning is ignored.
        ground_truth: the accepted string, or a list of accepted strings.
        normalise: the normalization steps, which are applied to both sides in order: "strip", "casefold", "nfkc",
            "punctuation", "articles", "whitespace" and "numbers". The exact match metric of SQuAD uses ("casefold",
            "punctuation", "articles", "whitespace").
        answer: "whole" to compare the whole reply, or "marked" to compare the final answer, which is the content of the
            last box, the text after "the answer is" or "####", the content of `<answer>`, or a reply of one short line.

    Raises:
        RewardError: If the ground truth is missing, or is empty after normalization. The rollout is then unscored.

    Example:
        ```python
        exact_answer(messages, ["Paris", "City of Paris"], normalise=("casefold", "punctuation", "articles"))
        ```
    """
    truth = require_truth(ground_truth, "exact_answer")
    accepted = [str(item) for item in (truth if isinstance(truth, list | tuple) else [truth])]
    wanted = {normalize_text(text, normalise) for text in accepted}
    if not wanted:
        raise RewardError("exact_answer requires ground_truth, but the sample's ground_truth is an empty list")
    if "" in wanted and any(text.strip() for text in accepted):
        raise RewardError(f"exact_answer: ground_truth is empty after normalization ({', '.join(normalise)})")
    text = last_text(messages)
    if "think>" in text:
        text = last_answer(messages)
    if answer == "marked":
        final = find_answer(text)
        if not final.text:
            return passed(False, f"no answer: {final.why}")
        text = final.text
    if len(text) > LONGEST:
        return passed(False, f"the answer is longer than {LONGEST} characters")
    is_right = normalize_text(text, normalise) in wanted
    expected = " or ".join(quoted(item) for item in accepted[:3])
    return passed(is_right, f"the answer {quoted(text)} {'is' if is_right else 'is not'} {expected}")


_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox|left|right)\b|[{}$`\"“”]|\*\*|__")
_ALONE = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\].:]?")
_BRACKETED = re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]].*", re.DOTALL)
_LABELED = re.compile(r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])\s*[).:\]])\s*[-–—:.]?\s*(.*)", re.DOTALL)
_PREFIX = re.compile(
    r"(?i)(?:(?:both|either)\s+)?"
    r"(?:(?:the\s+)?(?:correct\s+|right\s+|best\s+)?(?:option|choice|letter|answer)s?\b\s*(?:(?:is|are)\b)?\s*:?\s*)?"
)
# "C depends" after an "or" is a second choice; "A dog" and "I think" are words.
_LEADING = re.compile(r"([B-HJ-Z])\b.*", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,|;|/|&|\b(?:and|or)\b)\s*", re.IGNORECASE)
_LAST = re.compile(r"(?:\(|\*\*\(?|\[)\s*([A-Z])\s*(?:\)?\*\*|\)|\])|^[ \t]*([A-Z])[).:]?[ \t]*\.?$", re.MULTILINE)
_FOLD: tuple[Normalization, ...] = ("nfkc", "casefold", "punctuation", "whitespace")


def _check_letters(options: Mapping[str, Any]) -> None:
    letters = options["letters"]
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]+", letters):
        raise ConfigError(f"option 'letters' must be distinct capital letters, such as 'ABCD', got {letters!r:.80}")


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
    r"""Score 1 if the reply chooses the right option and no other option, and 0 otherwise.

    The choice is read from the last `\boxed{…}`, from the text after the last "the answer is" or "answer:", or from a
    reply of one short line. It is a letter ("B", "(B)", "b", "**B**", "B) Paris", `\text{B}`, "option B") or the text
    of an option if the sample or the ground truth contains that text. A reply that chooses multiple different options
    scores 0, as does a letter followed by the text of a different option. See MMLU (Hendrycks 2021) and MMLU-Pro.

    Args:
        messages: the conversation. Only the last assistant message is read.
        ground_truth: a letter, a letter followed by the text of the option ("B) Paris"), or the text or index of one of
            the sample's options.
        sample: the row of the dataset. Its field `choices` or `options` contains the options as a list of strings, as a
            mapping from letters to strings, or as ARC's mapping with `label` and `text`.
        letters: the letters that denote the options, in order.
        unmarked: how to treat a longer reply that has no marked answer: "refuse" rejects it, and "last_letter" uses the
            last letter that is in brackets, in bold, or alone on its line.
        zero_based: True if an index in the ground truth counts from 0, as in MMLU, or False if it counts from 1.

    Raises:
        ConfigError: If `letters` are not distinct capital letters.
        RewardError: If the ground truth is missing, or if it matches no letter or option. The rollout is then unscored.

    Example:
        ```python
        choice_answer(messages, "B) Paris")  # 1 for "The answer is (B).", "**B**" and "Paris"
        ```
    """
    _check_letters({"letters": letters})
    texts = _option_texts(sample, letters)
    right, text = _right(require_truth(ground_truth, "choice_answer"), letters, texts, zero_based)
    if text:
        texts[right] = text
    reply = last_answer(messages)
    marked = find_answer(reply)
    chosen = _letters_in(marked.text[:LONGEST_TEXT], letters, texts) if marked.text else set()
    where = quoted(marked.text) if marked.text else marked.why
    if not chosen and unmarked == "last_letter":
        where = "no letter is in brackets, in bold, or alone on its line"
        alone = [match[1] or match[2] for match in _LAST.finditer(reply)]
        chosen = set([letter for letter in alone if letter in letters][-1:])
    if not chosen:
        return passed(False, f"no choice: {where}")
    if len(chosen) > 1:
        return passed(False, f"{len(chosen)} different choices ({', '.join(sorted(chosen))}) in {where}")
    letter = next(iter(chosen))
    return passed(letter == right, f"choice {letter} {'is' if letter == right else 'is not'} {right}")


def _letters_in(text: str, letters: str, texts: Mapping[str, str]) -> set[str]:
    """Return the letters that are chosen in a stated answer."""
    plain = unwrap(_COMMAND.sub(" ", text).strip())
    chosen = _letters_in_piece(plain, letters, texts)
    pieces = [piece for piece in _BETWEEN.split(plain) if piece]
    if chosen or len(pieces) < 2:
        return chosen
    for piece in pieces:
        leading = _LEADING.fullmatch(piece)
        chosen |= _letters_in_piece(piece, letters, texts) or ({leading[1]} & set(letters) if leading else set())
    return chosen


def _letters_in_piece(piece: str, letters: str, texts: Mapping[str, str]) -> set[str]:
    """Return the letter that is chosen in a part of the answer.

    If the letter and the option text in this part disagree, both letters are returned.
    """
    piece = _PREFIX.sub("", piece.strip(), count=1).strip()
    if by_text := _letters_with_text(piece, texts):
        return by_text
    if alone := _ALONE.fullmatch(piece):
        return {alone[1].upper()} & set(letters)
    labeled = _LABELED.fullmatch(piece)
    if labeled is None or (letter := (labeled[1] or labeled[2]).upper()) not in letters:
        return set()
    chosen = {letter} | _letters_with_text(labeled[3], texts)
    for more in _BETWEEN.split(labeled[3])[1:]:
        match = _ALONE.fullmatch(more.strip()) or _BRACKETED.fullmatch(more.strip())
        if match and match[1].isupper():
            chosen |= {match[1]} & set(letters)
    return chosen


def _letters_with_text(text: str, texts: Mapping[str, str]) -> set[str]:
    """Return the letters of the options that have this text."""
    folded = normalize_text(text, _FOLD)
    return {letter for letter, option in texts.items() if folded and normalize_text(option, _FOLD) == folded}


def _right(truth: Any, letters: str, texts: Mapping[str, str], zero_based: bool) -> tuple[str, str]:
    """Return the correct letter and the option text from the ground truth. The text is "" if absent."""
    if isinstance(truth, int) and not isinstance(truth, bool):
        position = truth - (not zero_based)
        if 0 <= position < len(letters):
            return letters[position], ""
    text = str(truth).strip()
    by_text = _letters_with_text(text, texts)
    if len(by_text) == 1:
        return by_text.pop(), ""
    if (alone := _ALONE.fullmatch(text)) and alone[1].upper() in letters:
        return alone[1].upper(), ""
    if (labeled := _LABELED.fullmatch(text)) and (letter := (labeled[1] or labeled[2]).upper()) in letters:
        return letter, labeled[3].strip()
    raise RewardError(f"choice_answer: ground_truth {quoted(text)} is neither a letter in {letters} nor an option")


def _option_texts(sample: Any, letters: str) -> dict[str, str]:
    """Return a mapping from letters to the texts of the sample's options."""
    row = sample if isinstance(sample, Mapping) else {}
    options = row.get("choices", row.get("options"))
    if isinstance(options, Mapping) and "label" in options and "text" in options:
        options = dict(zip(options["label"], options["text"], strict=False))
    if isinstance(options, Mapping):
        return {str(key).upper(): str(text) for key, text in options.items() if str(key).upper() in letters}
    if isinstance(options, Sequence) and not isinstance(options, str):
        pairs = zip(letters, (str(text) for text in options), strict=False)
        return {letter: re.sub(rf"^\(?{letter}[).:]\s*", "", text) for letter, text in pairs}
    return {}


MOST_ITEMS = 1_000
_BULLET = re.compile(r"[ \t]*(?:[-*•‣–]|[0-9]{1,4}[.)])[ \t]+(\S.*)")
_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
_LAST_AND = re.compile(r",?\s+(?:and|or)\s+", re.IGNORECASE)


@reward_function
def list_answer(
    messages: list[Message],
    ground_truth: Any,
    *,
    ordered: bool = False,
    duplicates: Literal["count", "ignore"] = "count",
    partial: Literal["none", "recall", "f1", "jaccard"] = "none",
    normalise: tuple[Normalization, ...] = ("strip", "nfkc", "casefold"),
) -> EvaluateResult:
    r"""Score 1 if the reply lists exactly the expected items, and 0 or the metric set by `partial` otherwise.

    The list can be a JSON array, lines with bullets or numbers, plain lines, or items separated by commas or
    semicolons. "and" may precede the last item. The list is read from the last box, from `<answer>`, from the text
    after the last "the answer is", or from the whole reply. The metrics are recall, precision, f1 and jaccard.

    Args:
        messages: the conversation. Only the last assistant message is read.
        ground_truth: a list, or a string that is parsed in the same way as the reply.
        ordered: True to compare the order as well. In this case, the correct items are those in the longest common
            subsequence.
        duplicates: "count" to require that items occur as often as expected, or "ignore" to remove duplicates.
        partial: the metric to use as the score if the list is not exactly right. "recall" rewards listing every
            conceivable item; "f1" and "jaccard" do not.
        normalise: the normalization steps for each item on both sides; see `exact_answer`. "numbers" makes 1,000 and
            1000.0 equal.

    Raises:
        RewardError: If the ground truth is missing or is not a list. The rollout is then unscored.

    Example:
        ```python
        list_answer(messages, ["red", "blue"])  # 1 for "Answer: Blue, red" and for "- red\n- blue"
        ```
    """
    truth = require_truth(ground_truth, "list_answer")
    if isinstance(truth, set | frozenset):
        truth = sorted(truth, key=str)
    wanted = truth if isinstance(truth, list | tuple) else read_list(str(truth))
    if wanted is None or len(wanted) > MOST_ITEMS:
        raise RewardError(f"list_answer: ground_truth is not a list of at most {MOST_ITEMS} items")
    reply = last_answer(messages)
    boxed, (marked, mark) = _boxed(reply), _last_mark(reply)
    listed = read_list(boxed.text if boxed and boxed.text else marked if mark else reply)
    if listed is None:
        return EvaluateResult(score=0.0, reason="the reply contains no list that can be parsed")
    if len(listed) > MOST_ITEMS:
        return EvaluateResult(score=0.0, reason=f"the reply lists {len(listed)} items; the limit is {MOST_ITEMS}")
    expected, stated = (
        [
            normalize_text(item if isinstance(item, str) else json.dumps(item, sort_keys=True, default=str), normalise)
            for item in items
        ]
        for items in (wanted, listed)
    )
    if duplicates == "ignore":
        expected, stated = list(dict.fromkeys(expected)), list(dict.fromkeys(stated))
    common = _in_order(expected, stated) if ordered else sum((Counter(expected) & Counter(stated)).values())
    is_right = common == len(expected) == len(stated)
    recall = common / len(expected) if expected else float(not stated)
    precision = common / len(stated) if stated else float(not expected)
    union = len(expected) + len(stated) - common
    shares = {
        "recall": recall,
        "precision": precision,
        "f1": 2 * recall * precision / (recall + precision) if common else float(is_right),
        "jaccard": common / union if union else 1.0,
    }
    in_order = " in order" if ordered else ""
    reason = f"{common} of {len(expected)} expected items are listed{in_order}; the list has {len(stated)} items"
    metrics = {name: MetricResult(score=share, reason=reason) for name, share in shares.items()}
    return EvaluateResult(score=shares.get(partial, float(is_right)), reason=reason, metrics=metrics)


def read_list(text: str) -> list[Any] | None:
    """Parse the items of a list. Return None if `text` contains no list or is too long."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    # The candidates for a JSON array are the whole text, its last code block, and the text from the last bracket at the
    # start of a line.
    candidates = [text, *_FENCE.findall(text)[-1:]]
    if (opened := text.rfind("\n[")) >= 0 or (opened := text.find("[")) >= 0:
        candidates.append(text[opened:].lstrip("\n")[: text.rfind("]") - opened + 1])
    for candidate in candidates:
        if candidate.strip().startswith("["):
            with suppress(ValueError, RecursionError):
                return list(json.loads(candidate))
    lines = [line for line in text.splitlines() if line.strip()]
    bullets: list[str] = []  # the last consecutive block
    for line in reversed(lines):
        if match := _BULLET.fullmatch(line):
            bullets.insert(0, match[1])
        elif bullets:
            break
    if bullets or len(lines) > 1:
        return [_bare(item) for item in bullets or lines]
    line = lines[0].strip().rstrip(".")
    if len(line) > 1 and (line[0], line[-1]) in {("[", "]"), ("{", "}"), ("(", ")")}:
        line = line[1:-1]
    pieces = line.split(";" if ";" in line else ",")
    pieces = [*pieces[:-1], *_LAST_AND.split(pieces[-1].strip(), maxsplit=1)]
    return [_bare(re.sub(r"^(?:and|or)\s+", "", piece.strip())) for piece in pieces if piece.strip()]


def _in_order(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for item in left:
        diagonal = 0
        for index, other in enumerate(right, start=1):
            above = row[index]
            row[index] = diagonal + 1 if item == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]


def _bare(item: str) -> str:
    """Remove quotes or bold marks around an item, and remove a comma or semicolon at the end."""
    item = item.strip().rstrip(",;").strip()
    for start, end in (('"', '"'), ("'", "'"), ("`", "`"), ("**", "**"), ("“", "”")):
        if len(item) > len(start) + len(end) and item.startswith(start) and item.endswith(end):
            return item[len(start) : -len(end)].strip()
    return item
