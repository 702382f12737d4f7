"""Tests that are written as assertions, taken apart: what is asked goes to the sandbox, what is expected stays here.

`assert f(3) == [1, 2, 3]` becomes the question `f(3)` and a condition on its answer. The condition is evaluated here by
a small interpreter of Python's expressions that knows constants, comparisons, arithmetic and a few functions, and that
meets nothing but plain data. What it does not know is refused, since the only other way would be to run the assertion
beside the code that it tests, where that code can read it.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.errors import RewardError
from reward_kit.rewards.programs.inside import decode, encode
from reward_kit.rewards.programs.values import Rules, is_same

_MOST_DIGITS = 10_000
_MOST_ITEMS = 1_000_000
_MOST_TIMES = 1_000
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(
            abs,
            all,
            any,
            bool,
            complex,
            float,
            frozenset,
            int,
            len,
            list,
            max,
            min,
            round,
            set,
            sorted,
            str,
            sum,
            tuple,
        ),
        *(dict, math.isclose, math.sqrt, math.floor, math.ceil),
    )
}
_CONSTANTS = {"math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, holder: item in holder,
    ast.NotIn: lambda item, holder: item not in holder,
}
_UNSUITABLE = (TypeError, ValueError, ArithmeticError, LookupError, MemoryError, RecursionError)


class _Unknown(Exception):
    """An expression that is not evaluated here; the text says which."""


class Condition(NamedTuple):
    """One assertion.

    Attributes:
        calls: what is asked, each `{"args", "kwargs"}` in the form of `encode`.
        test: the expression, with a name in the place of each call.
        names: what the names in it stand for, the calls' left out.
        text: the assertion as it was written.
    """

    calls: tuple[dict[str, Any], ...]
    test: ast.expr
    names: Mapping[str, Any]
    text: str

    def holds(self, answers: Sequence[Any], tolerance: float = 0.0) -> bool:
        """Whether it holds for these answers, as Python has it; one that cannot be compared does not.

        With a tolerance, the two sides of an outermost `==` may differ by it in their numbers.
        """
        try:
            names = {**self.names, **{f"answer {number}": decode(answer) for number, answer in enumerate(answers)}}
            if bool(_value(self.test, names, is_ours=False)):
                return True
            if not tolerance or not isinstance(self.test, ast.Compare) or not isinstance(self.test.ops[0], ast.Eq):
                return False
            left, right = (_value(side, names, is_ours=False) for side in (self.test.left, self.test.comparators[0]))
            return len(self.test.ops) == 1 and is_same(right, encode(left), Rules(tolerance))
        except (*_UNSUITABLE, _Unknown):
            return False


def conditions_of(source: str, function: str, what: str) -> list[Condition]:
    """The assertions of a text.

    Args:
        source: statements `assert …`, or a function `check(candidate)` that consists of them.
        function: what is tested; the parameter of `check` is another name for it.
        what: the field they come from, for errors.

    Raises:
        RewardError: a statement is something else, or cannot be taken apart; it says which line and what to do.
    """
    try:
        body: list[ast.stmt] = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{what} is not Python: {error}") from None
    reader = _Reader(function, what)
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and statement.args.args:
            inner = _Reader(function, what, reader.names, statement.args.args[0].arg)
            for line in statement.body:
                inner.read(line)
            reader.found += inner.found
        else:
            reader.read(statement)
    if not reader.found:
        raise RewardError(f"{what} has no assertion about {function}")
    return reader.found


class _Reader:
    """Reads statements one after the other.

    Args:
        function: the name that is called.
        what: the field, for errors.
        names: constants that are known.
        alias: another name of the function.
    """

    def __init__(self, function: str, what: str, names: Mapping[str, Any] | None = None, alias: str = "") -> None:
        self._function, self._functions, self._what = function, {function, alias} - {""}, what
        self.names: dict[str, Any] = dict(names or {})
        self.found: list[Condition] = []

    def read(self, statement: ast.stmt) -> None:
        """Add what one statement asserts.

        Raises:
            RewardError: it cannot be taken apart.
        """
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass) or _does_nothing(statement):
            return
        try:
            if isinstance(statement, ast.Assert):
                self._add(statement.test)
            elif isinstance(statement, ast.For) and isinstance(statement.target, ast.Name) and not statement.orelse:
                self._unroll(statement, statement.target.id)
            elif isinstance(statement, ast.Assign) and all(isinstance(name, ast.Name) for name in statement.targets):
                value = _value(statement.value, self.names, is_ours=True)
                self.names.update({name.id: value for name in statement.targets if isinstance(name, ast.Name)})
            elif not _calls_only(statement, "check", self._function):
                raise _Unknown(f"{type(statement).__name__} is no assertion")
        except (_Unknown, *_UNSUITABLE) as error:
            raise RewardError(
                f"{self._what}, line {statement.lineno}: {ast.unparse(statement)[:120]!r} cannot be asked as a "
                f"question ({error}); write it as a test with args and expected, because it is not run beside the code "
                "that it tests"
            ) from None

    def _unroll(self, loop: ast.For, name: str) -> None:
        """The body of a loop over constants, as often as it runs."""
        rounds = list(_value(loop.iter, self.names, is_ours=True))
        if len(rounds) > _MOST_TIMES:
            raise _Unknown(f"it runs more than {_MOST_TIMES:,} times")
        for value in rounds:
            self.names[name] = value
            for statement in loop.body:
                self.read(statement)

    def _add(self, written: ast.expr) -> None:
        taker = _Calls(self._functions, self.names)
        test = taker.visit(copy.deepcopy(written))
        if taker.calls:
            answers = {f"answer {number}" for number in range(len(taker.calls))}
            test = _Folded(answers, self.names).visit(test)
            _check_known(test, self.names.keys() | answers)
            self.found.append(Condition(tuple(taker.calls), test, dict(self.names), ast.unparse(written)))
        elif not _value(test, self.names, is_ours=True):
            raise _Unknown("it asks nothing and does not hold")


class _Calls(ast.NodeTransformer):
    """Takes the calls of the tested function, by any of its names, out of an expression."""

    def __init__(self, functions: Collection[str], names: Mapping[str, Any]) -> None:
        self._functions, self._names = functions, names
        self.calls: list[dict[str, Any]] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call of the function becomes a name for its answer."""
        if ast.unparse(node.func) not in self._functions:
            return self.generic_visit(node)
        arguments = [_value(argument, self._names, is_ours=True) for argument in node.args]
        named = {_keyword(one): _value(one.value, self._names, is_ours=True) for one in node.keywords}
        self.calls.append(call_of(arguments, named))
        return ast.copy_location(ast.Name(f"answer {len(self.calls) - 1}", ast.Load()), node)


