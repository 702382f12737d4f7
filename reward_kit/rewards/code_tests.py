"""Hidden tests of a program: reading them from a ground truth, taking assertions apart, comparing what came back.

A ground truth has one of these forms, or is the JSON text of one:

- `{"function": "solve", "tests": [{"args": […], "kwargs": {…}, "expected": …}, …]}`: calls of a function.
- `{"tests": [{"stdin": "…", "stdout": "…"}, …]}`: runs of a program.
- APPS and TACO: `{"inputs": […], "outputs": […], "fn_name": …}`; without `fn_name` they are runs.
- LiveCodeBench: `[{"input": "…", "output": "…", "testtype": "stdin" | "functional"}, …]`, for functional ones in
  `{"function": …, "tests": […]}`, with an argument on each line.
- MBPP: `{"test_list": ["assert f(1) == 2", …]}`; HumanEval: `{"test": "def check(candidate): …", "entry_point": "f"}`.

A test may carry a `"class"`, by which results are counted too, and all but the bare list a `"setup"`, which runs in the
sandbox before the program and so must hold nothing that is expected.

`assert f(3) == [1, 2, 3]` becomes the question `f(3)` and a condition on its answer. The condition is evaluated here by
a small interpreter of Python's expressions that knows constants, comparisons, arithmetic and a few functions, and that
meets nothing but plain data. Unknown expressions are refused, since the only other way would be to run the assertion
beside the code that it tests, where that code can read it.

Values that came back are JSON of the form that `code_inside.encode` gives, and its author may be hostile.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from reward_kit.errors import RewardError, did_you_mean, kind_of
from reward_kit.rewards.code_inside import decode, encode

Stdout = Literal["lines", "tokens", "exact"]
"""How outputs are compared: without blanks at the ends of lines and of all; word by word; or exactly as they are."""
_SEQUENCES = ("list", "tuple")
_LONGEST_NUMBER = 300


class Rules(NamedTuple):
    """What counts as equal.

    Attributes:
        tolerance: how far numbers may lie apart, absolute or relative to the expected one; 0.0 for not at all.
        unordered: lists are equal in any order, the outermost ones only.
        stdout: how outputs are compared.
    """

    tolerance: float = 0.0
    unordered: bool = False
    stdout: Stdout = "lines"


def is_same(expected: Any, got: Any, rules: Rules) -> bool:
    """Whether an answer is the expected value, read as data.

    Numbers are equal by value, 1 and 1.0 too; true is not a number. A tuple is a list, since JSON has one word for
    both. A key that is an integer equals its text for the same reason. NaN equals NaN.

    Args:
        expected: data of the ground truth.
        got: an answer in the form of `encode`.
        rules: what counts as equal.
    """
    if rules.unordered and isinstance(expected, list | tuple):
        items = _content(got, *_SEQUENCES)
        if items is None or len(items) != len(expected):
            return False
        return Counter(map(_key, items)) == Counter(_key(encode(item)) for item in expected)
    return _is_same(expected, got, rules.tolerance)


def _is_same(expected: Any, got: Any, tolerance: float) -> bool:
    if expected is None or isinstance(expected, bool):
        return got is expected
    if isinstance(expected, int | float):
        number = _number(got)
        return number is not None and is_close(expected, number, tolerance)
    if isinstance(expected, list | tuple):
        items = _content(got, *_SEQUENCES)
        if items is None or len(items) != len(expected):
            return False
        return all(_is_same(one, other, tolerance) for one, other in zip(expected, items, strict=True))
    if isinstance(expected, dict):
        return _is_same_dict(expected, _content(got, "dict"), tolerance)
    return _key(encode(expected)) == _key(got)


def _is_same_dict(expected: dict[Any, Any], pairs: list[Any] | None, tolerance: float) -> bool:
    if pairs is None or len(pairs) != len(expected) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        return False
    wanted = {_name(encode(key)): value for key, value in expected.items()}
    found = {_name(key): value for key, value in pairs}
    return wanted.keys() == found.keys() and all(_is_same(wanted[name], found[name], tolerance) for name in wanted)


def is_close(expected: float, got: float, tolerance: float) -> bool:
    """Whether two numbers are equal, or as close as the tolerance allows; an integer may be beyond any float."""
    if expected == got or (expected != expected and got != got):
        return True
    if not tolerance:
        return False
    try:
        return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def _number(got: Any) -> float | None:
    if isinstance(got, int | float):
        return None if isinstance(got, bool) else got
    content = got[1] if isinstance(got, list) and len(got) == 2 and isinstance(got[1], str) else ""
    try:
        if got and got[0] == "int":
            return int(content, 16)
        return float(content) if got and got[0] == "float" else None
    except (ValueError, TypeError, KeyError):
        return None


def _content(got: Any, *kinds: str) -> list[Any] | None:
    """What an answer of one of these kinds holds."""
    if isinstance(got, list) and len(got) == 2 and got[0] in kinds and isinstance(got[1], list):
        return got[1]
    return None


def _name(key: Any) -> str:
    return json.dumps(str(key)) if isinstance(key, int) and not isinstance(key, bool) else _key(key)


def _key(got: Any) -> str:
    """A text that is the same for the same data: numbers by value, sets and dicts in a fixed order."""
    if isinstance(got, bool) or got is None or isinstance(got, str):
        return json.dumps(got)
    number = _number(got)
    if number is not None:
        is_whole = isinstance(number, float) and number.is_integer()
        return hex(int(number)) if is_whole or isinstance(number, int) else repr(number)
    if (items := _content(got, *_SEQUENCES)) is not None:
        return f"[{','.join(map(_key, items))}]"
    if (items := _content(got, "set")) is not None:
        return f"{{{','.join(sorted(set(map(_key, items))))}}}"
    if (pairs := _content(got, "dict")) is not None and all(isinstance(pair, list) for pair in pairs):
        return "{:" + ",".join(sorted(":".join(map(_key, pair)) for pair in pairs)) + "}"
    return f"?{json.dumps(got, sort_keys=True)}"


def is_same_output(expected: str, got: str, rules: Rules) -> bool:
    """Whether a program printed what was expected. Line ends of Windows are line ends."""
    wanted, printed = (text.replace("\r\n", "\n") for text in (expected, got))
    if rules.stdout == "exact":
        return wanted == printed
    if rules.stdout == "lines":
        parts, others = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (wanted, printed))
    else:
        parts, others = wanted.split(), printed.split()
    if len(parts) != len(others):
        return False
    return all(one == other or _is_close_text(one, other, rules) for one, other in zip(parts, others, strict=True))


def _is_close_text(expected: str, got: str, rules: Rules) -> bool:
    """Whether two lines are the same words, numbers within the tolerance."""
    words, others = expected.split(), got.split()
    if not rules.tolerance or len(words) != len(others):
        return False
    for word, other in zip(words, others, strict=True):
        if word == other:
            continue
        if len(word) > _LONGEST_NUMBER or len(other) > _LONGEST_NUMBER:
            return False
        try:
            numbers = float(word), float(other)
        except ValueError:
            return False
        if not all(map(math.isfinite, numbers)) or not is_close(*numbers, rules.tolerance):
            return False
    return True


def show_value(value: Any, limit: int = 120) -> str:
    """A value for a sentence, cut."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than are written
        text = f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a long value"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown_answer(got: Any) -> str:
    """An answer for a sentence."""
    kind = got[0] if isinstance(got, list) and len(got) == 2 and isinstance(got[0], str) else ""
    if kind == "other":
        return f"an object of type {str(got[1])[:60]}"
    return show_value(_told(got))


