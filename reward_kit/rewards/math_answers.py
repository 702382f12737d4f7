"""Rewards for mathematical answers: `math_answer` for any expression and `number_answer` for numbers.

This module compares numbers with units exactly. It also handles the structure of answers, on which graders differ most:
multiple values, brackets, the sides of equations, and words. Only the remaining expressions are passed to math-verify.
The cost of math-verify is bounded: function calls are counted, and expressions that SymPy could expand to huge numbers
are rejected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.answers import FinalAnswer, Unmarked, find_answer, last_number, truth_text
from reward_kit.rewards.option_types import Tolerance, check_extra
from reward_kit.rewards.quantities import (
    FUNCTIONS,
    LONGEST_TEXT,
    Unit,
    clean,
    close,
    read_number,
    read_quantity,
)
from reward_kit.rewards.replies import last_answer, passed, quoted, require_truth
from reward_kit.typed_interface import reward_function

if TYPE_CHECKING:
    from reward_kit.rewards.symbolic import BoundedComparison

Units = Literal["ignore", "require"]


def _check_packages(_options: Mapping[str, Any]) -> None:
    check_extra("math", "math_verify", "sympy")


class EqualityRules(NamedTuple):
    """The rules that determine whether two answers are equal.

    Attributes:
        units: how missing units are treated; see `math_answer`.
        absolute: the maximum difference between two real numbers.
        relative: the maximum difference, as a fraction of the expected number.
        numbers_only: True to compare only numbers and no other expressions.
    """

    units: Units = "ignore"
    absolute: float = 0.0
    relative: float = 0.0
    numbers_only: bool = False


@reward_function(sandbox="warm")
@checks_options(_check_packages)
def math_answer(
    messages: list[Message],
    ground_truth: Any,
    *,
    unmarked: Unmarked = "refuse",
    units: Units = "ignore",
    absolute_tolerance: Tolerance = 0.0,
    relative_tolerance: Tolerance = 0.0,
) -> EvaluateResult:
    r"""Score 1 if the final answer is mathematically equal to the expected answer, and 0 otherwise.

    The answer is the last `\boxed{…}`, the text after the last "####", "the answer is" or "answer:", the content of
    `<answer>`, or the whole reply if it is one short line. Boxes that are offered as alternatives ("\boxed{3} or
    \boxed{4}") count as multiple values, which are equal to neither 3 nor 4.

    Numbers with units are compared as fractions, and words are compared as text. Multiple values, tuples, intervals and
    sets are compared item by item, according to their brackets. Equations are compared side by side, so x = 5 equals 5.
    All other expressions are compared by math-verify. Without a tolerance, 3.14 does not equal π, and 0.333 does not
    equal 1/3. An expression whose value could be huge, such as 9^{9^9}, scores 0 unless it is written exactly as
    expected. So does a comparison that math-verify cannot decide within a fixed number of function calls.

    Args:
        messages: the conversation. Only the last assistant message is read, and its reasoning is ignored.
        ground_truth: the expected answer. It can be a number, a string, a worked solution that ends in "#### …" or
            contains the answer in a box, or a list of accepted answers.
        unmarked: how to treat a reply that has no marked answer: "refuse" rejects it, and "last_number" uses the last
            number in it.
        units: "ignore" to accept a missing unit but reject a wrong one, or "require" to reject a missing unit as well.
            In both cases, compatible units are converted, and 5% equals 0.05.
        absolute_tolerance: the maximum difference between two real numbers.
        relative_tolerance: the maximum difference, as a fraction of the expected number. The larger of the two
            tolerances applies.

    Raises:
        ConfigError: If a tolerance is negative or, when a task is loaded, if the `math` extra is not installed.
        RewardError: If the ground truth is missing. The rollout is then unscored.

    Example:
        ```python
        math_answer(messages, r"\frac{1}{2}")  # 1 for "The answer is 0.5." and for r"\boxed{\tfrac{2}{4}}"
        ```
    """
    terms = EqualityRules(units, absolute_tolerance, relative_tolerance)
    truths = _accepted(ground_truth, "math_answer", terms)
    answer = find_answer(last_answer(messages), unmarked)
    if not answer.text:
        return passed(False, f"no answer: {answer.why}")
    if len(answer.text) > LONGEST_TEXT:
        return passed(False, f"the answer is longer than {LONGEST_TEXT} characters")
    return _compared(truths, answer.text, terms, answer)


@reward_function
def number_answer(
    messages: list[Message],
    ground_truth: Any,
    *,
    unmarked: Unmarked = "refuse",
    units: Units = "ignore",
    absolute_tolerance: Tolerance = 0.0,
    relative_tolerance: Tolerance = 0.0,
) -> EvaluateResult:
    r"""Score 1 if the final answer is the expected number, and 0 otherwise. See GSM8K (Cobbe 2021).

    The numbers are compared as exact fractions. The answer is found in the same way as in `math_answer`. It may contain
    a sign, thousands separators, decimals, an exponent, a fraction, a currency, a percentage or a unit, or it may have
    the form "x = 5". Multiple numbers do not count as an answer. This reward requires no extra and takes only
    microseconds, so it runs in the calling process.

    Args:
        messages: the conversation. Only the last assistant message is read.
        ground_truth: a number, a string that is a number or ends with one, as in "#### 42", or a list of accepted
            numbers.
        unmarked: how to treat a reply that has no marked answer; see `math_answer`.
        units: how missing units are treated; see `math_answer`.
        absolute_tolerance: the maximum difference.
        relative_tolerance: the maximum difference, as a fraction of the expected number. The larger of the two
            tolerances applies.

    Raises:
        ConfigError: If a tolerance is negative.
        RewardError: If the ground truth is missing or is not a number. The rollout is then unscored.

    Example:
        ```python
        number_answer(messages, 72)  # 1 for "… so #### 72", "The answer is $72.00." and r"\boxed{72}"
        ```
    """
    terms = EqualityRules(units, absolute_tolerance, relative_tolerance, numbers_only=True)
    truths = _accepted(ground_truth, "number_answer", terms)
    if unread := [truth for truth in truths if not _is_number(truth)]:
        raise RewardError(f"number_answer: ground_truth must be a number, got {quoted(unread[0])}")
    answer = find_answer(last_answer(messages), unmarked)
    if not answer.text:
        return passed(False, f"no answer: {answer.why}")
    text = answer.text
    if unmarked == "last_number" and not _is_number(text):
        text = last_number(text)
    if not _is_number(text):
        return passed(False, f"the answer {quoted(answer.text)} is not a single number")
    return _compared(truths, text, terms, answer)


def _accepted(ground_truth: Any, reward: str, terms: EqualityRules) -> list[str]:
    """Check the rules and return the accepted answers as strings."""
    for name, value in (("absolute_tolerance", terms.absolute), ("relative_tolerance", terms.relative)):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"option {name!r} must be a non-negative number, such as 0.001, got {value}")
    truth = require_truth(ground_truth, reward)
    texts = [truth_text(str(item)) for item in (truth if isinstance(truth, list | tuple) else [truth])]
    if not texts or not all(texts):
        raise RewardError(f"{reward} requires ground_truth, but the sample's ground_truth is empty")
    return texts


def _compared(truths: list[str], text: str, terms: EqualityRules, answer: FinalAnswer) -> EvaluateResult:
    is_right = any(is_equal(truth, text, terms) for truth in truths)
    expected = " or ".join(quoted(truth) for truth in truths[:3])
    return passed(
        is_right, f"the answer {quoted(answer.text)} ({answer.how}) {'is' if is_right else 'is not'} {expected}"
    )


def is_equal(truth: str, answer: str, terms: EqualityRules) -> bool:
    """Return True if two raw answers are equal. No text from the model can make this function raise an error."""
    left, right = _plain_number(truth), _plain_number(answer)
    if left is not None and right is not None:
        return close(left, right, terms.absolute, terms.relative)
    if max(len(truth), len(answer)) > LONGEST_TEXT:
        return False
    truth, answer = clean(truth), clean(answer)
    comparison = _Comparison(terms)
    try:
        if comparison.equal(truth, answer):
            return True
        # A pair may have been parsed as one number: "1,234" if "1, 234" is expected.
        pair = _values(answer, thousands=False)
        return len(_values(answer)) < len(pair) and comparison.several(_values(truth), pair)
    except RecursionError:
        return False


def _plain_number(text: str) -> Fraction | None:
    number = read_number(text)
    return read_number(text[1:-1]) if number is None and len(text) > 2 and text[0] == text[-1] == "$" else number


def _is_number(text: str) -> bool:
    """Return True if `text` contains only numbers, such as "5", "x = 10/2" or "3 or 4"."""
    if _plain_number(text) is not None:
        return True
    if len(text) > LONGEST_TEXT:
        return False
    members = [side for value in _values(clean(text)) for side in _members(_sides(value) or [value])]
    return bool(members) and all(read_quantity(member).number is not None for member in members)


_MOST_PARTS: Final = 100
_DEEPEST: Final = 12


class _Comparison:
    """Compares cleaned strings recursively, down to quantities and expressions.

    The work of math-verify is limited.
    """

    def __init__(self, terms: EqualityRules) -> None:
        self._terms = terms
        self._symbolic: BoundedComparison | None = None

    def equal(self, truth: str, answer: str, depth: int = 0) -> bool:
        if depth > _DEEPEST or not truth or not answer:
            return False
        if _is_words(truth) or _is_words(answer):
            return _compact(truth) == _compact(answer) != ""
        if truth == answer:
            return True
        left, right = _values(truth), _values(answer)
        if len(left) > 1 or len(right) > 1:
            return self.several(left, right, depth)
        truth, answer = _bare(truth), _bare(answer)
        one, other = _bracket(truth), _bracket(answer)
        if one and other:
            if (one[0], one[2]) != (other[0], other[2]):
                return False
            left, right = split_commas(one[1], bracketed=True), split_commas(other[1], bracketed=True)
            if max(len(left), len(right)) > _MOST_PARTS:
                return False
            if one[0] == "\\{":
                return self._same_set([part for part in left if part], [part for part in right if part], depth)
            return len(left) == len(right) and all(map(self.equal, left, right, [depth + 1] * len(left)))
        truth, answer = (_as_matrix(one) if one else truth), (_as_matrix(other) if other else answer)
        if _sides(truth) or _sides(answer):
            return self._equations(truth, answer, depth)
        quantity, stated = read_quantity(truth), read_quantity(answer)
        for first, second in _scales(quantity.unit, stated.unit, self._terms.units):
            if quantity.number is not None and stated.number is not None:
                numbers = quantity.number * first, stated.number * second
                if close(*numbers, self._terms.absolute, self._terms.relative):
                    return True
            elif self._expressions(_scaled(quantity.value, first), _scaled(stated.value, second)):
                return True
        return False

    def several(self, left: Sequence[str], right: Sequence[str], depth: int = 0) -> bool:
        """Compare values in any order. If either side is in braces, repeated values are ignored."""
        if max(len(left), len(right)) > _MOST_PARTS:
            return False
        left, right = self._collapsed(left, depth), self._collapsed(right, depth)
        if len(left) == len(right) == 1:
            return self.equal(left[0], right[0], depth + 1)
        sets = [_bracket(side[0]) if len(side) == 1 else None for side in (left, right)]
        for index, bracket in enumerate(sets):
            if bracket and bracket[0] == "\\{":
                parts = [part for part in split_commas(bracket[1], bracketed=True) if part]
                return self._same_set(parts if not index else left, right if not index else parts, depth)
        names = [{_name(sides[0]) for value in side if (sides := _sides(value))} - {""} for side in (left, right)]
        if len(left) != len(right) or (len(names[0]) > 1 and not names[1]):
            return False
        free = list(right)
        for part in left:
            fit = next((index for index, other in enumerate(free) if self.equal(part, other, depth + 1)), None)
            if fit is None:
                return False
            del free[fit]
        return True

    def _collapsed(self, values: Sequence[str], depth: int) -> Sequence[str]:
        """Return a single value if all values are exactly equal, as in "3 or 6/2"."""
        terms, self._terms = self._terms, EqualityRules("require", numbers_only=self._terms.numbers_only)
        try:
            same = len(values) > 1 and all(self.equal(values[0], value, depth + 1) for value in values[1:])
        finally:
            self._terms = terms
        return values[:1] if same else values

    def _same_set(self, left: Sequence[str], right: Sequence[str], depth: int) -> bool:
        return all(any(self.equal(part, other, depth + 1) for other in right) for part in left) and all(
            any(self.equal(other, part, depth + 1) for other in left) for part in right
        )

    def _equations(self, truth: str, answer: str, depth: int) -> bool:
        """Compare x = 5 with 5 or x = 10/2. Other pairs of equations are passed to math-verify.

        In a chain of equations, every side must be correct, so 9 = 10 does not equal 10. Variable names are compared if
        both equations have one.
        """
        left, right = _sides(truth), _sides(answer)
        if not left:
            return all(self.equal(truth, member, depth + 1) for member in _members(right))
        if not right:
            return bool(_name(left[0])) and self.equal(left[-1], answer, depth + 1)
        if _name(left[0]) and _name(left[0]) == _name(right[0]):
            return all(self.equal(left[-1], member, depth + 1) for member in right[1:])
        return len(left) == len(right) == 2 and self._expressions(truth, answer)

    def _expressions(self, truth: str, answer: str) -> bool:
        """Return True if math-verify finds that two expressions are equal, within its work limit."""
        if self._terms.numbers_only:
            return False
        if self._symbolic is None:
            from reward_kit.rewards.symbolic import BoundedComparison  # slow to import

            self._symbolic = BoundedComparison()
        return self._symbolic.equal(truth, answer, self._terms.absolute, self._terms.relative)


def _scaled(value: str, factor: Fraction) -> str:
    return value if factor == 1 else rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} * ({value})"


def _scales(truth: Unit | None, answer: Unit | None, policy: Units) -> list[tuple[Fraction, Fraction]]:
    """Return all possible interpretations of the units. Each is a pair of factors, for the truth and for the answer.

    If both have a unit, the units must be compatible and are converted. With "ignore", a missing or unknown unit is
    accepted. A percentage can also be interpreted as the plain number that it represents. The list is empty if the
    units do not match.
    """
    one, plain = Fraction(1), (Fraction(1), Fraction(1))
    if truth is None and answer is None:
        return [plain]
    if truth is not None and answer is not None:
        if truth.dimension is None or answer.dimension is None:
            return [plain] if policy == "ignore" or truth.text == answer.text else []
        return [(truth.factor, answer.factor)] if truth.dimension == answer.dimension else []
    unit = truth or answer
    scale = (truth.factor if truth else one, answer.factor if answer else one)
    readings = [scale] if unit is not None and unit.dimension == () else []
    return [plain, *readings] if policy == "ignore" else readings


# The structure of a cleaned string: parts outside of brackets, and parts that one pair of brackets encloses

_SIGN: Final = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_OPENING: Final = frozenset({"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"})
_CLOSING: Final = frozenset({")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"})
_AND_OR: Final = re.compile(
    r"\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\s&\s", re.IGNORECASE
)
_RELATION: Final = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|<=|>=|!=|==|=|<|>")
_THOUSANDS: Final = re.compile(r"[-+＄$€£¥₹]{0,2}\s*[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?(?![0-9,]).*", re.DOTALL)
_SURE_THOUSANDS: Final = re.compile(r"[^,]*,0[0-9]{2}(?![0-9]).*|[^,]*,[0-9]{3}\.[0-9].*", re.DOTALL)
_NAME: Final = re.compile(
    r"(?:\\[A-Za-z]+|[A-Za-z])\s*(?:_\s*(?:\{\s*\w{1,8}\s*\}|\w))?'{0,2}(?:\s*\(\s*[A-Za-z]\s*\))?"
)
_SEGMENT: Final = re.compile(r"(?:m\s*)?(?:\\(?:angle|overline|triangle)\s*\{?\s*)?[A-Z]{1,4}\s*\}?")
_MEMBER: Final = re.compile(rf"{_NAME.pattern}\s*\\in(?![A-Za-z])\s*(?P<set>.*)", re.DOTALL)
_TEXT: Final = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_FUNCTION_WORD: Final = re.compile(rf"(?:{FUNCTIONS}|frac|binom|floor|ceil|[a-z]?gcd|lcm)[A-Za-z]{{0,2}}|infinity")
_SHORT_WORDS: Final = frozenset({"yes", "no", "odd", "none", "dne", "one", "two", "six", "ten"})


def _is_words(text: str) -> bool:
    r"""Return True if an answer consists of words.

    It contains a word of at least four letters that is not a function, or text in `\text`.
    """
    inner = _TEXT.fullmatch(text)
    if (inner and re.search(r"[A-Za-z]{2,}", inner[1])) or text.casefold() in _SHORT_WORDS:
        return True
    if re.search(r"[0-9=<>]", text) or len(_split(text, _AND_OR)) > 1:
        return False
    return any(not _FUNCTION_WORD.fullmatch(word) for word in _WORD.findall(text))


def _compact(text: str) -> str:
    r"""Normalize `text` for comparing words: remove \text, spaces, case and surrounding punctuation."""
    words = text.replace("\\text", "").replace("{", "").replace("}", "").strip(" .,;:!\"'*_()")
    return "".join(words.split()).casefold()


def _bare(text: str) -> str:
    r"""Return `text` without "x ∈", \text and enclosing parentheses."""
    for _ in range(_DEEPEST):
        bracket = enclosed(text)
        if match := _MEMBER.fullmatch(text):
            text = match["set"]
        elif match := _TEXT.fullmatch(text):
            text = match[1].strip()
        elif bracket and bracket[0] == "(" and bracket[2] == ")" and len(split_commas(bracket[1], bracketed=True)) == 1:
            text = bracket[1]
        else:
            break
    return text


def _bracket(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the content and the closing bracket of a set, a tuple, an interval or an array."""
    bracket = enclosed(text)
    return bracket if bracket and bracket[0] in ("(", "[", "\\{", "\\langle") else None


def _as_matrix(bracket: tuple[str, str, str]) -> str:
    """Return an array of arrays, such as [[1, 2], [3, 4]], as LaTeX. Other brackets are left unchanged."""
    rows = [enclosed(row) for row in split_commas(bracket[1], bracketed=True)]
    if bracket[0] != "[" or not all(row and row[0] == "[" for row in rows):
        return "".join(bracket)
    return r"\begin{pmatrix}" + r"\\ ".join(row[1].replace(",", "&") for row in rows if row) + r"\end{pmatrix}"


def _sides(text: str) -> list[str]:
    """Return the sides of a chain of equations, or [] if the text is not a chain of equations."""
    outside = _outside(text)
    signs = [match for match in _RELATION.finditer(text) if match.start() in outside]
    if not signs or any(match[0] not in ("=", "==") for match in signs):
        return []
    ends = [*(match.start() for match in signs), len(text)]
    return [text[a:b].strip() for a, b in zip([0, *(match.end() for match in signs)], ends, strict=True)]


def _members(sides: Sequence[str]) -> Sequence[str]:
    """Return the sides that state a value: all sides except a variable name on the left."""
    return sides[1:] if len(sides) > 1 and _name(sides[0]) else sides


def _name(side: str) -> str:
    """Return the variable, pair of variables or words that form a side of an equation, or "" for any other side."""
    bracket = enclosed(side)
    if bracket and bracket[0] == "(":
        names = [_name(part) for part in split_commas(bracket[1], bracketed=True)]
        return f"({','.join(names)})" if len(names) > 1 and all(names) else ""
    if _NAME.fullmatch(side) or _SEGMENT.fullmatch(side) or _is_words(side):
        return "".join(side.split()).replace("{", "").replace("}", "")
    return ""


def _values(text: str, thousands: bool = True) -> list[str]:
    """Split the text at commas, "and" or "or" outside of brackets, and return the values.

    A value with ± becomes two values.
    """
    pieces = [piece for part in _split(text, _AND_OR) for piece in split_commas(part.strip(" ,;"), False, thousands)]
    values: list[str] = []
    for piece in filter(None, pieces):
        if "\\pm" in piece or "\\mp" in piece:
            upper, lower = piece.replace("\\pm", "+").replace("\\mp", "-"), piece.replace("\\pm", "-")
            values += [upper, lower.replace("\\mp", "+")]
        else:
            values.append(piece)
    return values


def _outside(text: str) -> dict[int, str]:
    """Return the characters of `text` that are outside of brackets and environments, keyed by position."""
    outside: dict[int, str] = {}
    depth = environments = 0
    for match in _SIGN.finditer(text):
        environments += (match[0] == "\\begin") - (match[0] == "\\end")
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth = max(0, depth - 1)
        elif not depth and not environments:
            outside[match.start()] = match[0]
    return outside


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split `text` at each separator outside of brackets, and strip white space."""
    outside = _outside(text)
    cuts = [match for match in separator.finditer(text) if match.start() in outside]
    ends = [*(match.start() for match in cuts), len(text)]
    return [text[a:b].strip() for a, b in zip([0, *(match.end() for match in cuts)], ends, strict=True)]


_COMMA, _SPACED_COMMA, _SEMICOLON = re.compile(","), re.compile(r",(?=\s)"), re.compile(";")


def split_commas(text: str, bracketed: bool, thousands: bool = True) -> list[str]:
    """Split `text` at commas and semicolons, except at thousands separators.

    Outside of brackets, 1,234 is one number. In brackets it is two numbers, unless the commas between values are
    followed by a space or a group starts with 0, since no value starts with 0.
    """
    parts: list[str] = []
    for half in _split(text, _SEMICOLON):
        spaced = re.search(r",\s", half) is not None
        for group in _split(half, _SPACED_COMMA) if spaced else [half]:
            sure = not bracketed or spaced or _SURE_THOUSANDS.fullmatch(group) is not None
            is_one = thousands and sure and _THOUSANDS.fullmatch(group) is not None
            parts.extend([group] if is_one else _split(group, _COMMA))
    return parts


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the content and the closing bracket if one pair of brackets encloses the text.

    For any other text, return None.
    """
    signs = [(match.start(), match[0]) for match in _SIGN.finditer(text)]
    if len(signs) < 2 or signs[0][1] not in _OPENING or signs[-1][1] not in _CLOSING:
        return None
    depth = 0
    for position, sign in signs:
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if not depth and position != signs[-1][0]:
            return None
    opening, closing = signs[0][1], signs[-1][1]
    return (opening, text[len(opening) : -len(closing)].strip(), closing) if not depth else None
