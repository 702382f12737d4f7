"""Rewards that run the program a model wrote: in the sandbox, against hidden tests whose answers never go there.

Each test is a question to the program; what comes back is plain data that is compared here. So nothing the program
prints, raises, patches, or leaves with can be a passed test, and reading its own process shows it no expected value.
The semantics are those of the public benchmarks: HumanEval (Chen et al. 2021, arXiv:2107.03374), MBPP (Austin et al.
2021, arXiv:2108.07732), APPS (Hendrycks et al. 2021, arXiv:2105.09938), LiveCodeBench (Jain et al. 2024,
arXiv:2403.07974); where theirs let a wrong program pass, ours do not.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.code_tests import CallTest, Rules, RunTest, Stdout, Suite, show_value, shown_answer, suite_of
from reward_kit.rewards.option_types import Closeness, Megabytes, Seconds, check_closeness
from reward_kit.rewards.replies import Choice, block_of, last_answer, require_truth
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.outcome import Outcome
from reward_kit.sandbox.program import SOURCE_LIMIT, Limits, Program
from reward_kit.typed_interface import reward_function

PassRate = Literal["fraction", "all"]
Runs = Literal["fresh", "together"]
_PYTHON = frozenset({"python", "py", "python3", "py3", "ipython", "sage"})
_INSIDE = "reward_kit.rewards.code_inside"
_LEAST_KB = 256
_TIMED_OUT = ("wall", "cpu")


class _Verdict(NamedTuple):
    """What became of one test.

    Attributes:
        problem: "" where it passed, else what the program did.
        asked, wanted: what stands before and after that where the reason may tell what the test is.
    """

    problem: str
    asked: str = ""
    wanted: str = ""

    @property
    def is_right(self) -> bool:
        return not self.problem


def _check_order(options: Mapping[str, Any]) -> None:
    if options["tolerance"] and options["unordered"]:
        raise ConfigError(
            "option 'unordered': tolerance excludes it: what is close to what would depend on the order; leave out one"
        )


_REFUSAL = "what a model wrote is run in a sandbox only"
_SLOTS_PER_CPU = 2
"""Programs that sleep leave the processor to others; with more than two, wall limits would meet honest ones."""


class CodeSandboxes:
    """The sandbox of one worker, for the length of an `async with`. It never runs anything unconfined."""

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
        """Reject, before the first rollout, a machine on which nothing could be scored.

        Raises:
            ConfigError: this machine cannot confine code.
        """
        async with cls() as sandboxes:
            await sandboxes._opened()

    async def ask(self, program: Program, inputs: Sequence[Any], limits: Limits) -> list[Outcome]:
        """As `Sandbox.ask`. What is lost for reasons of the sandbox is asked once more.

        Raises:
            ConfigError: this machine cannot confine code; the rollout is unscored, its class `refused`.
            RewardError: it was lost again; the rollout is unscored.
        """
        sandbox = await self._opened()
        outcomes = await sandbox.ask(program, inputs, limits=limits)
        if _lost(outcomes):
            outcomes = await sandbox.ask(program, inputs, limits=limits)
        for outcome in outcomes:
            if outcome.kind == "setup" and outcome.failure is not None:
                raise ConfigError(outcome.failure.message)
        if lost := _lost(outcomes):
            raise RewardError(f"the sandbox lost the program twice: {lost}")
        return outcomes

    async def _opened(self) -> Sandbox:
        if self._opening is None:
            raise ConfigError("the sandboxes of code rewards are used outside of their `async with`")
        async with self._opening:
            if self._sandbox is None and not self._refusal:
                sandbox = Sandbox(slots=_SLOTS_PER_CPU * len(os.sched_getaffinity(0)))
                try:
                    self._sandbox = await self._stack.enter_async_context(sandbox)
                # Nothing has changed when the next rollout comes, and finding out takes a while: the reason is kept.
                except ConfigError as error:
                    self._refusal = f"{_REFUSAL}: {error}; or serve the reward from a Linux container and name its URL"
                except OSError as error:
                    self._refusal = (
                        f"{_REFUSAL}, and none can be set up ({error}); a reward that brings its own sandbox runs at "
                        "the level in_process, not inside another sandbox"
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
    """The share of hidden tests that the Python program in the reply passes.

    The program is the last fenced block tagged as Python, or, where no block is, the last one without a tag; what the
    model thought does not count. The ground truth holds calls (`{"function": "solve", "tests": [{"args": […],
    "expected": …}]}`), runs (`{"tests": [{"stdin": "…", "stdout": "…"}]}`), or rows of APPS, LiveCodeBench, MBPP and
    HumanEval, as `rewards/code_tests.py` describes them. It runs isolated in the sandbox: where nothing can be confined
    the rollout is unscored with the class `refused`.

    1 is earned where every test passes, 0 where none does or there is no program. Calls are asked one after the other
    in one process, in which the program was run once as an imported module; where it ends, the rest fails. Each run is
    one of a script, in a process of its own; after one that was too slow the rest is not made and fails.

    Args:
        messages: the conversation; the last assistant message counts.
        ground_truth: the hidden tests.
        sandbox: opened once per worker; without one, a sandbox is opened for this call.
        pass_rate: "fraction" for the share of tests passed, "all" for 1 only where all are.
        block: which of several fitting blocks is the program; "joined" for all of them in order.
        unfenced: what a reply without a block is: no program, or a program as a whole.
        tolerance: how far numbers may lie apart, absolute or relative.
        unordered: a returned list may be in any order.
        stdout: "lines" ignores blanks at the ends of lines and of the output; "tokens" compares words; or "exact".
        runs: "together" makes all runs in one process, a fresh module each: ten times as fast, but what a program
            changes in modules it shares, such as a random seed, is there in its next run.
        time_s: seconds of CPU time of all calls together, or of each run.
        wall_s: seconds of wall time likewise; by default three times `time_s` and one more.
        memory_mb: MiB of memory.
        preload: installed modules that programs use and that are slow to import, such as numpy.
        tell_expected: the reason may show what was asked and expected.

    Raises:
        RewardError: the ground truth holds no tests that can be asked; the message says what to write.
        ConfigError: an option is nonsense, or nothing can be confined here.

    Example:
        ```python
        ground_truth = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}]}
        result = await python_code(messages=messages, ground_truth=ground_truth)
        ```
    """
    suite = suite_of(require_truth(ground_truth, "python_code"))
    check_closeness(tolerance)
    _check_order({"tolerance": tolerance, "unordered": unordered})
    rules = Rules(tolerance, unordered, stdout)
    text = _program_text(messages, _PYTHON, block, unfenced)
    if not text:
        return _nothing("the reply has no fenced block of Python" if unfenced == "refuse" else "the reply is empty")
    limits = _limits(suite, time_s, wall_s, memory_mb)
    function = f"function_of({text!r}, {suite.setup!r}, {suite.function!r})"
    made = function if suite.calls else f"script_of({text!r}, {suite.setup!r})"
    source = f"from {_INSIDE} import function_of, script_of\nask = {made}\n"
    if len(source) > SOURCE_LIMIT:
        return _nothing(f"the program has {len(text):,} characters")
    program = Program(source, "ask", "<harness>", form="plain", imports=(_INSIDE, *preload))
    async with AsyncExitStack() as stack:
        ours = sandbox if sandbox is not None else await stack.enter_async_context(CodeSandboxes())
        asking = _Asking(ours, program, limits, rules, stops_early=pass_rate == "all")
        verdicts = await (asking.calls(suite.calls) if suite.calls else asking.runs(suite.runs, runs))
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
    """The share of hidden runs that a program of another language passes: compiled once, a fresh process for each run.

    As `python_code` with runs (`{"tests": [{"stdin": "…", "stdout": "…"}]}` and the rows that hold such). Compiler and
    program run in one confined child that may start processes, for which the kernel must offer namespaces. A program
    that does not compile earns 0; where the compiler is not installed the rollout is unscored.

    Args:
        messages: the conversation; the last assistant message counts.
        ground_truth: the hidden tests.
        sandbox: as in `python_code`.
        language: with which compiler or interpreter, and which tags of blocks fit.
        pass_rate, block, unfenced, tolerance, stdout, tell_expected: as in `python_code`.
        time_s: seconds of CPU time of each run; of wall time three times as much and one more.
        compile_s: seconds of wall time to compile.
        memory_mb: MiB of memory of each process.

    Raises:
        RewardError: the ground truth holds no runs.
        ConfigError: an option is nonsense, the compiler is missing, or processes cannot be confined here.

    Example:
        ```python
        result = await program_code(messages=messages, ground_truth={"tests": [{"stdin": "2\\n", "stdout": "4\\n"}]})
        ```
    """
    suite = suite_of(require_truth(ground_truth, "program_code"))
    if suite.calls or suite.setup:
        raise RewardError("program_code has runs for tests, with stdin and stdout; calls and setup are for python_code")
    check_closeness(tolerance)
    rules, tools = Rules(tolerance, stdout=stdout), language_of(language)
    text = _program_text(messages, ALIASES[language], block, unfenced)
    if not text or len(text) > SOURCE_LIMIT // 8:
        return _nothing("the program is too long" if text else f"the reply has no fenced block of {language}")
    limits = tools.limits(_limits(suite, time_s, None, memory_mb), compile_s, len(suite.runs))
    program = tools.program(text, limits, time_s, compile_s)
    async with AsyncExitStack() as stack:
        ours = sandbox if sandbox is not None else await stack.enter_async_context(CodeSandboxes())
        outcomes = await ours.ask(program, [test.stdin for test in suite.runs], limits)
    verdicts = [_of_process(test, one, rules) for test, one in zip(suite.runs, outcomes, strict=True)]
    return _result(suite, verdicts, pass_rate, tell_expected)


class _Asking:
    """One program's tests, put to it."""

    def __init__(
        self,
        sandbox: CodeSandboxes,
        program: Program,
        limits: Limits,
        rules: Rules,
        *,
        stops_early: bool,
    ) -> None:
        self._sandbox, self._program, self._limits = sandbox, program, limits
        self._rules, self._stops_early = rules, stops_early

    async def _ask(self, inputs: Sequence[Any]) -> list[Outcome]:
        return await self._sandbox.ask(self._program, inputs, self._limits)

    async def calls(self, tests: Sequence[CallTest]) -> list[_Verdict]:
        """All calls in one child, one at a time."""
        outcomes = iter(await self._ask([call for test in tests for call in test.calls]))
        return [self._of_call(test, [next(outcomes) for _ in test.calls]) for test in tests]

    def _of_call(self, test: CallTest, outcomes: Sequence[Outcome]) -> _Verdict:
        for outcome in outcomes:
            if outcome.failure is not None:
                return _Verdict(f"failed: {_told(outcome)}", f"{test.asked} ")
        answers = [outcome.value for outcome in outcomes]
        if test.passes(answers, self._rules):
            return _Verdict("")
        gave = " and ".join(map(shown_answer, answers))
        return _Verdict(f"gave {gave}", f"{test.asked} ", test.wanted)

    async def runs(self, tests: Sequence[RunTest], how: Runs) -> list[_Verdict]:
        """Each run in a child of its own, or all in one."""
        if how == "together":
            outcomes = await self._ask([test.stdin for test in tests])
            return [self._of_run(test, one) for test, one in zip(tests, outcomes, strict=True)]
        verdicts: list[_Verdict] = []
        for test in tests:
            outcome = (await self._ask([test.stdin]))[0]
            verdicts.append(self._of_run(test, outcome))
            if outcome.kind in _TIMED_OUT or (self._stops_early and not verdicts[-1].is_right):
                break
        return verdicts + [verdicts[-1]] * (len(tests) - len(verdicts))

    def _of_run(self, test: RunTest, outcome: Outcome) -> _Verdict:
        # Leaving through os._exit(0) is an ordinary end of a script; what it printed is all that counts.
        has_left = outcome.kind == "no_result" and outcome.exit == 0
        if outcome.failure is not None and not has_left:
            return _Verdict(f"failed: {_told(outcome)}")
        if not has_left and outcome.value != 0:
            return _Verdict(f"left with exit status {outcome.value!r:.20}")
        return _printed(test, outcome.stdout, outcome.is_output_cut, self._rules)


