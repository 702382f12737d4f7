"""The hidden tests of a ground truth, in one form whichever of the usual ones they are written in.

- `{"function": "solve", "tests": [{"args": […], "kwargs": {…}, "expected": …}, …]}`: calls of a function.
- `{"tests": [{"stdin": "…", "stdout": "…"}, …]}`: runs of a program.
- APPS and TACO: `{"inputs": […], "outputs": […], "fn_name": …}`; without `fn_name` they are runs.
- LiveCodeBench: `[{"input": "…", "output": "…", "testtype": "stdin" | "functional"}, …]`, for functional ones in
  `{"function": …, "tests": […]}`, with an argument on each line.
- MBPP: `{"test_list": ["assert f(1) == 2", …]}`; HumanEval: `{"test": "def check(candidate): …", "entry_point": "f"}`.

Any of them may be the text of JSON. A test may carry a `"class"`, by which results are counted too, and all but the
bare list a `"setup"`, which runs in the sandbox before the program and so must hold nothing that is expected.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from reward_kit.errors import RewardError, did_you_mean, kind_of
from reward_kit.rewards.programs.asserts import Condition, call_of, conditions_of
from reward_kit.rewards.programs.inside import encode
from reward_kit.rewards.programs.values import Rules, is_same, is_same_output, shown

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
        told = [shown(value, 60) for value in arguments[:6]]
        told += [f"{name}={shown(named[name], 60)}" for name in list(named)[:4]]
        return f"{function}({', '.join(told)})"

    @property
    def wanted(self) -> str:
        """What is expected, for the end of a sentence; "" where `asked` says it."""
        return "" if isinstance(self.expected, Condition) else f", and {shown(self.expected)} was expected"


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
        raise RewardError(f"ground_truth is {kind_of(data)} and no tests; {_FORMS}")
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
        raise RewardError(f"ground_truth is a text and no JSON ({error}); {_FORMS}") from None


def _native(data: dict[str, Any]) -> Suite:
    _refuse_others(data, _SUITE, "ground_truth")
    tests = _listed(data["tests"], "tests")
    function = _text(data.get("function") or "", "function")
    if function and not all(part.isidentifier() for part in function.split(".")):
        raise RewardError(f"ground_truth.function is {function!r}, which is no name of a function")
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
        raise RewardError(f"ground_truth.{name} is {kind_of(value)} and no list; {_FORMS}")
    return list(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RewardError(f"{name if '.' in name else f'ground_truth.{name}'} is {kind_of(value)} and no text")
    return value


def _refuse_others(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in data:
        if name not in known:
            raise RewardError(f"{where}: unknown key {name!r}{did_you_mean(str(name), known)}")