def _told(got: Any, depth: int = 0) -> Any:
    """An answer with its kinds taken off, as far as a sentence shows it."""
    items = _content(got, *_SEQUENCES, "set", "dict")
    if items is None:
        number = _number(got)
        return number if number is not None else got
    if depth > 3:
        return "…"
    if got[0] == "dict":
        return {
            str(_told(pair[0], 9)): _told(pair[1], depth + 1)
            for pair in items[:8]
            if isinstance(pair, list) and len(pair) == 2
        }
    found = [_told(item, depth + 1) for item in items[:40]]
    return tuple(found) if got[0] == "tuple" else found


_MOST_DIGITS = 10_000
_MOST_ITEMS = 1_000_000
_MOST_TIMES = 1_000
_KNOWN_FUNCTIONS = (
    *(abs, all, any, bool, complex, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str, sum),
    *(tuple, math.isclose, math.sqrt, math.floor, math.ceil),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _KNOWN_FUNCTIONS}
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
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
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
        test: the expression, with a name instead of each call.
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
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Name)
        if is_text or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            return
        try:
            if isinstance(statement, ast.Assert):
                self._add(statement.test)
            elif isinstance(statement, ast.For) and isinstance(statement.target, ast.Name) and not statement.orelse:
                self._unroll(statement, statement.target.id)
            elif isinstance(statement, ast.Assign) and all(isinstance(name, ast.Name) for name in statement.targets):
                value = _value(statement.value, self.names, is_ours=True)
                self.names.update({name.id: value for name in statement.targets if isinstance(name, ast.Name)})
            elif ast.unparse(statement) != f"check({self._function})":  # with which some datasets end
                raise _Unknown(f"{type(statement).__name__} is not an assertion")
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
        if not isinstance(node.slice, ast.Slice):
            return of(node.value)[of(node.slice)]
        ends = (node.slice.lower, node.slice.upper, node.slice.step)
        return of(node.value)[slice(*(None if end is None else of(end) for end in ends))]
    raise _Unknown(f"{ast.unparse(node)[:60]!r} is not evaluated here")


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