def _of_process(test: RunTest, outcome: Outcome, rules: Rules) -> _Verdict:
    """The verdict on a run that a child made of another program."""
    told = outcome.value if isinstance(outcome.value, dict) else {}
    if outcome.failure is not None:
        return _Verdict(f"failed: {_told(outcome)}")
    if told.get("late") is True:
        return _Verdict("was too slow")
    if problem := told.get("problem"):
        return _Verdict(str(problem)[:300])
    status, output = told.get("status"), told.get("stdout")
    if status != 0 or isinstance(status, bool) or not isinstance(output, str):
        return _Verdict(f"left with exit status {status!r:.20}: {str(told.get('stderr', ''))[-200:].strip()}")
    return _printed(test, output, False, rules)


def _printed(test: RunTest, output: str, is_cut: bool, rules: Rules) -> _Verdict:
    if not is_cut and test.passes(output, rules):
        return _Verdict("")
    return _Verdict(
        f"printed {show_value(output)}{', and more' if is_cut else ''}",
        f"on the input {show_value(test.stdin)} it ",
        f", and {show_value(test.stdout)} was expected",
    )


def _told(outcome: Outcome) -> str:
    """Why a call failed, in a line."""
    message = outcome.failure.message if outcome.failure is not None else ""
    return " ".join(message.split())[:200]


