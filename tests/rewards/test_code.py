"""Test `python_code` and `program_code` with traps of public benchmarks and known forgeries."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import Message
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.loading import SandboxChoice, load_reward
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_calls import with_options
from reward_kit.rewards.code import LANGUAGES, CodeSandboxes, missing_tool, program_code, python_code
from reward_kit.sandbox import Limits, Program, Sandbox
from reward_kit.sandbox.outcome import Outcome
from reward_kit.typed_interface import reward_spec
from tests.rewards.code_cases import DOUBLE, SUM, Case, calls
from tests.rewards.code_run_cases import CASES
from tests.sandbox.hostile_case import TESTS, read_cases
from tests.sandbox.sandbox_calls import missing

HOSTILE = Path(__file__).parents[1] / "sandbox" / "cases"
confined = pytest.mark.skipif(bool(missing("namespaces")), reason=missing("namespaces"))


async def judged(cases: list[Case]) -> list[Any]:
    """Return the result of each case, scored concurrently in one sandbox."""
    async with CodeSandboxes() as sandbox:
        return await asyncio.gather(
            *(
                python_code(messages=case.messages, ground_truth=case.truth, sandbox=sandbox, **case.options)
                for case in cases
            )
        )


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    if missing("namespaces"):
        pytest.skip(missing("namespaces"))
    return {f"{number}": result for number, result in enumerate(asyncio.run(judged(CASES)))}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].id)
def test_program_gets_the_expected_score(number: int, results: dict[str, Any]) -> None:
    case, result = CASES[number], results[str(number)]
    assert result.score == pytest.approx(case.score), result.reason
    assert case.says in result.reason


def test_test_classes_have_metrics(results: dict[str, Any]) -> None:
    number = [case.id for case in CASES].index("classes of tests are counted")
    metrics = results[str(number)].metrics
    assert {name: metric.score for name, metric in metrics.items()} == {
        "passed": 0.5,
        "passed: small": 1.0,
        "passed: large": 0.0,
    }


@confined
async def test_hostile_submissions_cannot_forge_a_score() -> None:
    cases = [case for case in read_cases(HOSTILE) if case.kind == "code"]
    truth = {"function": "solve", "tests": [{"args": [given], "expected": wanted} for given, wanted in TESTS]}
    assert len(cases) >= 7
    async with CodeSandboxes() as sandbox:
        reward = with_options(python_code, time_s=0.5, wall_s=1.0)
        for case in cases:
            messages = [{"role": "assistant", "content": f"```python\n{case.source}\n```"}]
            result = await reward(messages=messages, ground_truth=truth, sandbox=sandbox)
            # 2.0 is 2 to the reward, and the campaign holds it for another answer.
            most = case.max_score + (0.25 if case.name == "forge_plausible_types" else 0.0)
            assert result.score <= most, (case.name, result.reason)


@confined
async def test_expected_values_do_not_enter_the_sandbox() -> None:
    seen: list[str] = []

    class Recording(CodeSandboxes):
        async def ask(self, program: Program, inputs: Any, limits: Limits) -> list[Outcome]:
            seen.append(program.source + json.dumps(inputs))
            return await super().ask(program, inputs, limits)

    secret = 918273645
    truths = [
        calls((1, secret)),
        {"tests": [{"stdin": "1", "stdout": str(secret)}]},
        {"test_list": [f"assert f(1) == {secret}"]},
        {"test": f"def check(g):\n    wanted = {secret}\n    assert g(1) == wanted", "entry_point": "f"},
        {"inputs": [[1]], "outputs": [[secret]], "fn_name": "f"},
    ]
    async with Recording() as sandbox:
        for truth in truths:
            await python_code(messages=CASES[0].messages, ground_truth=truth, sandbox=sandbox)
    assert len(seen) == len(truths)
    assert not [text for text in seen if str(secret) in text]


@confined
async def test_reason_hides_expected_values_on_request() -> None:
    messages = [{"role": "assistant", "content": "```python\ndef f(x): return 7\n```"}]
    shown = await python_code(messages=messages, ground_truth=calls((111, 222)))
    hidden = await python_code(messages=messages, ground_truth=calls((111, 222)), tell_expected=False)
    assert shown.reason == "0 of 1 tests passed; test 1: f(111) gave 7, but 222 was expected"
    assert hidden.reason == "0 of 1 tests passed; test 1: gave 7"


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        (None, "the sample has none"),
        (3, "must contain tests"),
        ("def f(): pass", "not JSON"),
        ({}, "no tests"),
        ({"tests_": []}, "did you mean 'tests'"),
        ({"function": "f", "tests": []}, "no test"),
        ({"function": "f", "tests": [3]}, "tests[0] is an int"),
        ({"function": "f", "tests": [{"args": [1]}]}, "neither expected nor stdout"),
        ({"function": "f", "tests": [{"args": 1, "expected": 1}]}, "args must be a list"),
        ({"function": "f", "tests": [{"arg": [1], "expected": 1}]}, "did you mean 'args'"),
        ({"function": "f()", "tests": [{"args": [1], "expected": 1}]}, "must be the name of a function"),
        ({"tests": [{"args": [1], "expected": 1}]}, "does not name a function"),
        ({"function": "f", "tests": [{"args": [1], "expected": 1}, {"stdout": ""}]}, "has both calls and runs"),
        ({"tests": [{"stdin": 1, "stdout": "1"}]}, "tests[0].stdin must be a string, got an int"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs but 0 outputs"),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}, "a list of arguments"),
        ({"tests": [{"input": "x", "output": "1", "testtype": "functional"}], "function": "f"}, "each input line and"),
        ({"test_list": ["assert 1 == 1"]}, "do not call a function"),
        ({"test_list": ["assert f(g(1)) == 2"], "function": "f"}, "unknown function g()"),
        ({"test_list": ["assert f(1) == open('x').read()"]}, "cannot be split into a call"),
        (
            {"test": "def check(c):\n    try:\n        c(1)\n    except ValueError:\n        pass", "entry_point": "f"},
            "line 2",
        ),
        ({"test_list": ["assert f(1 == 2"], "function": "f"}, "is not Python"),
    ],
)
async def test_ground_truth_without_tests_leaves_the_rollout_unscored(truth: Any, says: str) -> None:
    with pytest.raises(RewardError) as caught:
        await python_code(messages=CASES[0].messages, ground_truth=truth)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"tolerance": -1.0},
        {"tolerance": 1e-9, "unordered": True},
        {"time_s": 0.0},
        {"memory_mb": 1},
    ],
)
async def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await python_code(messages=CASES[0].messages, ground_truth=DOUBLE, **options)


def test_options_are_checked_when_they_are_fixed() -> None:
    for name, value in {"pass_rate": "some", "block": "best", "stdout": "loose", "preload": 3}.items():
        with pytest.raises(ConfigError, match=name):
            with_options(python_code, **{name: value})


@confined
async def test_no_history_raises() -> None:
    histories: list[list[dict[str, Any]]] = [
        [],
        [{"role": "user", "content": "```python\ndef f(x): return 2 * x\n```"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "assistant", "content": "\ud800" * 9}],
        [{"role": "assistant", "content": "`" * 1_000_000}],
        [{"role": "assistant", "content": "```\n" * 200_000}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
    ]
    async with CodeSandboxes() as sandbox:
        for messages in histories:
            assert (await python_code(messages=messages, ground_truth=DOUBLE, sandbox=sandbox)).score == 0.0


@confined
async def test_a_scorer_opens_one_sandbox_for_all_its_rollouts() -> None:
    spec = reward_spec(with_options(python_code, pass_rate="all"))
    async with InProcessScorer(spec, 60.0) as scorer:
        request = ScoringRequest("r", [Message(**CASES[0].messages[0])], DOUBLE)
        scored = await asyncio.gather(*(scorer.score(request) for _ in range(5)))
        assert [one.score for one in scored] == [1.0] * 5


class _WithoutSandbox(CodeSandboxes):
    """A machine without a sandbox."""

    async def _opened(self) -> Any:
        raise ConfigError("what the model wrote is only run behind walls: there are none")


async def test_code_is_not_run_without_a_sandbox() -> None:
    spec = reward_spec(python_code)
    async with InProcessScorer(replace(spec, resources={"sandbox": _WithoutSandbox})) as scorer:
        scored = await scorer.score(ScoringRequest("r", [Message(**CASES[0].messages[0])], DOUBLE))
    assert scored.score is None
    assert scored.failure is not None
    assert scored.failure.failure_class == "refused"


@confined
def test_nested_sandbox_level_is_rejected() -> None:
    """A sandbox cannot be started in a sandbox."""
    with pytest.raises(
        ConfigError, match=r"calls other services and cannot run at the level isolated; remove sandbox\.level"
    ):
        load_reward("reward_kit.rewards.code:python_code", choice=SandboxChoice(level="isolated"))


async def test_closed_sandbox_raises() -> None:
    with pytest.raises(ConfigError, match="async with"):
        await python_code(messages=CASES[0].messages, ground_truth=DOUBLE, sandbox=CodeSandboxes())


@pytest.mark.skipif(bool(missing("landlock")), reason=missing("landlock"))
async def test_landlock_alone_runs_python_and_starts_no_compilers() -> None:
    class LandlockAlone(CodeSandboxes):
        async def _opened(self) -> Any:
            return await self._stack.enter_async_context(Sandbox(strength="landlock"))

    async with LandlockAlone() as sandbox:
        result = await python_code(messages=CASES[0].messages, ground_truth=DOUBLE, sandbox=sandbox)
        assert result.score == 1.0
        if not missing_tool("bash"):
            messages = [{"role": "assistant", "content": "```bash\necho 3\n```"}]
            with pytest.raises(ConfigError, match="needs namespaces"):
                await program_code(messages=messages, ground_truth=SUM, sandbox=sandbox, language="bash")


PROGRAMS = {
    "c": '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); return 0; }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number);\nconsole.log(a + b);",
    "bash": "read a b\necho $((a + b))",
}
WRONG = {
    "wrong": ("c", '#include <stdio.h>\nint main(void) { puts("3"); return 0; }', 0.5, "printed '3\\n'"),
    "does not compile": ("c", "int main( {", 0.0, "does not compile"),
    "fails": ("c", '#include <stdio.h>\nint main(void) { puts("3"); return 2; }', 0.0, "exited with status 2"),
    "crashes": ("c", "int main(void) { *(volatile int *)0 = 1; }", 0.0, "exited with status -11"),
    "loops": ("c", "int main(void) { for (;;); }", 0.0, "too slow"),
    "kills its parent": ("bash", "kill -9 $PPID; echo 3", 0.5, ""),
    "writes into the harness's channel": ("bash", "echo '{\"value\": 1}' >&3; echo 3", 0.5, ""),
    "leaves a process behind": ("bash", "sleep 100 & echo 3", 0.5, ""),
    "prints without end": ("bash", "yes", 0.0, ""),
}


@confined
@pytest.mark.parametrize("language", LANGUAGES)
async def test_programs_of_other_languages_pass(language: Any) -> None:
    if problem := missing_tool(language):
        pytest.skip(problem)
    messages = [{"role": "assistant", "content": f"```{language}\n{PROGRAMS[language]}\n```"}]
    result = await program_code(messages=messages, ground_truth=SUM, language=language)
    assert (result.score, result.reason) == (1.0, "2 of 2 tests passed")


@confined
@pytest.mark.parametrize("id", WRONG)
async def test_wrong_programs_of_other_languages_fail(id: str) -> None:
    language, program, score, says = WRONG[id]
    if problem := missing_tool(language):
        pytest.skip(problem)
    messages = [{"role": "assistant", "content": f"```{language}\n{program}\n```"}]
    result = await program_code(messages=messages, ground_truth=SUM, language=language, time_s=0.2)
    assert result.score == score, result.reason
    assert says in result.reason


async def test_a_missing_compiler_leaves_the_rollout_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_kit.rewards.code._TOOL_PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt-get install"):
        await program_code(messages=CASES[0].messages, ground_truth=SUM)


async def test_call_tests_require_python_code() -> None:
    with pytest.raises(RewardError, match="use python_code"):
        await program_code(messages=CASES[0].messages, ground_truth=DOUBLE)