class _Folded(ast.NodeTransformer):
    """Calculates what holds no answer, and refuses arithmetic with answers that could not be bounded."""

    def __init__(self, answers: Collection[str], names: Mapping[str, Any]) -> None:
        self._answers, self._names = answers, names

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Arithmetic."""
        if not any(isinstance(inner, ast.Name) and inner.id in self._answers for inner in ast.walk(node)):
            return ast.copy_location(ast.Constant(_value(node, self._names, is_ours=True)), node)
        self.generic_visit(node)
        constants = [side.value for side in (node.left, node.right) if isinstance(side, ast.Constant)]
        are_numbers = all(isinstance(value, int | float | complex) for value in constants)
        if isinstance(node.op, ast.Pow) or (isinstance(node.op, ast.Mult | ast.Mod) and not are_numbers):
            raise _Unknown("an answer is not raised to a power, repeated or formatted here")
        return node


def call_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """A call as it goes to the sandbox."""
    return {"args": ["list", [encode(value) for value in arguments]], "kwargs": encode(dict(named))}


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise _Unknown("arguments from a dict")
    return keyword.arg


def _does_nothing(statement: ast.stmt) -> bool:
    """A docstring, or a name alone on its line."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Name)


def _calls_only(statement: ast.stmt, name: str, argument: str) -> bool:
    """The statement `check(f)` with which some datasets end."""
    return ast.unparse(statement) == f"{name}({argument})"


