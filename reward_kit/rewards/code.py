"""Rewards that run model-written programs on hidden tests in the sandbox.

Each test sends an input to the program. The program's answer is plain data that is compared with the expected answer
outside of the sandbox. The program never sees the expected answers, so nothing that it prints, raises or patches can
fake a passed test. The semantics follow HumanEval (Chen et al. 2021, arXiv:2107.03374), MBPP (Austin et al. 2021,
arXiv:2108.07732), APPS (Hendrycks et al. 2021, arXiv:2105.09938) and LiveCodeBench (Jain et al. 2024,
arXiv:2403.07974), but without the loopholes through which incorrect programs can pass those benchmarks.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.code_tests import (
    CallTest,
    Rules,
    RunTest,
    Stdout,
    Suite,
    is_same_output,
    parse_suite,
    show_value,
    shown_answer,
)
from reward_kit.rewards.option_types import Closeness, Megabytes, Seconds, check_closeness
from reward_kit.rewards.replies import Choice, last_answer, require_truth, select_block
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.outcome import Outcome
from reward_kit.sandbox.program import SOURCE_LIMIT, Limits, Program
from reward_kit.typed_interface import reward_function

PassRate = Literal["fraction", "all"]
Runs = Literal["fresh", "together"]
Ask = Callable[[Sequence[Any]], Awaitable[list[Outcome]]]
"""A function that sends inputs to a program and returns the outcomes. All inputs go to the same process."""
_PYTHON = frozenset({"python", "py", "python3", "py3", "ipython", "sage"})
_INSIDE = "reward_kit.rewards.program_runner"
_LEAST_KB = 256
_REFUSAL = "model-written programs run only in a sandbox"
_SLOTS_PER_CPU = 2
"""The number of sandbox slots per CPU.

While a program sleeps, other programs can use the CPU. With more than two slots, correct programs could exceed their
wall-time limits.
"""
_TOOL_PATH = "/usr/local/bin:/usr/bin:/bin"
_HEADERS = ("/usr/include", "/usr/local/include", "/usr/libexec/gcc", "/etc/alternatives")
_PROCESSES = 40


class Language(NamedTuple):
    """A language that `program_code` supports.

    Attributes:
        tool: the compiler or interpreter. It must be in a directory that is visible in the sandbox.
        package: the Debian package that contains the tool.
        filename: the file name of the program.
        compile_command: the command that compiles the program, or "" for an interpreted language.
        run_command: the command that runs the program once.
        tags: the tags of fenced blocks that contain this language.
    """

    tool: str
    package: str
    filename: str
    compile_command: str
    run_command: str
    tags: frozenset[str]


LANGUAGES = {
    "c": Language(
        "gcc",
        "gcc libc6-dev",
        "main.c",
        "gcc -O2 -std=gnu17 -o main main.c -lm",
        "./main",
        frozenset({"c", "c99", "c11", "c17"}),
    ),
    "cpp": Language(
        "g++",
        "g++",
        "main.cpp",
        "g++ -O2 -std=gnu++17 -o main main.cpp",
        "./main",
        frozenset({"cpp", "c++", "cc", "cxx", "c++11", "c++14", "c++17", "c++20", "cpp17", "cpp20"}),
    ),
    "javascript": Language(
        "node", "nodejs", "main.js", "", "node main.js", frozenset({"javascript", "js", "node", "nodejs", "mjs"})
    ),
    "bash": Language("bash", "bash", "main.sh", "", "bash main.sh", frozenset({"bash", "sh", "shell"})),
}


class _Verdict(NamedTuple):
    """The verdict on one test.

    Attributes:
        problem: a description of the fault, or "" if the test passed.
        asked: the text that precedes the problem in a reason that shows the test.
        wanted: the text that follows the problem in a reason that shows the test.
    """

    problem: str
    asked: str = ""
    wanted: str = ""


def _check_order(options: Mapping[str, Any]) -> None:
    if options["tolerance"] and options["unordered"]:
        raise ConfigError(
            "option 'unordered' cannot be combined with tolerance, because the matches would depend on the order; "
            "remove one of them"
        )


class CodeSandboxes:
    """A worker's sandbox, for use in an `async with` statement.

    The sandbox is opened on first use. If no sandbox is available, no code is run.
    """

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._refusal = ""
        self._opening: asyncio.Lock | None = None

    async def __aenter__(self) -> CodeSandboxes:
        self._opening = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sandbox = None
        await self._stack.aclose()

    @classmethod
    async def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check, before the first rollout, that a sandbox is available.

        Raises:
            ConfigError: If no sandbox is available on this machine.
        """
        async with cls() as sandboxes:
            await sandboxes._opened()

    async def ask(self, program: Program, inputs: Sequence[Any], limits: Limits) -> list[Outcome]:
        """Call `Sandbox.ask`, and retry once if the sandbox lost the call.

        Raises:
            ConfigError: If no sandbox is available on this machine. The rollout is then unscored, and its error class
                is `refused`.
            RewardError: If the call was lost twice. The rollout is then unscored.
        """
        sandbox = await self._opened()
        lost = ""
        for _ in range(2):
            outcomes = await sandbox.ask(program, inputs, limits=limits)
            failures = [(one.kind, one.failure.message) for one in outcomes if one.failure is not None]
            lost = next((message for kind, message in failures if kind == "zygote"), "")
            if not lost:
                break
        if refusal := next((message for kind, message in failures if kind == "setup"), ""):
            raise ConfigError(refusal)
        if lost:
            raise RewardError(f"the sandbox lost the program twice: {lost}")
        return outcomes

    async def _opened(self) -> Sandbox:
        if self._opening is None:
            raise ConfigError("CodeSandboxes must be used inside its `async with` statement")
        async with self._opening:
            if self._sandbox is None and not self._refusal:
                sandbox = Sandbox(slots=_SLOTS_PER_CPU * len(os.sched_getaffinity(0)))
                try:
                    self._sandbox = await self._stack.enter_async_context(sandbox)
                # Keep the reason. A further attempt would be slow and would fail in the same way for every rollout.
                except ConfigError as error:
                    self._refusal = (
                        f"{_REFUSAL}: {error}; alternatively, serve the reward from a Linux container and use its URL"
                    )
                except OSError as error:
                    self._refusal = (
                        f"{_REFUSAL}, and no sandbox can be set up ({error}); a reward that creates a sandbox must "
                        "run at the level in_process, not inside another sandbox"
                    )
        if self._sandbox is None:
            raise ConfigError(self._refusal)
        return self._sandbox


