"""One spelling of mathematical text: LaTeX, Unicode and plain notation come out the same before anything is read.

What only sets type is dropped (spacing, sizes, fonts, dollar signs); what has a meaning is kept.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from reward_kit.rewards.replies import composed

LONGEST_TEXT: Final = 2_000
"""Characters of one answer. Nothing longer is read."""

DOLLAR: Final = "＄"
"""A dollar that is money; a plain one only opens and closes mathematics."""

_SIGNS: Final = {
    "−": "-", "–": "-", "—": "-", "－": "-", "×": "*", "⋅": "*", "·": "*", "∗": "*", "∙": "*", "÷": "/",
    "∕": "/", "⁄": "/", "≤": r" \le ", "≥": r" \ge ", "≠": r" \ne ", "∞": r" \infty ", "∪": r" \cup ",
    "∈": r" \in ", "∅": r" \emptyset ", "±": r" \pm ", "∓": r" \mp ", "√": r"\sqrt ", "°": r"^\circ ", "′": "'",
    "″": "''", "｛": r"\{", "｝": r"\}", "\u2061": "", "\u2062": "", "\u200b": "", "\ufeff": "", "“": '"',
    "”": '"', "’": "'", "≈": "=", "…": "...",
}  # fmt: skip
_GREEK: Final = {
    chr(code): f"\\{unicodedata.name(chr(code)).rpartition(' ')[2].lower()} "
    for code in range(0x3B1, 0x3CA)
    if code != 0x3C2
} | {"λ": r"\lambda ", "ϕ": r"\phi ", "ϵ": r"\epsilon ", "µ": "µ", "π": r"\pi "}
_SAME: Final = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "geq": "ge", "leqslant": "le", "geqslant": "ge",
    "neq": "ne", "lt": "<", "gt": ">", "times": "*", "cdot": "*", "div": "/", "lbrace": "{", "rbrace": "}",
    "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "varnothing": "emptyset",
    "degree": "^\\circ", "degrees": "^\\circ", "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta",
    "textrm": "text", "textbf": "text", "textit": "text", "textsf": "text", "texttt": "text", "textnormal": "text",
    "mathrm": "text", "mathbf": "text", "mathit": "text", "mathsf": "text", "mbox": "text", "boldsymbol": "text",
    "bm": "text", "emph": "text", "bold": "text", "operatorname": "text", "dbinom": "binom", "tbinom": "binom",
    "lor": r"\text{ or }", "vee": r"\text{ or }", "wedge": r"\text{ and }", "land": r"\text{ and }", "colon": ":",
    "dots": "...", "ldots": "...", "cdots": "...", "arccos": "arccos", "sqrtsign": "sqrt", "approx": "=",
    "rightarrow": "to", "longrightarrow": "to", "Rightarrow": "to", "implies": "to",
}  # fmt: skip
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
_VULGAR: Final = re.compile(r"[0-9]?[¼-¾⅐-⅞]")
_THOUSANDS: Final = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!\s?|\\[,;: !])(?=[0-9]{3}(?![0-9]))")
_MONEY: Final = re.compile(r"\$(?=\s?[-+]?[0-9.])")


def clean(text: str) -> str:
    """`text` in one spelling, without what only sets type. Linear in its length."""
    text = unwrap(text.strip())
    text = _THOUSANDS.sub(",", text).replace("\\$", DOLLAR).replace("\\%", "%").replace("\\#", "#").replace("\\&", "&")
    if text.count("$") % 2:
        text = _MONEY.sub(DOLLAR, text, count=1)
    text = _VULGAR.sub(_spelled_fraction, text.replace("$", " "))
    text = _RAISED.sub(lambda m: "^{" + "".join(_POWERS[c] for c in m[0]) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + "".join(_INDICES[c] for c in m[0]) + "}", text)
    text = "".join(_SIGNS.get(char) or _GREEK.get(char) or char for char in text if _SIGNS.get(char) != "")
    text = composed(text.replace(DOLLAR, "\x00"), "NFKC").replace("\x00", DOLLAR)
    text = text.replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    return unwrap(_COMMAND.sub(_respelled, text).replace("**", "^").strip())


def unwrap(text: str) -> str:
    """`text` without mathematics delimiters, bold marks and a full stop around the whole of it."""
    for _ in range(4):
        before = text
        text = _without_stop(text.strip())
        for start, end in _UNWRAPPED:
            whole = len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end)
            inner = text[len(start) : -len(end)]
            if whole and start not in inner and end not in inner and not inner.endswith("\\"):
                text = inner.strip()
        if text == before:
            return text
    return text


def compact(text: str) -> str:
    """`text` for a comparison as words: cleaned, without \\text, spaces, case and punctuation around it."""
    words = clean(text).replace("\\text", "").replace("{", "").replace("}", "").strip(" .,;:!\"'*_()")
    return "".join(words.split()).casefold()


def _without_stop(text: str) -> str:
    """Without the punctuation that ends a sentence; a factorial's exclamation mark stays."""
    text = text.rstrip(" \t\r\n,;")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def _spelled_fraction(match: re.Match[str]) -> str:
    digit = match[0][:-1]
    spelled = unicodedata.normalize("NFKC", match[0][-1]).replace("⁄", "/")
    return f"{digit} {spelled}" if digit else spelled


def _respelled(match: re.Match[str]) -> str:
    rows, name, space = match.groups()
    if rows:
        return rows + " "
    if name is None or name in _DROPPED:
        return "" if space == "!" else " "
    same = _SAME.get(name, name)
    if same.isalpha():
        return f"\\{same} "
    return same if len(same) == 1 and same not in "{}" else "\\" + same if same in "{}" else same + " "
