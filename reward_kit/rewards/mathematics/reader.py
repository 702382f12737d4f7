"""Expressions as trees: LaTeX and plain notation, read by a recursive descent that does nothing but read.

Nothing is worked out here, so that 9^{9^{9^9}} is as cheap as x+1. Products without a sign bind like those with one:
1/2x is x/2. A whole number before a proper fraction is a mixed number: 2\\frac{1}{2} is 5/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from reward_kit.rewards.mathematics.tokens import FUNCTIONS, Token, Unreadable, tokenise

DEEPEST: Final = 40
"""Levels of nesting."""


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of an expression.

    Attributes:
        kind: "number", "symbol", "constant" (pi, e, i, infinity), "add", "multiply", "divide", "negate", "power",
            "factorial", "call", "plus_minus", "minus_plus" (of two parts, or of one).
        parts: what it is made of.
        name: of a symbol, a constant or a function.
        value: of a number.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


_CONSTANTS: Final = {"pi": "pi"} | dict.fromkeys(("infty", "infinity", "Infinity", "inf", "oo"), "infinity")
_SAME: Final = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
    "log": "log10", "lg": "log10", "sgn": "sign", "cosec": "csc", "tg": "tan", "lceil": "ceil", "lfloor": "floor",
}  # fmt: skip
_INVERSE: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "sinh": "asinh", "cosh": "acosh", "tanh": "atanh"}
_GREEK_LETTERS: Final = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi "
    "omega ell Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar"
)
_GREEK: Final = frozenset(_GREEK_LETTERS.split())
_OPAQUE: Final = frozenset("fghFGHP")
_SEVERAL_ARGUMENTS: Final = frozenset({"max", "min", "gcd", "lcm"})
_MOST_POSTFIXES: Final = 6
_ONE: Final = Node("number", value=Fraction(1))
_TURN: Final = Node("divide", (Node("constant", name="pi"), Node("number", value=Fraction(180))))


def read_expression(text: str) -> Node:
    """The tree of a cleaned text.

    Raises:
        Unreadable: it is no expression, uses notation that is not known here, or is nested too deeply.
    """
    tokens = tokenise(text)
    if sum(token.text in {"pm", "mp"} for token in tokens) > 2:
        raise Unreadable("it has more than two signs ±")
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.next.kind != "end":
        raise Unreadable(f"{reader.next.text!r} is not expected there")
    return tree


class _Reader:
    """The recursive descent: sum, product, factor (with powers), atom."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.position, self.depth = tokens, 0, 0
        self.bars = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.position]

    def take(self) -> Token:
        token = self.tokens[self.position]
        self.position += token.kind != "end"
        return token

    def at(self, *texts: str) -> bool:
        return self.next.text in texts and self.next.kind in {"sign", "command"}

    def expect(self, text: str) -> None:
        if not self.at(text):
            raise Unreadable(f"{text!r} is missing")
        self.take()

    def sum(self) -> Node:
        terms = [self._signed()]
        while self.at("+", "-", "pm", "mp"):
            sign = self.take().text
            right = self.product()
            if sign in {"pm", "mp"}:
                terms = [Node("plus_minus" if sign == "pm" else "minus_plus", (_of("add", terms), right))]
            else:
                terms.append(right if sign == "+" else Node("negate", (right,)))
        return _of("add", terms)

    def _signed(self) -> Node:
        if self.at("pm", "mp"):
            kind = "plus_minus" if self.take().text == "pm" else "minus_plus"
            return Node(kind, (self.product(),))
        return self.product()

    def product(self) -> Node:
        if self.at("-", "+"):
            return self._negated()
        factors = [self._mixed(self.factor())]
        while True:
            if self.at("*", "/"):
                sign = self.take().text
                right = self._negated(factor=True) if self.at("-", "+") else self.factor()
                factors.append(right if sign == "*" else Node("divide", (_ONE, right)))
            elif self._starts_factor():
                if self.next.kind == "number" and self.tokens[self.position - 1].kind == "number":
                    raise Unreadable("two numbers stand side by side")
                factors.append(self.factor())
            else:
                return _of("multiply", factors)

    def _negated(self, factor: bool = False) -> Node:
        negative = False
        while self.at("-", "+"):
            negative ^= self.take().text == "-"
        inner = self.factor() if factor else self.product()
        return Node("negate", (inner,)) if negative else inner

    def _mixed(self, tree: Node) -> Node:
        """A whole number and the proper fraction right behind it, as their sum."""
        if tree.kind != "number" or tree.value.denominator != 1 or not self.at("frac"):
            return tree
        start = self.position
        part = self.factor()
        top, bottom = part.parts if part.kind == "divide" else (tree, tree)
        if top.kind == bottom.kind == "number" and 0 < top.value < bottom.value and not self.at("^"):
            return Node("add", (tree, part))
        self.position = start
        return tree

    def _starts_factor(self) -> bool:
        token = self.next
        if token.kind in {"number", "letter"}:
            return True
        if token.kind == "command":
            return token.text not in {"pm", "mp", "circ", "rfloor", "rceil", "rangle", "deg", "degrees"}
        return token.text in {"(", "{", "["} or (token.text == "|" and not self.bars)

    def factor(self) -> Node:
        base = self.atom()
        for _ in range(_MOST_POSTFIXES):
            if self.at("!"):
                self.take()
                base = Node("factorial", (base,))
            elif self.at("%"):
                self.take()
                base = Node("divide", (base, Node("number", value=Fraction(100))))
            elif self.at("deg", "degrees"):
                self.take()
                base = Node("multiply", (base, _TURN))
            elif self.at("^"):
                self.take()
                base = self._raised(base)
            else:
                return base
        raise Unreadable(f"more than {_MOST_POSTFIXES - 1} powers and factorials stand on one another")

    def _raised(self, base: Node) -> Node:
        if self.at("circ") or (self.at("{") and self.tokens[self.position + 1].text == "circ"):
            braced = self.take().text == "{"
            if braced:
                self.take()
                self.expect("}")
            return Node("multiply", (base, _TURN))
        if self.at("prime"):
            raise Unreadable("a derivative")
        return Node("power", (base, self._exponent()))

    def _exponent(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable(f"it is nested more than {DEEPEST} deep")
        tree = self._read_exponent()
        self.depth -= 1
        return tree

    def _read_exponent(self) -> Node:
        if self.at("{"):
            return self.group()
        if self.at("-", "+"):
            return self._negated(factor=True)
        base = self.atom()
        if self.at("^"):
            self.take()
            return Node("power", (base, self._exponent()))
        return base

    def group(self) -> Node:
        """What stands in braces, or the one token that LaTeX takes where there are none: \\frac12 is one half."""
        if self.at("{"):
            self.take()
            tree = self.sum()
            self.expect("}")
            return tree
        token = self.next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.position] = Token("number", token.text[1:], False)
            return Node("number", value=Fraction(token.text[0]))
        return self.atom()

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable(f"it is nested more than {DEEPEST} deep")
        tree = self._atom(self.take())
        self.depth -= 1
        return tree

    def _atom(self, token: Token) -> Node:
        if token.kind == "number":
            return self._number(token.text)
        if token.kind == "letter":
            return self._letter(token.text)
        if token.kind == "command":
            return self._command(token.text)
        if token.text in {"(", "[", "{", "\\{"}:
            return self._bracketed(token.text)
        if token.text == "|":
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.expect("|")
            return Node("call", (tree,), "abs")
        raise Unreadable(f"{token.text!r} is not expected there" if token.text else "it ends too early")

    def _bracketed(self, opened: str) -> Node:
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.bars = bars
        self.expect({"(": ")", "[": "]", "{": "}", "\\{": "\\}"}[opened])
        return tree

    def _number(self, digits: str) -> Node:
        value = Fraction(digits.rstrip(".") or "0")
        if self.at("overline", "bar", "dot"):
            value = self._repeating(digits)
        elif self.at("_"):
            self.take()
            value = self._in_base(digits, self.group())
        return Node("number", value=value)

    def _repeating(self, digits: str) -> Fraction:
        """0.1\\overline{6} is one sixth."""
        self.take()
        braced = self.at("{")
        if braced:
            self.take()
        period = self.take().text
        if braced:
            self.expect("}")
        if "." not in digits or not period.isdigit():
            raise Unreadable("a bar stands where no decimals repeat")
        places = len(digits.partition(".")[2])
        return Fraction(digits.rstrip(".")) + Fraction(int(period), (10 ** len(period) - 1) * 10**places)

    @staticmethod
    def _in_base(digits: str, base: Node) -> Fraction:
        is_base = base.kind == "number" and base.value.denominator == 1 and 2 <= base.value <= 10
        if not is_base or not digits.isdigit() or int(max(digits)) >= base.value:
            raise Unreadable("no numeral of that base")
        return Fraction(int(digits, int(base.value)))

    def _letter(self, letter: str) -> Node:
        name = letter + self._subscript()
        if name in {"e", "i"}:
            return Node("constant", name=name)
        if letter in _OPAQUE and self.at("(") and not self.next.spaced:
            self.take()
            return Node("call", self._arguments(")"), f"?{name}")
        return Node("symbol", name=name)

    def _subscript(self) -> str:
        name = ""
        while self.at("'"):
            name += self.take().text
        if self.at("_"):
            self.take()
            tokens = [self.take()]
            if tokens[0].text == "{":
                tokens = []
                while not self.at("}") and self.next.kind != "end":
                    tokens.append(self.take())
                self.expect("}")
            name += "_" + "".join(token.text for token in tokens)
        return name

    def _command(self, name: str) -> Node:
        if name in _CONSTANTS:
            return Node("constant", name=_CONSTANTS[name])
        if name == "frac":
            return Node("divide", (self.group(), self.group()))
        if name == "binom":
            return Node("call", (self.group(), self.group()), "binomial")
        if name in {"lfloor", "lceil"}:
            tree = self.sum()
            self.expect("r" + name[1:])
            return Node("call", (tree,), _SAME[name])
        if name in {"sqrt", "cbrt"}:
            return self._root(name)
        if name in FUNCTIONS or name in _SAME:
            return self._function(name)
        if name == "text":
            return self._text()
        if name in _GREEK:
            return Node("symbol", name=name + self._subscript())
        raise Unreadable(f"\\{name} is not known")

    def _root(self, name: str) -> Node:
        degree = Node("number", value=Fraction(3 if name == "cbrt" else 2))
        if self.at("["):
            self.take()
            degree = self.sum()
            self.expect("]")
        inside = self._bracketed(self.take().text) if self.at("(") else self.group()
        return Node("call", (inside, degree), "root")

    def _function(self, name: str) -> Node:
        called, base, power = _SAME.get(name, name), None, None
        while self.at("_", "^"):
            if self.take().text == "_":
                base = self.group()
            else:
                power = self._exponent()
        if power is not None and _is_minus_one(power) and called in _INVERSE:
            called, power = _INVERSE[called], None
        parts = self._called_with(called)
        if base is not None:
            if called != "log10":
                raise Unreadable(f"\\{name} has a base")
            parts, called = (*parts, base), "log"
        tree = Node("call", parts, called)
        return tree if power is None else Node("power", (tree, power))

    def _called_with(self, name: str) -> tuple[Node, ...]:
        if self.at("(", "{", "["):
            return self._arguments({"(": ")", "{": "}", "[": "]"}[self.take().text], name in _SEVERAL_ARGUMENTS)
        if self.at("|") or not self._starts_factor():
            return (self.factor(),)
        factors = [self.factor()]
        while self._starts_factor() and not self.at("(", "[", "|") and self.next.text not in FUNCTIONS:
            factors.append(self.factor())
        return (_of("multiply", factors),)

    def _arguments(self, closing: str, several: bool = True) -> tuple[Node, ...]:
        bars, self.bars = self.bars, 0
        parts = [self.sum()]
        while several and self.at(","):
            self.take()
            parts.append(self.sum())
        self.expect(closing)
        self.bars = bars
        return tuple(parts)

    def _text(self) -> Node:
        """A letter or a function's name in another font; words are no expression."""
        self.expect("{")
        token = self.take()
        self.expect("}")
        if token.kind == "letter":
            return self._letter(token.text)
        if token.kind == "number":
            return self._number(token.text)
        if token.kind == "command" and token.text in FUNCTIONS:
            return self._command(token.text)
        raise Unreadable("words are no expression")


def _of(kind: str, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def _is_minus_one(node: Node) -> bool:
    return node.kind == "negate" and node.parts[0].kind == "number" and node.parts[0].value == 1
