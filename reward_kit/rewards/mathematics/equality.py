"""Whether an answer that was read is the expected one: by kind, part for part, and exactly unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from reward_kit.rewards.mathematics import values
from reward_kit.rewards.mathematics.arithmetic import Undefined, Value
from reward_kit.rewards.mathematics.forms import Form
from reward_kit.rewards.mathematics.numbers import close
from reward_kit.rewards.mathematics.reader import Node
from reward_kit.rewards.mathematics.text import compact
from reward_kit.rewards.mathematics.tokens import Unreadable
from reward_kit.rewards.mathematics.units import Unit

Units = Literal["ignore", "require"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What counts as equal: the policy for units, and the largest differences of real numbers."""

    units: Units = "ignore"
    absolute: float = 0.0
    relative: float = 0.0


def same(truth: Form, answer: Form, terms: Terms) -> bool:
    """Whether `answer` says what `truth` says; never raises on what a model wrote."""
    try:
        return _same(truth, answer, terms)
    except (Unreadable, RecursionError):
        return False


def _same(truth: Form, answer: Form, terms: Terms) -> bool:
    if truth.kind in {"words", "unread"} or answer.kind in {"words", "unread"}:
        text = compact(truth.text)
        return bool(text) and text == compact(answer.text)
    truth, answer = _single(truth), _single(answer)
    if "equation" in (truth.kind, answer.kind):
        return _same_equation(truth, answer, terms)
    if "several" in (truth.kind, answer.kind):
        return _same_several(truth, answer, terms)
    if truth.name and answer.name and truth.name != answer.name:
        return False
    if truth.kind == answer.kind == "value":
        return _same_quantity(truth, answer, terms)
    intervals = {truth.kind, answer.kind} == {"range", "tuple"}
    if truth.kind != answer.kind and not intervals:
        return False
    return _same_parts(truth, answer, terms)


def _same_parts(truth: Form, answer: Form, terms: Terms) -> bool:
    if truth.kind in {"set", "union"}:
        return _covers(truth.parts, answer.parts, terms) and _covers(answer.parts, truth.parts, terms)
    if (truth.opening, truth.closing) != (answer.opening, answer.closing) or len(truth.parts) != len(answer.parts):
        return False
    return all(_same(left, right, terms) for left, right in zip(truth.parts, answer.parts, strict=True))


def _single(form: Form) -> Form:
    """Several values that are all the same as the one value that they are: 3 or 6/2."""
    if form.kind != "several" or not form.parts:
        return form
    first = form.parts[0]
    same_all = all(_same(first, part, Terms(units="require")) for part in form.parts[1:])
    return first if same_all else form


def _same_several(truth: Form, answer: Form, terms: Terms) -> bool:
    """Values in any order. With braces on one side, how often each is named does not matter."""
    if "set" in (truth.kind, answer.kind):
        return _covers(truth.parts, answer.parts, terms) and _covers(answer.parts, truth.parts, terms)
    if truth.kind != answer.kind or len(truth.parts) != len(answer.parts):
        return False
    if _names(truth) and not _names(answer) and len(_names(truth)) > 1:
        return False
    return _matched(truth.parts, answer.parts, lambda left, right: _same(left, right, terms))


def _names(form: Form) -> set[str]:
    return {part.name for part in form.parts if part.kind == "equation" and part.name}


def _matched(left: Sequence[Form], right: Sequence[Form], equal: Callable[[Form, Form], bool]) -> bool:
    """Whether the parts can be paired; equality is as good as transitive, so the first fit will do."""
    free = list(right)
    for part in left:
        fit = next((index for index, other in enumerate(free) if equal(part, other)), None)
        if fit is None:
            return False
        del free[fit]
    return not free


def _covers(left: Sequence[Form], right: Sequence[Form], terms: Terms) -> bool:
    return all(any(_same(part, other, terms) for other in right) for part in left)