@reward_function(resources={"sandbox": CodeSandboxes})
@checks_options(_check_order)
async def python_code(
    messages: list[Message],
    ground_truth: Any = None,
    sandbox: CodeSandboxes | None = None,
    *,
    pass_rate: PassRate = "fraction",
    block: Choice = "last",
    unfenced: Literal["refuse", "whole"] = "refuse",
    tolerance: Closeness = 0.0,
    unordered: bool = False,
    stdout: Stdout = "lines",
    runs: Runs = "fresh",
    time_s: Seconds = 5.0,
    wall_s: Annotated[float, Field(gt=0, le=86_400)] | None = None,
    memory_mb: Megabytes = 512,
    preload: tuple[str, ...] = (),
    tell_expected: bool = True,
) -> EvaluateResult:
    """Score the share of hidden tests that the Python program in the reply passes.

    The program is the last fenced block tagged as Python, or the last untagged block if none is tagged as Python. The
    reasoning is ignored. The ground truth contains calls (`{"function": "solve", "tests": [{"args": […], "expected":
    …}]}`), runs (`{"tests": [{"stdin": "…", "stdout": "…"}]}`), or a row of APPS, LiveCodeBench, MBPP or HumanEval; see
    `rewards/code_tests.py`. The program runs in isolation in the sandbox. On a machine without a sandbox, the rollout
    is unscored, and its error class is `refused`.

    The score is 1 if every test passes, and 0 if no test passes or if the reply contains no program.

    Calls are made in order in a single process, which imports the program once as a module. If the process ends, the
    remaining calls fail. Each run executes the program as a script in a new process. If a run exceeds its time limit,
    the remaining runs are skipped and count as failed.

    Args:
        messages: the conversation. Only the last assistant message is read.
        ground_truth: the hidden tests.
        sandbox: the worker's sandbox. If None, a sandbox is opened for this call.
        pass_rate: "fraction" to score the share of passed tests, or "all" to score 1 only if all tests pass.
        block: the block to use if multiple blocks match: "last", "first", or "joined" for all of them, joined in order.
        unfenced: how to treat a reply that has no block: "refuse" rejects it, and "whole" runs the whole reply.
        tolerance: the maximum difference between two numbers, absolute or relative.
        unordered: True to accept the items of a returned list in any order.
        stdout: "lines" to ignore spaces at the ends of lines and blank lines at the end of the output, "tokens" to
            compare words, or "exact" to compare exactly.
        runs: "fresh" to perform each run in a new process, or "together" to perform all runs in one process but each in
            a new module. The latter is ten times as fast, but changes to shared modules, such as a random seed, persist
            between runs.
        time_s: the CPU time limit in seconds, which applies to all calls together or to each run.
        wall_s: the wall time limit in seconds, which applies to all calls together or to each run. If None, the limit
            is 3 * `time_s` + 1.
        memory_mb: the memory limit, in MiB.
        preload: installed modules, such as numpy, that programs use and that are slow to import.
        tell_expected: True to show the failed test and the expected answer in the reason.

    Raises:
        RewardError: If the ground truth contains no usable tests. The message shows a valid form.
        ConfigError: If an option is invalid, or if no sandbox is available on this machine.

    Example:
        ```python
        ground_truth = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}]}
        result = await python_code(messages=messages, ground_truth=ground_truth)
        ```
    """
    suite = parse_suite(require_truth(ground_truth, "python_code"))
    check_closeness(tolerance)
    _check_order({"tolerance": tolerance, "unordered": unordered})
    rules = Rules(tolerance, unordered, stdout)
    text = _program_text(messages, _PYTHON, block, unfenced)
    if not text:
        return _zero_result("the reply has no fenced block of Python" if unfenced == "refuse" else "the reply is empty")
    limits = _limits(suite, time_s, wall_s, memory_mb)
    made = f"load_function({text!r}, {suite.setup!r}, {suite.function!r})"
    if not suite.calls:
        made = f"load_script({text!r}, {suite.setup!r})"
    source = f"from {_INSIDE} import load_function, load_script\nask = {made}\n"
    if len(source) > SOURCE_LIMIT:
        return _zero_result(f"the program is too long ({len(text):,} characters)")
    program = Program(source, "ask", "<harness>", form="plain", imports=(_INSIDE, *preload))
    async with AsyncExitStack() as stack:
        ours = sandbox if sandbox is not None else await stack.enter_async_context(CodeSandboxes())

        def ask(inputs: Sequence[Any]) -> Awaitable[list[Outcome]]:
            return ours.ask(program, inputs, limits)

        if suite.calls:
            verdicts = await _judge_calls(ask, suite.calls, rules)
        elif runs == "together":
            outcomes = await ask([test.stdin for test in suite.runs])
            verdicts = [_judge_run(test, one, rules) for test, one in zip(suite.runs, outcomes, strict=True)]
        else:
            verdicts = await _judge_runs(ask, suite.runs, rules, stops_early=pass_rate == "all")
    return _result(suite, verdicts, pass_rate, tell_expected)