def _program_text(messages: list[Message], tags: frozenset[str], block: Choice, unfenced: str) -> str:
    """The program of a reply; "" where it has none. Halves of surrogate pairs become question marks, as in a file."""
    answer = last_answer(messages)
    found = block_of(answer, tags, block)
    if found is None:
        found = answer if unfenced == "whole" else ""
    return found.encode("utf-8", "replace").decode("utf-8") if found.strip() else ""


def _limits(suite: Suite, time_s: float, wall_s: float | None, memory_mb: int) -> Limits:
    """Limits with room for the longest right answer, in steps, so that children made ready for one task suit others."""
    for name, value, most in (("time_s", time_s, 28_000), ("wall_s", time_s if wall_s is None else wall_s, 86_400)):
        if not 0 < value <= most:
            raise ConfigError(f"option {name!r}: it is more than 0 and at most {most} seconds, not {value}")
    if not 16 <= memory_mb <= 1 << 20:
        raise ConfigError(f"option 'memory_mb': it lies between 16 and {1 << 20}, not {memory_mb}")
    longest = max((len(run.stdout) + len(run.stdin) for run in suite.runs), default=0)
    if suite.calls:
        longest = max(test.size for test in suite.calls)
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


def _nothing(reason: str) -> EvaluateResult:
    return EvaluateResult(score=0.0, reason=reason, metrics={"passed": MetricResult(score=0.0, reason=reason)})