def _check_known(node: ast.AST, names: set[str] | frozenset[str]) -> None:
    """Refuse an expression that could not be evaluated whatever the answers are."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id not in names and inner.id not in {*_FUNCTIONS, "math"}:
            raise _Unknown(f"{inner.id} is not known here")
        if isinstance(inner, ast.Call):
            _function(inner)
        elif isinstance(inner, ast.expr) and not isinstance(inner, _KNOWN):
            raise _Unknown(f"{type(inner).__name__} is not evaluated here")
        elif isinstance(inner, ast.Attribute):
            _constant(inner)


def _range(*ends: int) -> range:
    made = range(*ends)
    if len(made) > _MOST_ITEMS:
        raise _Unknown("a range of this length is not made here")
    return made


_FUNCTIONS["range"] = _range


def _function(node: ast.Call) -> Callable[..., Any]:
    name = ast.unparse(node.func).removeprefix("math.")
    if name not in _FUNCTIONS or any(keyword.arg is None for keyword in node.keywords):
        raise _Unknown(f"{name}() is not known here")
    return _FUNCTIONS[name]


def _constant(node: ast.Attribute) -> Any:
    name = ast.unparse(node)
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name.removeprefix("math.") not in _FUNCTIONS:
        raise _Unknown(f"{name} is not known here")
    return None


_KNOWN = (
    *(ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.Subscript, ast.Slice, ast.Attribute, ast.IfExp),
)


def _value(node: ast.expr | ast.slice, names: Mapping[str, Any], *, is_ours: bool) -> Any:
    """What an expression is worth.

    Args:
        node: the expression.
        names: what its names stand for.
        is_ours: no answer of a program stands in it, so that texts may be repeated and numbers raised to a power.
    """

    def of(inner: ast.expr) -> Any:
        return _value(inner, names, is_ours=is_ours)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        kind = list if isinstance(node, ast.List) else tuple if isinstance(node, ast.Tuple) else set
        return kind(of(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {of(key): of(item) for key, item in zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.Attribute):
        return _constant(node)
    if isinstance(node, ast.Call):
        return _function(node)(*map(of, node.args), **{_keyword(one): of(one.value) for one in node.keywords})
    return _of_operator(node, of, is_ours=is_ours)


def _of_operator(node: ast.AST, of: Callable[[ast.expr], Any], *, is_ours: bool) -> Any:
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](of(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _calculated(node.op, of(node.left), of(node.right), is_ours=is_ours)
    if isinstance(node, ast.BoolOp):
        decide = all if isinstance(node.op, ast.And) else any
        return decide(of(item) for item in node.values)
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        pairs = zip(node.ops, operands, operands[1:], strict=False)
        return all(_COMPARISONS[type(how)](of(left), of(right)) for how, left, right in pairs)
    if isinstance(node, ast.IfExp):
        return of(node.body if of(node.test) else node.orelse)
    if isinstance(node, ast.Subscript):
        index = slice(*_ends(node.slice, of)) if isinstance(node.slice, ast.Slice) else of(node.slice)
        return of(node.value)[index]
    raise _Unknown(f"{ast.unparse(node)[:60]!r} is not evaluated here")


def _ends(node: ast.Slice, of: Callable[[ast.expr], Any]) -> list[Any]:
    return [of(end) if end is not None else None for end in (node.lower, node.upper, node.step)]


def _calculated(how: ast.operator, left: Any, right: Any, *, is_ours: bool) -> Any:
    """Arithmetic whose cost is bounded: with answers only of numbers, and never a number without end."""
    are_numbers = all(isinstance(value, int | float | complex) for value in (left, right))
    if isinstance(how, ast.Pow):
        if not is_ours or not isinstance(right, int | float) or abs(right) > _MOST_DIGITS:
            raise _Unknown("a power of this size is not calculated here")
    elif isinstance(how, ast.Mult) and not are_numbers:
        sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
        if not is_ours or sizes[0] * sizes[1] > _MOST_ITEMS:
            raise _Unknown("a sequence of this length is not made here")
    elif isinstance(how, ast.Mod) and not are_numbers:
        raise _Unknown("texts are not formatted here")
    return _ARITHMETIC[type(how)](left, right)