@reward_function(resources={"sandbox": CodeSandboxes})
async def program_code(
    messages: list[Message],
    ground_truth: Any = None,
    sandbox: CodeSandboxes | None = None,
    *,
    language: Literal["c", "cpp", "javascript", "bash"] = "cpp",
    pass_rate: PassRate = "fraction",
    block: Choice = "last",
    unfenced: Literal["refuse", "whole"] = "refuse",
    tolerance: Closeness = 0.0,
    stdout: Stdout = "lines",
    time_s: Seconds = 5.0,
    compile_s: Annotated[float, Field(gt=0, le=600)] = 30.0,
    memory_mb: Megabytes = 1024,
    tell_expected: bool = True,
) -> EvaluateResult:
    r"""Score the share of hidden runs that a program in a language other than Python passes.

    This reward works like `python_code`, but its ground truth must contain runs: `{"tests": [{"stdin": "…", "stdout":
    "…"}]}` or dataset rows with runs. The program is compiled once and then run in a new process for each test. The
    compiler and the program run in a sandboxed child process that may start other processes. This requires namespaces.
    A program that does not compile scores 0. If the compiler is missing, the rollout is unscored. The other options
    work as in `python_code`.

    Args:
        messages: the conversation. Only the last assistant message is read.
        ground_truth: the hidden tests.
        sandbox: the worker's sandbox; see `python_code`.
        language: the language, which determines the compiler or interpreter and the tags of matching blocks.
        time_s: the CPU time limit for each run, in seconds. The wall time limit is 3 * `time_s` + 1.
        compile_s: the wall time limit for the compilation, in seconds.
        memory_mb: the memory limit for each process, in MiB.

    Raises:
        RewardError: If the ground truth has no runs.
        ConfigError: If an option is invalid, if the compiler is missing, or if the sandbox on this machine cannot start
            processes.

    Example:
        ```python
        result = await program_code(messages=messages, ground_truth={"tests": [{"stdin": "2\n", "stdout": "4\n"}]})
        ```
    """
    suite = parse_suite(require_truth(ground_truth, "program_code"))
    if suite.calls or suite.setup:
        raise RewardError("program_code needs tests with stdin and stdout; for calls and setup, use python_code")
    check_closeness(tolerance)
    if problem := missing_tool(language):
        raise ConfigError(f"program_code, language {language!r}: {problem}")
    rules, tools = Rules(tolerance, stdout=stdout), LANGUAGES[language]
    text = _program_text(messages, tools.tags, block, unfenced)
    if not text or len(text) > SOURCE_LIMIT // 8:
        return _zero_result("the program is too long" if text else f"the reply has no fenced block of {language}")
    if not 0 < compile_s <= 600:
        raise ConfigError(f"option 'compile_s' must be above 0 and at most 600, got {compile_s}")
    run_limits = _limits(suite, time_s, None, memory_mb)
    limits = replace(
        run_limits,
        wall_s=min(86_400.0, compile_s + run_limits.wall_s * len(suite.runs) + 1),
        cpu_s=max(run_limits.cpu_s, compile_s),
        processes=_PROCESSES,
        disk_mb=max(64, 4 * run_limits.disk_mb),
        result_kb=2 * run_limits.result_kb,
    )
    bounds = {"compile_s": compile_s, "run_s": 3 * time_s + 1, "cpu_s": time_s, "output": limits.output_bytes}
    arguments = (text, tools.filename, tools.compile_command.split(), tools.run_command.split(), bounds)
    source = f"from {_INSIDE} import compile_program\nask = compile_program(*{arguments!r})\n"
    paths = tuple(path for path in _HEADERS if os.path.isdir(path))  # noqa: ASYNC240, PTH112 - local
    imports = (_INSIDE, "subprocess", "tempfile")
    program = Program(source, "ask", "<harness>", form="plain", imports=imports, read_paths=paths)
    async with AsyncExitStack() as stack:
        ours = sandbox if sandbox is not None else await stack.enter_async_context(CodeSandboxes())
        outcomes = await ours.ask(program, [test.stdin for test in suite.runs], limits)
    verdicts = [_judge_process(test, one, rules) for test, one in zip(suite.runs, outcomes, strict=True)]
    return _result(suite, verdicts, pass_rate, tell_expected)


