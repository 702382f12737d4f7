"""Hidden tests for programs: parsing of ground truths, evaluation of assertions, and comparison of answers.

A ground truth has one of the following forms, or is a JSON string that contains one of them:

- `{"function": "solve", "tests": [{"args": […], "kwargs": {…}, "expected": …}, …]}`: calls to a function.
- `{"tests": [{"stdin": "…", "stdout": "…"}, …]}`: runs of a program.
- APPS and TACO: `{"inputs": […], "outputs": […], "fn_name": …}`. Without `fn_name`, the tests are runs.
- LiveCodeBench: `[{"input": "…", "output": "…", "testtype": "stdin" | "functional"}, …]`. Functional tests have one
  argument per line and must be wrapped in `{"function": …, "tests": […]}`.
- MBPP: `{"test_list": ["assert f(1) == 2", …]}`.
- HumanEval: `{"test": "def check(candidate): …", "entry_point": "f"}`.

A test may have a `"class"`, in which case results are also reported per class. All forms except the bare list may have
a `"setup"`, which is code that runs in the sandbox before the program. The setup must not contain expected values.

An assertion such as `assert f(3) == [1, 2, 3]` is split into the call `f(3)` and a condition on the answer. The
condition is evaluated outside of the sandbox by a small interpreter for Python expressions that works only on plain
data. It supports constants, comparisons, arithmetic and a few functions, and it rejects all other expressions. The only
alternative would be to run the assertion next to the tested code, but that code could then read the assertion.

Answers are JSON in the format of `program_runner.encode` and may have been produced by malicious code.
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

from reward_kit.display_text import truncate
from reward_kit.errors import RewardError, did_you_mean, type_name
from reward_kit.rewards.option_types import is_close
from reward_kit.rewards.program_runner import decode, encode

Stdout = Literal["lines", "tokens", "exact"]
"""The method for comparing outputs.

"lines" ignores white space at the ends of lines and of the output, "tokens" compares words, and "exact" compares
exactly.
"""
_SEQUENCES = ("list", "tuple")
_LONGEST_NUMBER = 300


class Rules(NamedTuple):
    """The rules for comparing values.

    Attributes:
        tolerance: the maximum difference between two numbers, absolute or relative to the expected number.
        unordered: True to ignore the order of items in the outermost list. Nested lists remain ordered.
        stdout: how outputs are compared.
    """

    tolerance: float = 0.0
    unordered: bool = False
    stdout: Stdout = "lines"


def is_same(expected: Any, got: Any, rules: Rules) -> bool:
    """Return True if an answer in the format of `encode` equals the expected value.

    Numbers are compared by value, so 1 equals 1.0, but true is not a number. A tuple equals a list with the same items,
    and an integer key equals the string of its digits, because JSON cannot express these differences. NaN equals NaN.
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
        pairs = _content(got, "dict")
        if pairs is None or len(pairs) != len(expected) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
            return False
        wanted = {_name(encode(key)): value for key, value in expected.items()}
        given = {_name(key): value for key, value in pairs}
        return wanted.keys() == given.keys() and all(_is_same(wanted[key], given[key], tolerance) for key in wanted)
    return _key(encode(expected)) == _key(got)


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
    """Return the content of an answer if the answer is of one of these kinds, or None otherwise."""
    if isinstance(got, list) and len(got) == 2 and got[0] in kinds and isinstance(got[1], list):
        return got[1]
    return None


def _name(key: Any) -> str:
    return json.dumps(str(key)) if isinstance(key, int) and not isinstance(key, bool) else _key(key)


def _key(got: Any) -> str:
    """Return a string that is the same for equal data.

    Equal numbers are written identically, and the items in sets and dictionaries are written in a fixed order.
    """
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
    """Return True if a program printed the expected output. Windows line endings are accepted."""
    wanted, printed = (text.replace("\r\n", "\n") for text in (expected, got))
    if rules.stdout == "exact":
        return wanted == printed
    if rules.stdout == "lines":
        parts, others = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (wanted, printed))
    else:
        parts, others = wanted.split(), printed.split()
    if len(parts) != len(others):
        return False
    for part, other in zip(parts, others, strict=True):
        if part != other:
            words = part.split(), other.split()
            if not rules.tolerance or len(words[0]) != len(words[1]):
                return False
            if not all(_is_same_word(*pair, rules.tolerance) for pair in zip(*words, strict=True)):
                return False
    return True