def _result(suite: Suite, verdicts: Sequence[_Verdict], pass_rate: PassRate, tell_expected: bool) -> EvaluateResult:
    """The score, a metric for all tests and one for each class of them, and what the first failing test did."""
    labels = [test.label for test in suite.tests]
    metrics = {}
    for name in dict.fromkeys(["", *labels]):
        found = [one for label, one in zip(labels, verdicts, strict=True) if name in ("", label)]
        right = sum(one.is_right for one in found)
        metrics[f"passed: {name}" if name else "passed"] = MetricResult(
            score=right / len(found), reason=f"{right} of {len(found)} tests passed"
        )
    share, reason = metrics["passed"].score, metrics["passed"].reason
    for number, verdict in enumerate(verdicts, 1):
        if not verdict.is_right:
            asked, wanted = (verdict.asked, verdict.wanted) if tell_expected else ("", "")
            reason = f"{reason}; test {number}: {asked}{verdict.problem}{wanted}"
            break
    score = share if pass_rate == "fraction" else float(share == 1)
    return EvaluateResult(score=score, reason=reason, metrics=metrics)


_WHERE = "/usr/local/bin:/usr/bin:/bin"
_HEADERS = ("/usr/include", "/usr/local/include", "/usr/libexec/gcc", "/etc/alternatives")
_PROCESSES = 40
ALIASES: dict[str, frozenset[str]] = {
    "c": frozenset({"c", "c99", "c11", "c17"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx", "c++11", "c++14", "c++17", "c++20", "cpp17", "cpp20"}),
    "javascript": frozenset({"javascript", "js", "node", "nodejs", "mjs"}),
    "bash": frozenset({"bash", "sh", "shell"}),
}
"""Tags of fenced blocks, by language."""


@dataclass(frozen=True, slots=True)
class Language:
    """How programs of a language are run.

    Attributes:
        tool: the compiler or interpreter, looked for in the folders that the sandbox shows.
        filename: what the program is called.
        compile_command: [] where there is nothing to compile.
        run_command: for each run.
        install: how Debian installs the tool.
    """

    tool: str
    filename: str
    compile_command: tuple[str, ...]
    run_command: tuple[str, ...]
    install: str

    def limits(self, limits: Limits, compile_s: float, runs: int) -> Limits:
        """The limits of compiling and of all runs, from those of one run."""
        if not 0 < compile_s <= 600:
            raise ConfigError(f"option 'compile_s': it is more than 0 and at most 600, not {compile_s}")
        return replace(
            limits,
            wall_s=min(86_400.0, compile_s + limits.wall_s * runs + 1),
            cpu_s=max(limits.cpu_s, compile_s),
            processes=_PROCESSES,
            disk_mb=max(64, 4 * limits.disk_mb),
            result_kb=2 * limits.result_kb,
        )

    def program(self, text: str, limits: Limits, time_s: float, compile_s: float) -> Program:
        """What the sandbox runs: it compiles the text once and runs it for each input."""
        told = {"compile_s": compile_s, "run_s": 3 * time_s + 1, "cpu_s": time_s, "output": limits.output_bytes}
        given = (text, self.filename, [*self.compile_command], [*self.run_command], told)
        source = f"from {_INSIDE} import compiled\nask = compiled(*{given!r})\n"
        paths = tuple(path for path in _HEADERS if os.path.isdir(path))  # noqa: PTH112
        imports = (_INSIDE, "subprocess", "tempfile")
        return Program(source, "ask", "<harness>", form="plain", imports=imports, read_paths=paths)


LANGUAGES = {
    "c": Language(
        "gcc", "main.c", ("gcc", "-O2", "-std=gnu17", "-o", "main", "main.c", "-lm"), ("./main",), "gcc libc6-dev"
    ),
    "cpp": Language("g++", "main.cpp", ("g++", "-O2", "-std=gnu++17", "-o", "main", "main.cpp"), ("./main",), "g++"),
    "javascript": Language("node", "main.js", (), ("node", "main.js"), "nodejs"),
    "bash": Language("bash", "main.sh", (), ("bash", "main.sh"), "bash"),
}


def missing_tool(language: str) -> str:
    """Why programs of a language cannot be run on this machine; "" where they can."""
    found = LANGUAGES[language]
    if shutil.which(found.tool, path=_WHERE):
        return ""
    return f"{found.tool} is not in {_WHERE}, where the sandbox looks; on Debian: apt-get install {found.install}"


def language_of(name: str) -> Language:
    """How programs of a language are run.

    Raises:
        ConfigError: its tool is to be on this machine and is not.
    """
    if problem := missing_tool(name):
        raise ConfigError(f"program_code, language {name!r}: {problem}")
    return LANGUAGES[name]


def _lost(outcomes: Sequence[Outcome]) -> str:
    messages = (one.failure.message for one in outcomes if one.kind == "zygote" and one.failure is not None)
    return next(messages, "")