def missing_tool(language: str) -> str:
    """Return the reason why programs in this language cannot run on this machine, or "" if they can run."""
    tool = LANGUAGES[language].tool
    if shutil.which(tool, path=_TOOL_PATH):
        return ""
    package = LANGUAGES[language].package
    return f"{tool} is not in {_TOOL_PATH}, where the sandbox looks for it; on Debian, run apt-get install {package}"


async def _judge_calls(ask: Ask, tests: Sequence[CallTest], rules: Rules) -> list[_Verdict]:
    """Make all calls sequentially in one child process."""
    outcomes = iter(await ask([call for test in tests for call in test.calls]))
    verdicts = []
    for test in tests:
        replies = [next(outcomes) for _ in test.calls]
        answers = [outcome.value for outcome in replies]
        if failed := next((outcome for outcome in replies if outcome.failure is not None), None):
            verdicts.append(_Verdict(f"failed: {_message(failed)}", f"{test.asked} "))
        elif test.passes(answers, rules):
            verdicts.append(_Verdict(""))
        else:
            verdicts.append(_Verdict(f"gave {' and '.join(map(shown_answer, answers))}", f"{test.asked} ", test.wanted))
    return verdicts


async def _judge_runs(ask: Ask, tests: Sequence[RunTest], rules: Rules, *, stops_early: bool) -> list[_Verdict]:
    """Perform each run in a new child process."""
    verdicts: list[_Verdict] = []
    for test in tests:
        (outcome,) = await ask([test.stdin])
        verdicts.append(_judge_run(test, outcome, rules))
        if outcome.kind in ("wall", "cpu") or (stops_early and verdicts[-1].problem):
            break
    return verdicts + [verdicts[-1]] * (len(tests) - len(verdicts))


def _judge_run(test: RunTest, outcome: Outcome, rules: Rules) -> _Verdict:
    # Scripts may end with os._exit(0); only their output counts.
    has_left = outcome.kind == "no_result" and outcome.exit == 0
    if outcome.failure is not None and not has_left:
        return _Verdict(f"failed: {_message(outcome)}")
    if not has_left and outcome.value != 0:
        return _Verdict(f"exited with status {outcome.value!r:.20}")
    return _judge_output(test, outcome.stdout, outcome.is_output_cut, rules)