def _is_same_word(word: str, other: str, tolerance: float) -> bool:
    if word == other:
        return True
    if len(word) > _LONGEST_NUMBER or len(other) > _LONGEST_NUMBER:
        return False
    try:
        numbers = float(word), float(other)
    except ValueError:
        return False
    return all(map(math.isfinite, numbers)) and is_close(*numbers, tolerance)


def show_value(value: Any, limit: int = 120) -> str:
    """Format a value for a message, truncated to `limit` characters."""
    try:
        return truncate(repr(value), limit)
    except ValueError:  # an integer with too many digits to print
        return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a long value"


def shown_answer(got: Any) -> str:
    """Format an answer for a message."""
    kind = got[0] if isinstance(got, list) and len(got) == 2 and isinstance(got[0], str) else ""
    if kind == "other":
        return f"an object of type {str(got[1])[:60]}"
    return show_value(_plain(got))


def _plain(got: Any, depth: int = 0) -> Any:
    """Convert the part of an answer that a message shows to plain data."""
    items = _content(got, *_SEQUENCES, "set", "dict")
    if items is None:
        number = _number(got)
        return number if number is not None else got
    if depth > 3:
        return "…"
    if got[0] == "dict":
        pairs = (pair for pair in items[:8] if isinstance(pair, list) and len(pair) == 2)
        return {str(_plain(pair[0], 9)): _plain(pair[1], depth + 1) for pair in pairs}
    plain = [_plain(item, depth + 1) for item in items[:40]]
    return tuple(plain) if got[0] == "tuple" else plain


# Assertions, split into calls and conditions on their answers

_MOST_DIGITS = 10_000
_MOST_ITEMS = 1_000_000
_MOST_TIMES = 1_000
_UNSUITABLE = (TypeError, ValueError, ArithmeticError, LookupError, MemoryError, RecursionError)


class _Unknown(Exception):
    """An unsupported expression. The message contains the reason."""


def _range(*ends: int) -> range:
    made = range(*ends)
    if len(made) > _MOST_ITEMS:
        raise _Unknown("a range of this length is not supported")
    return made


