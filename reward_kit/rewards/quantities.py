r"""Exact parsing of numbers and units, without a math parser.

1,000 = 1{,}000 = 1e3 = 10^3, 0.5 = 1/2 = \frac{1}{2}, 1 1/2 = 3/2, -3 = −3. Nothing is rounded, so 0.333 does not equal
1/3. Known, compatible units are converted exactly, as in 100 cm = 1 m and 50 cents = $0.50. Unknown units, such as
"apples", are compared as words.

The input may be malicious, so every step takes linear time.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

from reward_kit.rewards.replies import composed

LONGEST_NUMBER: Final = 400
"""The maximum number of characters in a number; a longer number does not count as an answer."""
LARGEST_EXPONENT: Final = 1_000
"""The maximum exponent of a power of ten, positive or negative."""
LONGEST_TEXT: Final = 2_000
"""The maximum number of characters in one answer; a longer answer is not parsed."""
DOLLAR: Final = "＄"
"""Represents a dollar sign that means money; plain dollar signs only delimit mathematics."""
_MINUS: Final = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "＋": "+", "\u00a0": " ", "\u202f": " "}
)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_PLAIN: Final = re.compile(rf"(?P<digits>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,5}}))?")
_SCIENTIFIC: Final = re.compile(
    rf"(?:(?P<digits>{_DECIMAL})\s*(?:\*|×|·|x|\\times|\\cdot)\s*)?"
    r"10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<braced>[+-]?[0-9]{1,5})\s*\}|(?P<bare>[+-]?[0-9]{1,5}))"
)
_LATEX_FRACTION = (
    r"\\[dtc]?frac\s*(?:\{\s*(?P<ltop>[+-]?[0-9]+)\s*\}\s*\{\s*(?P<lbottom>[+-]?[0-9]+)\s*\}"
    r"|(?P<stop>[0-9])\s*(?P<sbottom>[0-9])|(?P<mtop>[0-9])\s*\{\s*(?P<mbottom>[0-9]+)\s*\})"
)
_FRACTION: Final = re.compile(rf"(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})|{_LATEX_FRACTION}")
_MIXED: Final = re.compile(rf"(?P<whole>[0-9]+)(?:\s+(?P<top>[0-9]+)\s*/\s*(?P<bottom>[0-9]+)|\s*{_LATEX_FRACTION})")
_REPEATING: Final = re.compile(r"(?P<digits>[0-9]*\.[0-9]*)\\overline\s*\{\s*(?P<repeated>[0-9]+)\s*\}")
_BASED: Final = re.compile(r"(?P<digits>[0-9]+)_\s*(?:\{\s*(?P<braced>[0-9]{1,2})\s*\}|(?P<bare>[0-9]))")
_SEPARATOR: Final = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!\s?|\\[,;: !])(?=[0-9]{3}(?![0-9]))")


def read_number(text: str) -> Fraction | None:
    """Parse `text` as an exact number. Return None if `text` is not a number.

    The following are accepted: signs, thousands separators in groups of three, decimals, exponents, powers of ten,
    plain fractions, LaTeX fractions of integers, mixed numbers with a proper fraction, repeating decimals, and numbers
    in another base.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    text = _SEPARATOR.sub(",", text.translate(_MINUS)).strip()
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if text[:1] in ("+", "-") else text
    number: Fraction | None = None
    if (match := _PLAIN.fullmatch(text)) or (match := _SCIENTIFIC.fullmatch(text)):
        groups = match.groupdict()
        power = int(groups.get("exponent") or groups.get("braced") or groups.get("bare") or "0")
        if abs(power) <= LARGEST_EXPONENT:
            number = _decimal(match["digits"] or "1") * Fraction(10) ** power
    elif (match := _FRACTION.fullmatch(text)) or (match := _MIXED.fullmatch(text)):
        top, bottom = (
            _decimal(match[end] or match["l" + end] or match["s" + end] or match["m" + end])
            for end in ("top", "bottom")
        )
        if "whole" in match.groupdict():
            number = int(match["whole"]) + top / bottom if 0 < top < bottom else None
        elif bottom:
            number = top / bottom
    elif match := _REPEATING.fullmatch(text):
        whole, repeated = match["digits"], match["repeated"]
        places = len(whole) - whole.index(".") - 1
        number = _decimal(whole) + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**places)
    elif match := _BASED.fullmatch(text):
        base = int(match["braced"] or match["bare"])
        if 2 <= base <= 10 and int(max(match["digits"])) < base:
            number = Fraction(int(match["digits"], base))
    return None if number is None else sign * number


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def close(truth: Fraction, answer: Fraction, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Return True if two numbers differ by no more than the larger of the two tolerances.

    Tolerances are interpreted as decimals, so 0.1 is exactly one tenth. `relative` is a fraction of `truth`.
    """
    if truth == answer or not (absolute or relative):
        return truth == answer
    return abs(truth - answer) <= max(Fraction(str(absolute)), Fraction(str(relative)) * abs(truth))


FUNCTIONS = (
    "sqrt|sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|exp|ln|log|max|min|gcd|lcm|pi|infty|alpha|beta|"
    "gamma|theta|lambda|phi|omega|sigma|mu|rho|tau"
)
"""A regular expression for words that are mathematical even without a backslash."""
_SIGNS: Final = {
    "−": "-", "–": "-", "—": "-", "－": "-", "×": "*", "⋅": "*", "·": "*", "∗": "*", "∙": "*", "÷": "/",
    "∕": "/", "⁄": "/", "≤": r" \le ", "≥": r" \ge ", "≠": r" \ne ", "∞": r" \infty ", "∪": r" \cup ",
    "∈": r" \in ", "∅": r" \emptyset ", "±": r" \pm ", "∓": r" \mp ", "√": r"\sqrt ", "°": r"^\circ ", "′": "'",
    "″": "''", "｛": r"\{", "｝": r"\}", "\u2061": "", "\u2062": "", "\u200b": "", "\ufeff": "", "“": '"',
    "”": '"', "’": "'", "≈": "=", "…": "...", "ϕ": r"\phi ", "ϵ": r"\epsilon ", "λ": r"\lambda ",
}  # fmt: skip
_GREEK: Final = {
    chr(code): f"\\{unicodedata.name(chr(code)).rpartition(' ')[2].lower()} "
    for code in range(0x3B1, 0x3CA)
    if code not in (0x3BB, 0x3C2)
}
_SAME: Final = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "geq": "ge", "leqslant": "le", "geqslant": "ge",
    "neq": "ne", "lt": "<", "gt": ">", "times": "*", "cdot": "*", "div": "/", "lbrace": "{", "rbrace": "}",
    "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "varnothing": "emptyset",
    "degree": "^\\circ", "degrees": "^\\circ", "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta",
    "operatorname": "text", "mbox": "text", "emph": "text", "bold": "text", "bm": "text", "boldsymbol": "text",
    "dbinom": "binom", "tbinom": "binom", "lor": r"\text{ or }", "vee": r"\text{ or }", "wedge": r"\text{ and }",
    "land": r"\text{ and }", "colon": ":", "dots": "...", "ldots": "...", "cdots": "...", "approx": "=",
}  # fmt: skip
_FONT: Final = re.compile(r"text(?:rm|bf|it|sf|tt|normal)|math(?:rm|bf|it|sf)")
_TYPESETTING: Final = (
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle textstyle "
    "scriptstyle limits nolimits rm bf it sf quad qquad hspace phantom thinspace enspace nobreak boxed fbox tag "
    "normalsize large Large small hfill"
)
_DROPPED: Final = frozenset(_TYPESETTING.split())
_COMMAND: Final = re.compile(r"(\\\\)|\\([A-Za-z]+)\s?|\\([,;:!> \n~])|~")
_UNWRAPPED: Final = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"), ("__", "__"))
_POWERS: Final = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_INDICES: Final = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED: Final = re.compile(f"[{''.join(_POWERS)}]+")
_LOWERED: Final = re.compile(f"[{''.join(_INDICES)}]+")
_VULGAR: Final = re.compile(r"([0-9]?)([¼-¾⅐-⅞])")
_MONEY: Final = re.compile(r"\$(?=\s?[-+]?[0-9.])")


def clean(text: str) -> str:
    """Convert LaTeX, Unicode and plain notation to a common spelling, and remove formatting. This takes linear time."""
    text = unwrap(text.strip())
    text = _SEPARATOR.sub(",", text).replace("\\$", DOLLAR).replace("\\%", "%").replace("\\#", "#").replace("\\&", "&")
    if text.count("$") % 2:
        text = _MONEY.sub(DOLLAR, text, count=1)
    text = _VULGAR.sub(
        lambda m: f"{m[1]} {unicodedata.normalize('NFKC', m[2]).replace('⁄', '/')}".lstrip(), text.replace("$", " ")
    )
    text = _RAISED.sub(lambda m: "^{" + "".join(_POWERS[c] for c in m[0]) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + "".join(_INDICES[c] for c in m[0]) + "}", text)
    text = "".join(_SIGNS.get(char, _GREEK.get(char, char)) for char in text)
    text = composed(text.replace(DOLLAR, "\x00"), "NFKC").replace("\x00", DOLLAR)
    text = text.replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    return unwrap(_COMMAND.sub(_respelled, text).replace("**", "^").strip())


def unwrap(text: str) -> str:
    """Return `text` without enclosing math delimiters or bold marks, and without a final full stop."""
    for _ in range(4):
        before = text
        text = text.strip().rstrip(" \t\r\n,;")
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for start, end in _UNWRAPPED:
            whole = len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end)
            inner = text[len(start) : -len(end)]
            if whole and start not in inner and end not in inner and not inner.endswith("\\"):
                text = inner.strip()
        if text == before:
            return text
    return text


def _respelled(match: re.Match[str]) -> str:
    rows, name, space = match.groups()
    if rows:
        return rows + " "
    if name is None or name in _DROPPED:
        return "" if space == "!" else " "
    same = "text" if _FONT.fullmatch(name) else _SAME.get(name, name)
    if same.isalpha():
        return f"\\{same} "
    return "\\" + same if same in "{}" else same if len(same) == 1 else same + " "


Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number.

    Attributes:
        text: the name of the unit, in lower case.
        dimension: the sorted powers of the base dimensions, such as (("length", 2),), or () for a percentage. If None,
            the unit is unknown.
        factor: the size of the unit, in base units of its dimension.
    """

    text: str
    dimension: Dimension | None
    factor: Fraction = Fraction(1)


class Quantity(NamedTuple):
    """A cleaned string, split into a value and a unit. `number` is `None` if the value is not a plain number."""

    value: str
    number: Fraction | None
    unit: Unit | None


_TABLE: Final = """
length 1: m meter metre | 1/1000: mm millimeter millimetre | 1/100: cm centimeter centimetre
length 1/10: dm decimeter decimetre | 1000: km kilometer kilometre | 254/10000: in inch inche inches
length 3048/10000: ft foot feet | 9144/10000: yd yard | 1609344/1000: mi mile
mass 1: g gram gramme | 1/1000: mg milligram | 1000: kg kilogram kilo | 1000000: tonne | 45359237/100000: lb pound
mass 45359237/1600000: oz ounce
time 1: s sec second | 1/1000: ms millisecond | 60: min minute | 3600: h hr hour | 86400: day d | 604800: week wk
year 1: year yr | 1/12: month
volume 1: l liter litre | 1/1000: ml milliliter millilitre
dollar 1: dollar usd buck ＄ | 1/100: cent ¢ penny pennie pennies
euro 1: euro eur €
sterling 1: gbp £
rupee 1: rupee inr ₹
yen 1: yen jpy ¥
angle 1: degree deg °
celsius 1: celsius °c
fahrenheit 1: fahrenheit °f
kelvin 1: kelvin k
force 1: n newton
energy 1: j joule | 1000: kj kilojoule
power 1: w watt | 1000: kw kilowatt
voltage 1: v volt
current 1: a amp ampere
pressure 1: pa pascal
frequency 1: hz hertz
amount 1: mol mole
"""
_UNITS: Final = {
    name: (line.partition(" ")[0], Fraction(entry.partition(":")[0].strip()))
    for line in _TABLE.strip().splitlines()
    for entry in line.partition(" ")[2].split("|")
    for name in entry.partition(":")[2].split()
}
_LETTER_UNITS: Final = frozenset("mgshldnjwvak")
_PERCENT: Final = frozenset({"%", "percent", "per cent", "percentage", "pct", "percentage points"})
_PREFIXES: Final = {
    DOLLAR: "dollar", "€": "euro", "£": "gbp", "₹": "rupee", "¥": "yen", "\\pounds ": "gbp", "\\euro ": "euro",
}  # fmt: skip
_TEXT_TAIL: Final = re.compile(r"(?:[\s/*]*\\text\s*\{[^{}\\]{1,60}\}(?:\s*\^\s*(?:\{\s*-?[1-9]\s*\}|-?[1-9]))?\.?)+$")
_DEGREES: Final = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\s*\{\s*)?([CFK]?)\s*\}?$")
_NUMBER_HEAD: Final = re.compile(
    r"[-+]?[" + DOLLAR + r"€£¥₹]?\s*(?:\.?[0-9][0-9.,]*(?:\s*/\s*[0-9]+|\s+[0-9]+/[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*"
)
_WORDS_ABOUT_VALUES: Final = (
    "or and not is are was to than minus plus times over e i x y z n b c pi sqrt of if but half dozen hundred "
    "thousand million billion trillion no never wrong mod choose am pm a.m p.m"
)
_NO_UNIT: Final = frozenset(_WORDS_ABOUT_VALUES.split())
_SCALES: Final = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_PIECE: Final = re.compile(
    r"(?P<name>[a-zµ°¢€£¥₹％%" + DOLLAR + r"]+)\.?(?:\s*\^\s*\{?\s*(?P<power>-?[1-9])\s*\}?|(?P<digit>[23]))?"
)