_WRAPPERS = {"set", "sorted", "len", "abs", "list", "tuple", "round", "sum", "str", "isclose", "float", "int", "math"}
_SUITE = {"function", "tests", "setup"}
_OF_CALL, _OF_RUN = {"args", "kwargs", "expected", "class"}, {"stdin", "stdout", "class"}
_IN_OUT = {"input", "output", "testtype", "class"}
_FORMS = (
    'write {"function": "solve", "tests": [{"args": [1, 2], "expected": 3}]}, {"tests": [{"stdin": "1 2\\n", '
    '"stdout": "3\\n"}]}, or assertions as {"test_list": ["assert solve(1, 2) == 3"]}'
)


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call of the function, or several that one assertion compares.

    Attributes:
        calls: what is asked.
        expected: what must come back; for an assertion the condition.
        label: its class, "" for none.
        written: the function and its arguments as they stand in the ground truth; not for an assertion.
    """

    calls: tuple[dict[str, Any], ...]
    expected: Any
    label: str = ""
    written: tuple[str, Sequence[Any], Mapping[str, Any]] = ("", (), MappingProxyType({}))

    def passes(self, answers: Sequence[Any], rules: Rules) -> bool:
        """Whether the answers to its calls are right."""
        if isinstance(self.expected, Condition):
            return self.expected.holds(answers, rules.tolerance)
        return is_same(self.expected, answers[0], rules)

    @property
    def size(self) -> int:
        """About how many characters a right answer has."""
        if isinstance(self.expected, Condition):
            return len(self.expected.text)
        try:
            return len(str(self.expected))
        except ValueError:  # an integer of more digits than are written
            return len(str(encode(self.expected)))

    @property
    def asked(self) -> str:
        """The call, for the start of a sentence."""
        if isinstance(self.expected, Condition):
            return f"in `{self.expected.text[:160]}` it"
        function, arguments, named = self.written
        told = [show_value(value, 60) for value in arguments[:6]]
        told += [f"{name}={show_value(named[name], 60)}" for name in list(named)[:4]]
        return f"{function}({', '.join(told)})"

    @property
    def wanted(self) -> str:
        """What is expected, for the end of a sentence; "" where `asked` says it."""
        return "" if isinstance(self.expected, Condition) else f", and {show_value(self.expected)} was expected"


@dataclass(frozen=True, slots=True)
class RunTest:
    """A run of the program: what it reads, and what it must print."""

    stdin: str
    stdout: str
    label: str = ""

    def passes(self, output: str, rules: Rules) -> bool:
        """Whether it printed what it must."""
        return is_same_output(self.stdout, output, rules)


@dataclass(frozen=True, slots=True)
class Suite:
    """All tests of a ground truth: either calls of `function`, or runs.

    Attributes:
        function: what is called; "" for runs.
        calls, runs: the tests; one of the two is empty.
        setup: what runs before the program.
    """

    function: str
    calls: tuple[CallTest, ...] = ()
    runs: tuple[RunTest, ...] = ()
    setup: str = ""

    @property
    def tests(self) -> tuple[CallTest, ...] | tuple[RunTest, ...]:
        """Whichever there are."""
        return self.calls or self.runs


def suite_of(ground_truth: Any) -> Suite:
    """The tests of a ground truth.

    Raises:
        RewardError: it has none of the forms, or no test; it says where, and what to write.
    """
    data = _parsed(ground_truth)
    if isinstance(data, list):
        data = {"tests": data} if not all(isinstance(item, str) for item in data) else {"test_list": data}
    if not isinstance(data, dict):
        raise RewardError(f"ground_truth is {kind_of(data)}, not tests; {_FORMS}")
    if "test_list" in data:
        return _mbpp(data)
    if "test" in data and "entry_point" in data:
        found = conditions_of(
            _text(data["test"], "test"), _text(data["entry_point"], "entry_point"), "ground_truth.test"
        )
        return _asserted(data, _text(data["entry_point"], "entry_point"), found)
    if "inputs" in data and "outputs" in data:
        return _apps(data)
    if "tests" not in data:
        known = [*_SUITE, "test_list", "test", "entry_point", "inputs", "outputs"]
        hint = did_you_mean(str(next(iter(data), "")), known)
        raise RewardError(f"ground_truth has no tests{hint if hint.endswith('?') else ''}; {_FORMS}")
    return _native(data)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if value.lstrip().startswith("assert"):
            return [value]
        raise RewardError(f"ground_truth is a text, but not JSON ({error}); {_FORMS}") from None


def _native(data: dict[str, Any]) -> Suite:
    _refuse_others(data, _SUITE, "ground_truth")
    tests = _listed(data["tests"], "tests")
    function = _text(data.get("function") or "", "function")
    if function and not all(part.isidentifier() for part in function.split(".")):
        raise RewardError(f"ground_truth.function is {function!r}, which is not the name of a function")
    made = [_one(test, function, f"ground_truth.tests[{number}]") for number, test in enumerate(tests)]
    return _suite(function, made, _text(data.get("setup") or "", "setup"))


def _suite(function: str, made: Sequence[CallTest | RunTest], setup: str) -> Suite:
    calls = tuple(test for test in made if isinstance(test, CallTest))
    runs = tuple(test for test in made if isinstance(test, RunTest))
    if not made or (calls and runs):
        found = "calls and runs together" if made else "no test"
        raise RewardError(f"ground_truth has {found}; {_FORMS}")
    return Suite(function if calls else "", calls, runs, setup)


def _one(test: Any, function: str, where: str) -> CallTest | RunTest:
    if not isinstance(test, Mapping):
        raise RewardError(f"{where} is {kind_of(test)}; {_FORMS}")
    label = _text(test.get("class", ""), f"{where}.class")
    if "stdout" in test:
        _refuse_others(test, _OF_RUN, where)
        return RunTest(_text(test.get("stdin", ""), f"{where}.stdin"), _text(test["stdout"], f"{where}.stdout"), label)
    if "output" in test and "input" in test:
        return _livecodebench(test, function, where, label)
    if "expected" not in test:
        raise RewardError(f"{where} has neither expected nor stdout; {_FORMS}")
    _refuse_others(test, _OF_CALL, where)
    if not function:
        raise RewardError(f'{where} is a call, and ground_truth names no function; add "function": "solve"')
    arguments, named = test.get("args", []), test.get("kwargs", {})
    if not isinstance(arguments, list | tuple) or not isinstance(named, Mapping):
        raise RewardError(f'{where}: args is a list and kwargs an object, such as "args": [[1, 2], 3]')
    return _call(function, arguments, named, test["expected"], label)


def _call(
    function: str, arguments: Sequence[Any], named: Mapping[str, Any], expected: Any, label: str = ""
) -> CallTest:
    return CallTest((call_of(arguments, named),), expected, label, (function, arguments, named))


def _livecodebench(test: Mapping[str, Any], function: str, where: str, label: str) -> CallTest | RunTest:
    _refuse_others(test, _IN_OUT, where)
    given, wanted = _text(test["input"], f"{where}.input"), _text(test["output"], f"{where}.output")
    if test.get("testtype", "functional" if function else "stdin") != "functional":
        return RunTest(given, wanted, label)
    if not function:
        raise RewardError(f'{where} is a call; write {{"function": "solve", "tests": […]}} around the list')
    try:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        return _call(function, arguments, {}, json.loads(wanted), label)
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"{where}: a functional test has JSON on each line of its input and as output: {error}"
        ) from None


def _apps(data: dict[str, Any]) -> Suite:
    inputs, outputs = (_listed(data[name], name) for name in ("inputs", "outputs"))
    if len(inputs) != len(outputs):
        raise RewardError(f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs")
    function = _text(data.get("fn_name") or "", "fn_name")
    setup = _text(data.get("setup") or "", "setup")
    pairs = list(zip(inputs, outputs, strict=True))
    if not function:
        return _suite("", [RunTest(_joined(given), _joined(wanted)) for given, wanted in pairs], setup)
    made = []
    for number, (given, wanted) in enumerate(pairs):
        if not isinstance(given, list):
            raise RewardError(
                f"ground_truth.inputs[{number}] is {kind_of(given)}, and fn_name wants a list of arguments"
            )
        # In this dataset a result stands in a list of its own.
        made.append(_call(function, given, {}, wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted))
    return _suite(function, made, setup)


def _joined(value: Any) -> str:
    """What a program reads or prints; some rows have it as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _mbpp(data: dict[str, Any]) -> Suite:
    tests = [_text(test, "test_list") for test in _listed(data["test_list"], "test_list")]
    function = _text(data.get("function") or _called(tests), "function")
    if not function:
        raise RewardError('the assertions of ground_truth.test_list call no function; name it: "function": "solve"')
    found = [one for number, test in enumerate(tests) for one in conditions_of(test, function, f"test_list[{number}]")]
    return _asserted(data, function, found)


def _asserted(data: Mapping[str, Any], function: str, found: Sequence[Condition]) -> Suite:
    imports = data.get("test_imports") or []
    parts = [*([str(line) for line in imports] if isinstance(imports, list) else []), data.get("test_setup_code") or ""]
    setup = "\n".join([*parts, _text(data.get("setup") or "", "setup")]).strip()
    return _suite(function, [CallTest(one.calls, one) for one in found], setup)


def _called(tests: Sequence[str]) -> str:
    """The function that all assertions call, of which the first one tells the name."""
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _WRAPPERS:
                return node.func.id
    return ""


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, list | tuple):
        raise RewardError(f"ground_truth.{name} is {kind_of(value)}, not a list; {_FORMS}")
    return list(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RewardError(f"{name if '.' in name else f'ground_truth.{name}'} is {kind_of(value)}, not a text")
    return value


def _refuse_others(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in data:
        if name not in known:
            raise RewardError(f"{where}: unknown key {name!r}{did_you_mean(str(name), known)}")