_KNOWN_FUNCTIONS = (
    *(abs, all, any, bool, complex, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str, sum),
    *(tuple, math.isclose, math.sqrt, math.floor, math.ceil),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "range": _range,
    **{function.__name__: function for function in _KNOWN_FUNCTIONS},
}
_CONSTANTS = {"math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
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
_KNOWN = (
    *(ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.Subscript, ast.Slice, ast.Attribute, ast.IfExp),
)


class Condition(NamedTuple):
    """An assertion, split into calls and a condition on their answers.

    Attributes:
        calls: the calls. Each call has the keys "args" and "kwargs", in the format of `encode`.
        test: the asserted expression, in which each call is replaced with a name.
        names: the values of all other names in the expression.
        text: the original expression.
    """

    calls: tuple[dict[str, Any], ...]
    test: ast.expr
    names: Mapping[str, Any]
    text: str

    def holds(self, answers: Sequence[Any], tolerance: float = 0.0) -> bool:
        """Return True if the assertion holds for these answers.

        An assertion does not hold if the answers cannot be compared. The tolerance applies to the numbers on both sides
        of an outermost `==`.
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
    """Parse the assertions in a ground truth field.

    Args:
        source: `assert …` statements, or a function `check(candidate)` that contains only such statements.
        function: the name of the tested function. The parameter of `check` is an alias for it.
        what: the name of the field that contains the source, for error messages.

    Raises:
        RewardError: If a statement is not an assertion or is not supported. The message contains the line and a fix.
    """
    try:
        body: list[ast.stmt] = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{what} is not Python: {error}") from None
    reader = _Reader(what, {function}, {})
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and statement.args.args:
            inner = _Reader(what, {function, statement.args.args[0].arg}, dict(reader.names))
            for line in statement.body:
                inner.read(line)
            reader.conditions += inner.conditions
        else:
            reader.read(statement)
    if not reader.conditions:
        raise RewardError(f"{what} has no assertion that calls {function}")
    return reader.conditions


class _Reader:
    """Reads statements in order and collects the assertions.

    Args:
        what: the name of the field, for error messages.
        functions: the names of the tested function.
        names: the values of known names.
    """

    def __init__(self, what: str, functions: Collection[str], names: dict[str, Any]) -> None:
        self._what, self._functions, self.names = what, functions, names
        self.conditions: list[Condition] = []

    def read(self, statement: ast.stmt) -> None:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Name)
        if is_text or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            return
        try:
            if isinstance(statement, ast.Assert):
                self._add(statement.test)
            elif isinstance(statement, ast.For) and isinstance(statement.target, ast.Name) and not statement.orelse:
                rounds = list(_value(statement.iter, self.names, is_ours=True))
                if len(rounds) > _MOST_TIMES:
                    raise _Unknown(f"it runs more than {_MOST_TIMES:,} times")
                for value in rounds:
                    self.names[statement.target.id] = value
                    for line in statement.body:
                        self.read(line)
            elif isinstance(statement, ast.Assign) and all(isinstance(name, ast.Name) for name in statement.targets):
                value = _value(statement.value, self.names, is_ours=True)
                self.names.update({name.id: value for name in statement.targets if isinstance(name, ast.Name)})
            elif ast.unparse(statement) not in {f"check({name})" for name in self._functions}:  # last in some datasets
                raise _Unknown(f"{type(statement).__name__} is not an assertion")
        except (_Unknown, *_UNSUITABLE) as error:
            raise RewardError(
                f"{self._what}, line {statement.lineno}: {ast.unparse(statement)[:120]!r} cannot be split "
                f"into a call and a condition ({error}); write it as a test with args and expected, because "
                "assertions are not run next to the tested code"
            ) from None

    def _add(self, written: ast.expr) -> None:
        taker = _Calls(self._functions, self.names)
        test = taker.visit(copy.deepcopy(written))
        if not taker.calls:
            if not _value(test, self.names, is_ours=True):
                raise _Unknown("it does not call the function and is false")
            return
        known = {*self.names, *taker.answers, *_FUNCTIONS, "math"}
        for inner in ast.walk(test):  # Reject expressions that are invalid for any answer.
            if isinstance(inner, ast.Name) and inner.id not in known:
                raise _Unknown(f"unknown name {inner.id}")
            if isinstance(inner, ast.Call):
                _function(inner)
            elif isinstance(inner, ast.expr) and not isinstance(inner, _KNOWN):
                raise _Unknown(f"{type(inner).__name__} is not supported")
            elif isinstance(inner, ast.Attribute):
                _constant(inner)
        self.conditions.append(Condition(tuple(taker.calls), test, dict(self.names), ast.unparse(written)))


class _Calls(ast.NodeTransformer):
    """Replaces calls to the tested function with names, and evaluates the parts that do not depend on an answer."""

    def __init__(self, functions: Collection[str], names: Mapping[str, Any]) -> None:
        self._functions, self._names = functions, names
        self.calls: list[dict[str, Any]] = []
        self.answers: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call to the tested function with a name for the answer."""
        if ast.unparse(node.func) not in self._functions:
            return self.generic_visit(node)
        arguments = [_value(argument, self._names, is_ours=True) for argument in node.args]
        named = {_keyword(one): _value(one.value, self._names, is_ours=True) for one in node.keywords}
        name = f"answer {len(self.calls)}"
        self.calls.append(_encoded_call(arguments, named))
        self.answers.add(name)
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Evaluate arithmetic that involves no answer.

        Arithmetic on answers is rejected if its cost cannot be bounded.
        """
        self.generic_visit(node)
        if not any(isinstance(inner, ast.Name) and inner.id in self.answers for inner in ast.walk(node)):
            return ast.copy_location(ast.Constant(_value(node, self._names, is_ours=True)), node)
        constants = [side.value for side in (node.left, node.right) if isinstance(side, ast.Constant)]
        are_numbers = all(isinstance(value, int | float | complex) for value in constants)
        if isinstance(node.op, ast.Pow) or (isinstance(node.op, ast.Mult | ast.Mod) and not are_numbers):
            raise _Unknown("powers, repetition and formatting of an answer are not supported")
        return node


def _encoded_call(arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    return {"args": ["list", [encode(value) for value in arguments]], "kwargs": encode(dict(named))}


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise _Unknown("arguments unpacked from a dict are not supported")
    return keyword.arg


def _function(node: ast.Call) -> Callable[..., Any]:
    name = ast.unparse(node.func).removeprefix("math.")
    if name not in _FUNCTIONS or any(keyword.arg is None for keyword in node.keywords):
        raise _Unknown(f"unknown function {name}()")
    return _FUNCTIONS[name]


def _constant(node: ast.Attribute) -> Any:
    name = ast.unparse(node)
    if name not in _CONSTANTS and name.removeprefix("math.") not in _FUNCTIONS:
        raise _Unknown(f"unknown name {name}")
    return _CONSTANTS.get(name)


def _value(node: ast.expr | ast.slice, names: Mapping[str, Any], *, is_ours: bool) -> Any:
    """Evaluate an expression.

    Args:
        node: the expression.
        names: the values of the names in the expression.
        is_ours: True if the expression involves no answer, in which case repeating strings and computing powers is
            safe.
    """

    def of(inner: ast.expr) -> Any:
        return _value(inner, names, is_ours=is_ours)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.List() | ast.Tuple() | ast.Set():
            kind = list if isinstance(node, ast.List) else tuple if isinstance(node, ast.Tuple) else set
            return kind(of(item) for item in node.elts)
        case ast.Dict():
            return {of(key): of(item) for key, item in zip(node.keys, node.values, strict=True) if key is not None}
        case ast.Attribute():
            return _constant(node)
        case ast.Call():
            return _function(node)(*map(of, node.args), **{_keyword(one): of(one.value) for one in node.keywords})
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.operand))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _calculated(node.op, of(node.left), of(node.right), is_ours=is_ours)
        case ast.BoolOp():
            decide = all if isinstance(node.op, ast.And) else any
            return decide(of(item) for item in node.values)
        case ast.Compare():
            operands = [node.left, *node.comparators]
            pairs = zip(node.ops, operands, operands[1:], strict=False)
            return all(_OPERATORS[type(how)](of(left), of(right)) for how, left, right in pairs)
        case ast.IfExp():
            return of(node.body if of(node.test) else node.orelse)
        case ast.Subscript(slice=ast.Slice() as part):
            return of(node.value)[
                slice(*(None if end is None else of(end) for end in (part.lower, part.upper, part.step)))
            ]
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
    raise _Unknown(f"{ast.unparse(node)[:60]!r} is not supported")


def _calculated(how: ast.operator, left: Any, right: Any, *, is_ours: bool) -> Any:
    """Apply an operator at a bounded cost.

    If an answer is involved, only numbers are accepted. Powers and repetitions that have large results are rejected.
    """
    are_numbers = all(isinstance(value, int | float | complex) for value in (left, right))
    if isinstance(how, ast.Pow):
        if not is_ours or not isinstance(right, int | float) or abs(right) > _MOST_DIGITS:
            raise _Unknown("a power of this size is not supported")
    elif isinstance(how, ast.Mult) and not are_numbers:
        sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
        if not is_ours or sizes[0] * sizes[1] > _MOST_ITEMS:
            raise _Unknown("a sequence of this length is not supported")
    elif isinstance(how, ast.Mod) and not are_numbers:
        raise _Unknown("string formatting is not supported")
    return _OPERATORS[type(how)](left, right)


# Ground truths

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
    """One or more calls to the tested function, and the expected result.

    Only an assertion can contain multiple calls.

    Attributes:
        calls: the calls, in the format of `encode`.
        expected: the expected value, or the condition of an assertion.
        label: the class of the test, or "" if the test has none.
        written: the function and the arguments, as written in the ground truth. Assertions do not use this attribute.
    """

    calls: tuple[dict[str, Any], ...]
    expected: Any
    label: str = ""
    written: tuple[str, Sequence[Any], Mapping[str, Any]] = ("", (), MappingProxyType({}))

    def passes(self, answers: Sequence[Any], rules: Rules) -> bool:
        """Return True if the answers to the calls are correct."""
        if isinstance(self.expected, Condition):
            return self.expected.holds(answers, rules.tolerance)
        return is_same(self.expected, answers[0], rules)

    @property
    def size(self) -> int:
        """The approximate number of characters in a correct answer."""
        if isinstance(self.expected, Condition):
            return len(self.expected.text)
        try:
            return len(str(self.expected))
        except ValueError:  # an integer with too many digits to print
            return len(str(encode(self.expected)))

    @property
    def asked(self) -> str:
        """The call, formatted as the start of a message."""
        if isinstance(self.expected, Condition):
            return f"in `{self.expected.text[:160]}` it"
        function, arguments, named = self.written
        texts = [show_value(value, 60) for value in arguments[:6]]
        texts += [f"{name}={show_value(named[name], 60)}" for name in list(named)[:4]]
        return f"{function}({', '.join(texts)})"

    @property
    def wanted(self) -> str:
        """The expected value, formatted as the end of a message, or "" if `asked` already contains it."""
        return "" if isinstance(self.expected, Condition) else f", but {show_value(self.expected)} was expected"


class RunTest(NamedTuple):
    """A run of the program: its input and the expected output."""

    stdin: str
    stdout: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """All tests in a ground truth, which are either calls to `function` or runs.

    Attributes:
        function: the name of the tested function, or "" for runs.
        calls: the tests that are calls, or () if the tests are runs.
        runs: the tests that are runs, or () if the tests are calls.
        setup: code that runs before the program.
    """

    function: str
    calls: tuple[CallTest, ...]
    runs: tuple[RunTest, ...]
    setup: str


def parse_suite(ground_truth: Any) -> Suite:
    """Parse the tests in a ground truth.

    Raises:
        RewardError: If the form is unknown, or there are no tests. The message contains the position and a valid form.
    """
    data = _parsed(ground_truth)
    if isinstance(data, list):
        data = {"test_list" if all(isinstance(item, str) for item in data) else "tests": data}
    if not isinstance(data, dict):
        raise RewardError(f"ground_truth must contain tests, got {type_name(data)}; {_FORMS}")
    setup, tests = _text(data.get("setup") or "", "setup"), list[CallTest | RunTest]()
    if "test_list" in data or {"test", "entry_point"} <= data.keys():
        if "test_list" in data:
            sources = {f"test_list[{n}]": _text(one, "test_list") for n, one in enumerate(_items(data, "test_list"))}
            function = _text(data.get("function") or _called(sources.values()), "function")
            if not function:
                raise RewardError(
                    "the assertions in ground_truth.test_list do not call a function; name the function: "
                    '"function": "solve"'
                )
        else:
            sources = {"ground_truth.test": _text(data["test"], "test")}
            function = _text(data["entry_point"], "entry_point")
        conditions = [one for what, source in sources.items() for one in conditions_of(source, function, what)]
        tests += [CallTest(one.calls, one) for one in conditions]
        imports = data.get("test_imports") or []
        lines = [str(line) for line in imports] if isinstance(imports, list) else []
        setup = "\n".join([*lines, data.get("test_setup_code") or "", setup]).strip()
    elif {"inputs", "outputs"} <= data.keys():
        inputs, outputs = _items(data, "inputs"), _items(data, "outputs")
        if len(inputs) != len(outputs):
            raise RewardError(
                f"ground_truth has {len(inputs)} inputs but {len(outputs)} outputs; each input needs one output"
            )
        function = _text(data.get("fn_name") or "", "fn_name")
        for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
            if not function:
                tests.append(RunTest(_joined(given), _joined(wanted)))
            elif isinstance(given, list):
                # This dataset wraps each result in a list.
                is_wrapped = isinstance(wanted, list) and len(wanted) == 1
                tests.append(_call_test(function, given, {}, wanted[0] if is_wrapped else wanted))
            else:
                raise RewardError(f"ground_truth.inputs[{number}] must be a list of arguments, got {type_name(given)}")
    elif "tests" in data:
        _refuse_others(data, _SUITE, "ground_truth")
        function = _text(data.get("function") or "", "function")
        if function and not all(part.isidentifier() for part in function.split(".")):
            raise RewardError(f"ground_truth.function must be the name of a function, got {function!r}")
        rows = enumerate(_items(data, "tests"))
        tests += [_parse_test(test, function, f"ground_truth.tests[{number}]") for number, test in rows]
    else:
        known = [*_SUITE, "test_list", "test", "entry_point", "inputs", "outputs"]
        hint = did_you_mean(str(next(iter(data), "")), known)
        raise RewardError(f"ground_truth has no tests{hint if hint.endswith('?') else ''}; {_FORMS}")
    calls = tuple(test for test in tests if isinstance(test, CallTest))
    runs = tuple(test for test in tests if isinstance(test, RunTest))
    if not tests or (calls and runs):
        raise RewardError(f"ground_truth has {'both calls and runs' if tests else 'no tests'}; {_FORMS}")
    return Suite(function if calls else "", calls, runs, setup)


def _parse_test(test: Any, function: str, where: str) -> CallTest | RunTest:
    if not isinstance(test, Mapping):
        raise RewardError(f"{where} is {type_name(test)}; {_FORMS}")
    label = _text(test.get("class", ""), f"{where}.class")
    if "stdout" in test:
        _refuse_others(test, _OF_RUN, where)
        return RunTest(_text(test.get("stdin", ""), f"{where}.stdin"), _text(test["stdout"], f"{where}.stdout"), label)
    if "output" in test and "input" in test:  # LiveCodeBench
        _refuse_others(test, _IN_OUT, where)
        given, wanted = _text(test["input"], f"{where}.input"), _text(test["output"], f"{where}.output")
        if test.get("testtype", "functional" if function else "stdin") != "functional":
            return RunTest(given, wanted, label)
        if not function:
            raise RewardError(
                f'{where} is a call, but the function is not named; write {{"function": "solve", "tests": […]}}'
            )
        try:
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
            return _call_test(function, arguments, {}, json.loads(wanted), label)
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"{where}: each input line and the output of a functional test must be JSON: {error}"
            ) from None
    if "expected" not in test:
        raise RewardError(f"{where} has neither expected nor stdout; {_FORMS}")
    _refuse_others(test, _OF_CALL, where)
    if not function:
        raise RewardError(f'{where} is a call, but ground_truth does not name a function; add "function": "solve"')
    arguments, named = test.get("args", []), test.get("kwargs", {})
    if not isinstance(arguments, list | tuple) or not isinstance(named, Mapping):
        raise RewardError(f'{where}: args must be a list and kwargs an object, such as "args": [[1, 2], 3]')
    return _call_test(function, arguments, named, test["expected"], label)


def _call_test(
    function: str, arguments: Sequence[Any], named: Mapping[str, Any], expected: Any, label: str = ""
) -> CallTest:
    return CallTest((_encoded_call(arguments, named),), expected, label, (function, arguments, named))


def _joined(value: Any) -> str:
    """Return the input or output of a program as one string. Some datasets store it as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _called(tests: Collection[str]) -> str:
    """Return the name of the function that the assertions call, or "" if they call no function."""
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _WRAPPERS:
                return node.func.id
    return ""


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if value.lstrip().startswith("assert"):
            return [value]
        raise RewardError(f"ground_truth is a string, but not JSON ({error}); {_FORMS}") from None


def _items(data: Mapping[str, Any], name: str) -> list[Any]:
    value = _parsed(data[name])
    if not isinstance(value, list | tuple):
        raise RewardError(f"ground_truth.{name} must be a list, got {type_name(value)}; {_FORMS}")
    return list(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RewardError(f"{name if '.' in name else f'ground_truth.{name}'} must be a string, got {type_name(value)}")
    return value


def _refuse_others(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in data:
        if name not in known:
            raise RewardError(f"{where}: unknown key {name!r}{did_you_mean(str(name), known)}")