def read_quantity(text: str) -> Quantity:
    """Split a cleaned string into a value and a unit. A scale word belongs to the value, as in "5 million"."""
    value, unit = split_unit(text)
    head, _, last = value.rpartition(" ")
    scale = _SCALES.get(last.casefold())
    if scale and _NUMBER_HEAD.fullmatch(head):
        number = read_number(head)
        return Quantity(value, None if number is None else number * scale, unit)
    return Quantity(value, read_number(value), unit)


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split a cleaned string into a value and a unit. The unit is `None` if the text has no unit."""
    bare = text.lstrip("+-")
    for prefix, name in _PREFIXES.items():
        if bare.startswith(prefix):
            sign = "-" if text.startswith("-") else ""
            value, trailing = _split_tail(sign + bare[len(prefix) :].strip())
            return value, trailing if trailing is not None and trailing.dimension is not None else unit_named(name)
    return _split_tail(text)


def unit_named(text: str) -> Unit:
    """Return the unit with this name, or a new unit if the name is unknown."""
    name = " ".join(text.casefold().split())
    if name in _PERCENT:
        return Unit("%", (), Fraction(1, 100))
    powers: dict[str, int] = {}
    factor, sign, pending = Fraction(1), 1, 1
    for word in name.replace("/", " / ").replace("*", " ").replace("-", " " if "^" not in name else "-").split():
        if word in {"/", "per", "a", "an"}:
            sign = -1
        elif word in {"square", "sq", "sq.", "cubic", "cu", "cu."}:
            pending = 2 if word.startswith("s") else 3
        elif word in {"squared", "cubed"} and len(powers) == 1:
            power = 2 if word == "squared" else 3
            return Unit(name, tuple((kind, count * power) for kind, count in powers.items()), factor**power)
        elif match := _PIECE.fullmatch(word):
            plural = match["name"]
            known = _UNITS.get(plural) or _UNITS.get(plural.removesuffix("s") if len(plural) > 2 else "")
            if known is None:
                return Unit(name, None)
            power = sign * pending * int(match["power"] or match["digit"] or 1)
            powers[known[0]] = powers.get(known[0], 0) + power
            factor *= known[1] ** power
            pending = 1
        else:
            return Unit(name, None)
    return Unit(name, tuple(sorted((k, p) for k, p in powers.items() if p)), factor) if powers else Unit(name, None)


def _split_tail(text: str) -> tuple[str, Unit | None]:
    if match := _DEGREES.search(text):
        return text[: match.start()].strip(), unit_named({"C": "°c", "F": "°f", "K": "k"}.get(match[1], "°"))
    value = unit = ""
    head, tail = _NUMBER_HEAD.match(text), _TEXT_TAIL.search(text)
    if tail and text[: tail.start()].strip():
        named = re.sub(r"\\text\s*", "", tail[0]).replace("{", " ").replace("}", " ").replace("^ ", "^")
        value, unit = text[: tail.start()].strip(), re.sub(r"\s*\^\s*", "^", named).strip(" .")
    elif head and head.end() < len(text):
        rest = text[head.end() :].strip(" .")
        if _is_unit_text(rest, spaced=text[head.end() - 1].isspace()):
            value, unit = text[: head.end()].strip(), rest
    if not unit and not value:
        return (text[:-1].strip(), unit_named("%")) if text.endswith("%") else (text, None)
    # The text after a number may qualify it: "5 is wrong", "5 or 6".
    is_unit = bool(unit) and not {word.casefold() for word in unit.split()} & _NO_UNIT
    return (value, unit_named(unit)) if is_unit else (text, None)


def _is_unit_text(rest: str, spaced: bool) -> bool:
    """Return True if the text after a number can be a unit.

    A single letter directly after the number, without a space, is a variable instead.
    """
    if rest in {"%", "¢", "°"} or rest in _PREFIXES:
        return True
    if not rest or not rest[0].isalpha() or not re.fullmatch(r"[A-Za-zµ0-9^{}/*. -]+", rest) or len(rest) > 50:
        return False
    known = unit_named(rest).dimension is not None
    if re.match(r"[A-Za-zµ](?![A-Za-zµ])", rest):
        return known and spaced and rest[0].lower() in _LETTER_UNITS
    return known or (spaced and re.fullmatch(r"[A-Za-z]{2,}(?:[ -][A-Za-z]{2,}){0,3}", rest) is not None)
