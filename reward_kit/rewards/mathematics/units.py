"""Units of measure behind a number: which they are, and how large each is beside the others of its kind.

Known units of one kind convert exactly (100 cm = 1 m, 50 cents = $0.50). Any other ("apples") is kept as a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from reward_kit.rewards.mathematics.text import DOLLAR

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """What stands with a number.

    Attributes:
        text: as it is written, in lower case.
        dimension: powers of its base kinds, sorted, such as (("length", 2),); () for a percentage; None if unknown.
        factor: its size, in the base units of its dimension.
    """

    text: str
    dimension: Dimension | None
    factor: Fraction = Fraction(1)


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
_CASED: Final = frozenset("mgshldnjwvak")
_PREFIXES: Final = {
    f"{DOLLAR}": "dollar",
    "€": "euro",
    "£": "gbp",
    "₹": "rupee",
    "¥": "yen",
    "\\pounds ": "gbp",
    "\\euro ": "euro",
}
_TEXT_TAIL: Final = re.compile(r"(?:[\s/*]*\\text\s*\{[^{}\\]{1,60}\}(?:\s*\^\s*(?:\{\s*-?[1-9]\s*\}|-?[1-9]))?\.?)+$")
_DEGREES: Final = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\s*\{\s*)?([CFK]?)\s*\}?$")
_WORDS_TAIL: Final = re.compile(
    r"(?P<value>.*[0-9})\]]|.*\\[a-z]+)\s*(?P<unit>%|[¢°€£¥₹" + DOLLAR + r"]|[A-Za-zµ][A-Za-zµ0-9^{}/*. -]{0,50})"
)
_NUMBER_HEAD: Final = re.compile(
    r"[-+]?[" + DOLLAR + r"€£¥₹]?\s*(?:\.?[0-9][0-9.,]*(?:\s*/\s*[0-9]+|\s+[0-9]+/[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*"
)
_WORDS_ABOUT_VALUES: Final = (
    "or and not is are was to than minus plus times over e i x y z n b c pi sqrt of if but half dozen hundred "
    "thousand million billion trillion no never wrong mod choose am pm a.m p.m"
)
_NO_UNIT: Final = frozenset(_WORDS_ABOUT_VALUES.split())
_SCALES: Final = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_PIECE: Final = re.compile(
    r"(?P<name>[a-zµ°¢€£¥₹％%" + DOLLAR + r"]+)\.?(?:\s*\^\s*\{?\s*(?P<power>-?[1-9])\s*\}?|(?P<digit>[23]))?"
)


def _read_table() -> dict[str, tuple[str, Fraction]]:
    units: dict[str, tuple[str, Fraction]] = {}
    for line in _TABLE.strip().splitlines():
        kind, _, rest = line.partition(" ")
        for entry in rest.split("|"):
            factor, _, names = entry.partition(":")
            units.update(dict.fromkeys(names.split(), (kind, Fraction(factor.strip()))))
    return units


_UNITS: Final = _read_table()


def split_unit(text: str) -> tuple[str, Unit | None]:
    """A cleaned text as its value and its unit; the unit is None where none stands there."""
    for prefix, name in _PREFIXES.items():
        bare = text.lstrip("+-")
        if bare.startswith(prefix):
            sign = "-" if text.startswith("-") else ""
            value, trailing = _split_tail(sign + bare[len(prefix) :].strip())
            return value, trailing if trailing is not None and trailing.dimension is not None else unit_named(name)
    return _split_tail(text)


def unit_named(text: str) -> Unit:
    """The unit that a text names, known or not."""
    name = " ".join(text.casefold().split())
    if name in {"%", "percent", "per cent", "percentage", "pct", "percentage points"}:
        return Unit("%", (), Fraction(1, 100))
    powers: dict[str, int] = {}
    factor, sign, pending = Fraction(1), 1, 1
    for word in name.replace("/", " / ").replace("*", " ").replace("-", " " if "^" not in name else "-").split():
        if word in {"/", "per", "a", "an"}:
            sign = -1
        elif word in {"square", "sq", "sq.", "cubic", "cu", "cu."}:
            pending = 2 if word.startswith("s") else 3
        elif word in {"squared", "cubed"} and powers:
            pending = 1
            return _raised(name, powers, factor, 2 if word == "squared" else 3)
        elif (piece := _known(word)) is None:
            return Unit(name, None)
        else:
            kind, size, power = piece
            powers[kind] = powers.get(kind, 0) + sign * pending * power
            factor *= size ** (sign * pending * power)
            pending = 1
    return Unit(name, tuple(sorted((k, p) for k, p in powers.items() if p)), factor) if powers else Unit(name, None)


def scale_of(text: str) -> tuple[str, int]:
    """A text that ends in a word such as million, as what stands before it and the factor: "5 million" is 5, 10**6."""
    head, _, last = text.rpartition(" ")
    factor = _SCALES.get(last.casefold())
    return (head.rstrip(), factor) if factor and _NUMBER_HEAD.fullmatch(head) else (text, 1)


def _raised(name: str, powers: dict[str, int], factor: Fraction, power: int) -> Unit:
    if len(powers) != 1:
        return Unit(name, None)
    return Unit(name, tuple((kind, count * power) for kind, count in powers.items()), factor**power)


def _known(word: str) -> tuple[str, Fraction, int] | None:
    match = _PIECE.fullmatch(word)
    if match is None:
        return None
    name = match["name"]
    singular = name[:-1] if name.endswith("s") and len(name) > 2 else name
    found = _UNITS.get(name) or _UNITS.get(singular)
    if found is None:
        return None
    return found[0], found[1], int(match["power"] or match["digit"] or 1)


def _split_tail(text: str) -> tuple[str, Unit | None]:
    if match := _DEGREES.search(text):
        return text[: match.start()].strip(), unit_named({"C": "°c", "F": "°f", "K": "k"}.get(match[1], "°"))
    tail = _TEXT_TAIL.search(text)
    if tail and tail.start() and text[: tail.start()].strip():
        named = re.sub(r"\\text\s*", "", tail[0]).replace("{", " ").replace("}", " ").replace("^ ", "^")
        return _unless_words(text, text[: tail.start()].strip(), re.sub(r"\s*\^\s*", "^", named).strip(" ."))
    head = _NUMBER_HEAD.match(text)
    if head and head.end() < len(text):
        rest = text[head.end() :].strip(" .")
        spaced = text[head.end() - 1].isspace()
        if _is_unit_text(rest, spaced):
            return _unless_words(text, text[: head.end()].strip(), rest)
    if text.endswith("%"):
        return text[:-1].strip(), unit_named("%")
    return text, None


def _is_unit_text(rest: str, spaced: bool) -> bool:
    """Whether what stands behind a number can be a unit; a single letter without a space is a variable."""
    if rest in {"%", "¢", "°"} or rest in _PREFIXES:
        return True
    if not rest or not rest[0].isalpha() or not re.fullmatch(r"[A-Za-zµ0-9^{}/*. -]+", rest) or len(rest) > 50:
        return False
    known = unit_named(rest).dimension is not None
    if len(re.match(r"[A-Za-zµ]*", rest)[0]) == 1:  # type: ignore[index]
        return known and spaced and rest[0].lower() in _CASED
    return known or (spaced and re.fullmatch(r"[A-Za-z]{2,}(?:[ -][A-Za-z]{2,}){0,3}", rest) is not None)


def _unless_words(text: str, value: str, unit: str) -> tuple[str, Unit | None]:
    """Value and unit, unless what looks like a unit says something about the value."""
    words = {word.casefold() for word in unit.split()}
    if not unit or words & _NO_UNIT:
        return text, None
    return value, unit_named(unit)