def _same_equation(truth: Form, answer: Form, terms: Terms) -> bool:
    """x = 5 against 5, x = 5 against x = 10/2, and two equations of which one is a multiple of the other.

    In a chain each member must be right: 9 = 10 is no way to say 10. A name counts where both sides have one.
    """
    if truth.kind == answer.kind == "equation":
        if truth.name and truth.name == answer.name:
            return all(_same(truth.parts[-1], member, terms) for member in answer.parts[1:])
        return len(truth.parts) == len(answer.parts) == 2 and _same_line(truth, answer)
    if answer.kind == "equation":
        members = answer.parts[1:] if answer.name else answer.parts
        return all(_same(truth, member, terms) for member in members)
    return bool(truth.name) and _same(truth.parts[-1], answer, terms)


def _same_line(truth: Form, answer: Form) -> bool:
    """Whether two equations have the same solutions because one is the other times a constant."""
    sides = [part.node or _number_node(part) for part in (*truth.parts, *answer.parts)]
    if len(truth.parts) != 2 or len(answer.parts) != 2 or any(side is None for side in sides):
        return False
    left, right, other_left, other_right = (side for side in sides if side is not None)
    first, second = Node("add", (left, _minus(right))), Node("add", (other_left, _minus(other_right)))
    if not values.symbols(first) or values.symbols(first) != values.symbols(second):
        return False
    return values.proportional(first, second)


def _minus(node: Node) -> Node:
    return Node("negate", (node,))


def _number_node(form: Form) -> Node | None:
    return None if form.number is None else Node("number", value=form.number)


def _same_quantity(truth: Form, answer: Form, terms: Terms) -> bool:
    scales = _scales(truth.unit, answer.unit, terms.units)
    return any(_same_number(truth, answer, left, right, terms) for left, right in scales)


def _scales(truth: Unit | None, answer: Unit | None, policy: Units) -> list[tuple[Fraction, Fraction]]:
    """By what truth and answer are multiplied before they are compared; each pair is one reading, none is no match.

    A unit on both sides must fit, and is converted. One that is left out, or that nobody knows, is no difference where
    units are ignored. A percentage is also the number that it stands for, under either policy.
    """
    one, plain = Fraction(1), (Fraction(1), Fraction(1))
    if truth is None and answer is None:
        return [plain]
    if truth is not None and answer is not None:
        if truth.dimension is None or answer.dimension is None:
            return [plain] if policy == "ignore" or truth.text == answer.text else []
        return [(truth.factor, answer.factor)] if truth.dimension == answer.dimension else []
    left, right = truth.factor if truth else one, answer.factor if answer else one
    is_percentage = (truth or answer) is not None and (truth or answer).dimension == ()  # type: ignore[union-attr]
    readings = [(left, right)] if is_percentage else []
    return [plain, *readings] if policy == "ignore" else readings


def _same_number(truth: Form, answer: Form, left: Fraction, right: Fraction, terms: Terms) -> bool:
    if truth.number is not None and answer.number is not None:
        return close(truth.number * left, answer.number * right, terms.absolute, terms.relative)
    expected, given = _node(truth, left), _node(answer, right)
    if values.has_infinity(expected) or values.has_infinity(given):
        return _infinite(expected) is not None and _infinite(expected) == _infinite(given)
    return values.equal(expected, given, _closeness(terms))


def _node(form: Form, factor: Fraction) -> Node:
    node = form.node or Node("number", value=form.number or Fraction(0))
    return node if factor == 1 else Node("multiply", (Node("number", value=factor), node))


def _infinite(node: Node) -> int | None:
    """1 for ∞, -1 for -∞, None for anything else."""
    if node.kind == "constant" and node.name == "infinity":
        return 1
    if node.kind == "negate" and (inner := _infinite(node.parts[0])) is not None:
        return -inner
    return None


def _closeness(terms: Terms) -> Callable[[Value, Value], bool] | None:
    if not terms.absolute and not terms.relative:
        return None

    def near(truth: Value, answer: Value) -> bool:
        try:
            expected, given = values.as_fraction(truth), values.as_fraction(answer)
        except Undefined:
            return False
        return expected is not None and given is not None and close(expected, given, terms.absolute, terms.relative)

    return near