def _judge_process(test: RunTest, outcome: Outcome, rules: Rules) -> _Verdict:
    """Judge a single run of a compiled or interpreted program."""
    if outcome.failure is not None:
        return _Verdict(f"failed: {_message(outcome)}")
    answer = outcome.value if isinstance(outcome.value, dict) else {}
    if answer.get("late") is True:
        return _Verdict("was too slow")
    if problem := answer.get("problem"):
        return _Verdict(str(problem)[:300])
    status, output = answer.get("status"), answer.get("stdout")
    if status != 0 or isinstance(status, bool) or not isinstance(output, str):
        return _Verdict(f"exited with status {status!r:.20}: {str(answer.get('stderr', ''))[-200:].strip()}")
    return _judge_output(test, output, False, rules)


def _judge_output(test: RunTest, output: str, is_cut: bool, rules: Rules) -> _Verdict:
    if not is_cut and is_same_output(test.stdout, output, rules):
        return _Verdict("")
    return _Verdict(
        f"printed {show_value(output)}{', and more' if is_cut else ''}",
        f"on the input {show_value(test.stdin)} it ",
        f", but {show_value(test.stdout)} was expected",
    )


def _message(outcome: Outcome) -> str:
    """Return a one-line description of the reason why a call failed."""
    message = outcome.failure.message if outcome.failure is not None else ""
    return " ".join(message.split())[:200]


def _program_text(messages: list[Message], tags: frozenset[str], block: Choice, unfenced: str) -> str:
    """Return the program in a reply, or "" if there is none.

    Lone surrogates are replaced with question marks, as if the program had been written to a file.
    """
    answer = last_answer(messages)
    text = select_block(answer, tags, block)
    if text is None:
        text = answer if unfenced == "whole" else ""
    return text.encode("utf-8", "replace").decode("utf-8") if text.strip() else ""


def _limits(suite: Suite, time_s: float, wall_s: float | None, memory_mb: int) -> Limits:
    """Return limits that suffice for the longest correct answer.

    The limits are rounded up so that tasks with similar limits can share prepared child processes.
    """
    for name, value, most in (("time_s", time_s, 28_000), ("wall_s", time_s if wall_s is None else wall_s, 86_400)):
        if not 0 < value <= most:
            raise ConfigError(f"option {name!r} must be above 0 and at most {most} seconds, got {value}")
    if not 16 <= memory_mb <= 1 << 20:
        raise ConfigError(f"option 'memory_mb' must be between 16 and {1 << 20}, got {memory_mb}")
    sizes = [test.size for test in suite.calls] or [len(run.stdout) + len(run.stdin) for run in suite.runs]
    longest = max(sizes)
    room_kb = _LEAST_KB
    while room_kb < 4 * longest // 1024:
        room_kb *= 2
    return Limits(
        wall_s=3 * time_s + 1 if wall_s is None else wall_s,
        cpu_s=time_s,
        memory_mb=memory_mb,
        disk_mb=max(16, room_kb // 256),
        output_kb=room_kb,
        result_kb=room_kb,
    )


def _zero_result(reason: str) -> EvaluateResult:
    return EvaluateResult(score=0.0, reason=reason, metrics={"passed": MetricResult(score=0.0, reason=reason)})


def _result(suite: Suite, verdicts: Sequence[_Verdict], pass_rate: PassRate, tell_expected: bool) -> EvaluateResult:
    """Return the score, metrics for all tests and for each class, and a reason that describes the first failed test."""
    labels = [test.label for test in suite.calls or suite.runs]
    metrics = {}
    for name in dict.fromkeys(["", *labels]):
        class_verdicts = [one for label, one in zip(labels, verdicts, strict=True) if name in ("", label)]
        right = sum(not one.problem for one in class_verdicts)
        metrics[f"passed: {name}" if name else "passed"] = MetricResult(
            score=right / len(class_verdicts), reason=f"{right} of {len(class_verdicts)} tests passed"
        )
    share, reason = metrics["passed"].score, metrics["passed"].reason
    for number, verdict in enumerate(verdicts, 1):
        if verdict.problem:
            asked, wanted = (verdict.asked, verdict.wanted) if tell_expected else ("", "")
            reason = f"{reason}; test {number}: {asked}{verdict.problem}{wanted}"
            break
    score = share if pass_rate == "fraction" else float(share == 1)
    return EvaluateResult(score=score, reason=reason, metrics=metrics)
