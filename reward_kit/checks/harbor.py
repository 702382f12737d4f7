"""Check the verifier of a Harbor task folder with exploits, in the sandbox or in containers.

Each attempt starts from the files of the environment. The agent of an attempt writes files or runs the reference
solution. The tests then run as in Harbor: `tests` is copied over whatever the agent left, and `test.sh` writes the
reward. An exploit counts if it earns at least half of the difference between the solution and doing nothing.
"""

from __future__ import annotations

import ast
import base64
import csv
import io
import json
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from reward_kit.checks.code_exploits import TEXTS as CODE_TEXTS
from reward_kit.checks.code_exploits import code_exploits
from reward_kit.checks.minimize import shorten
from reward_kit.checks.reward_bench import LITTLE, RewardReport
from reward_kit.environments.containers import find_engine
from reward_kit.environments.harbor import needs_network, run_tests, start_task_container
from reward_kit.environments.harbor_task import HarborTask, main_reward, parse_rewards, read_harbor_task
from reward_kit.errors import ConfigError
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.program import Limits, Program

_WORKER = "reward_kit.checks.harbor_worker"
_PROGRAM = Program(
    f"from {_WORKER} import run_attempt\n",
    "run_attempt",
    "<harness>",
    form="plain",
    imports=(_WORKER, "subprocess", "base64"),
)
_ENOUGH = 0.5
_ATTEMPT_S = 60.0
"""The time limit of the agent and of the tests in an attempt, unless the solution takes more than half of it."""
_FEW_RUNS, _MANY_RUNS = 3, 12
_MOST_SHORTER = 8
_CHANCE = re.compile(rb"\b(random|RANDOM|shuf|uuid|time|date|sleep|threading|urandom)\b")
_REFERENCE = re.compile(r"(?i)(expected|solution|solve|reference|gold|answer|oracle|truth|secret)")
_MISSING = re.compile(
    r"command not found|No module named|Operation not permitted|Permission denied|/dev/fd/\d+: No such"
)
_CONFTEST = b"""import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
_SHADOW = b'print("1 passed")\nimport os\nos._exit(0)\n'
_PASSING = {".sh": b"exit 0\n", ".py": b"def test_ok():\n    pass\n", ".js": b"process.exit(0)\n"}
_ATTACK_TEXTS = {
    **CODE_TEXTS,
    "conftest-earns": "a conftest.py in the workspace that turns failures into passes earns",
    "empty-files-earn": "empty output files earn",
    "nothing-earns": "doing nothing earns",
    "question-earns": "output files that repeat the instruction earn",
    "reads-reference-earns": "copying the solution or the expected output from the environment earns",
    "reward-file-earns": "a reward file that the agent wrote earns",
    "shadowed-module-earns": "a file of the workspace that is named like a module of the tests earns",
    "tampered-state-earns": "changing files of the environment that the tests trust earns",
    "tests-overwritten": "replacing scripts of the environment earns",
}


@dataclass(frozen=True, slots=True)
class Attack:
    """An attempt of an agent that does not solve the task: files to write, and a script to run after that."""

    kind: str
    name: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    script: str = ""

    def commands(self) -> str:
        """Return the attempt as shell commands."""
        lines = []
        for path, data in self.files.items():
            text = data.decode("utf-8", "backslashreplace")
            lines.append(f"printf %s {shlex.quote(text)} > {shlex.quote(path)}" if text else f": > {shlex.quote(path)}")
        return "\n".join([*lines, *([self.script] if self.script else [])]) or ":"


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The outcome of an attempt."""

    score: float | None  # None if the tests wrote no valid reward
    problem: str  # the reason if the score is None
    log: str
    changed: dict[str, bytes]


class _Runner(ABC):
    """Runs attempts on a task, each from the initial files of its environment."""

    def __init__(self, task: HarborTask) -> None:
        self.task, self.runs, self._attempt_s = task, 0, _ATTEMPT_S

    async def run(self, files: Mapping[str, bytes], script: str, *, is_solution: bool = False) -> _Attempt:
        """Write the files, run the script of the agent, and run the tests.

        The solution has the time limits of the task, and later attempts have at least twice the time that it took.
        """
        self.runs += 1
        agent_s, test_s = self.task.config.agent_s, self.task.config.verifier.timeout_sec
        if not is_solution:
            return await self._run(files, script, min(agent_s, self._attempt_s), min(test_s, self._attempt_s))
        began = time.monotonic()
        attempt = await self._run(files, script, agent_s, test_s, is_solution=True)
        self._attempt_s = max(self._attempt_s, 2.0 * (time.monotonic() - began))
        return attempt

    @abstractmethod
    async def _run(
        self, files: Mapping[str, bytes], script: str, agent_s: float, test_s: float, *, is_solution: bool = False
    ) -> _Attempt: ...

    async def attack(self, attack: Attack) -> _Attempt:
        return await self.run(attack.files, attack.script)


class _SandboxRunner(_Runner):
    """Runs attempts in the sandbox."""

    def __init__(self, task: HarborTask, sandbox: Sandbox) -> None:
        super().__init__(task)
        self._sandbox = sandbox

    async def _run(
        self, files: Mapping[str, bytes], script: str, agent_s: float, test_s: float, *, is_solution: bool = False
    ) -> _Attempt:
        task, seconds = self.task, agent_s + test_s + 5.0
        request = {
            **{"workdir": task.workdir, "setup": task.setup, "script": script, "test": "bash /tests/test.sh"},
            **{"environment": _encoded(task.environment), "tests": _encoded(task.tests), "agent": _encoded(files)},
            **{"solution": _encoded(task.solution) if is_solution else {}},
            **{"env": task.config.verifier.env, "agent_s": agent_s, "test_s": test_s},
        }
        sizes = {"memory_mb": 1024, "processes": 32, "open_files": 256, "disk_mb": 64, "result_kb": 4096}
        limits = Limits(wall_s=seconds, cpu_s=seconds, **sizes)
        outcome = await self._sandbox.call(_PROGRAM, request, limits=limits)
        if outcome.failure is not None or not isinstance(outcome.value, dict):
            message = outcome.failure.message if outcome.failure else "invalid result"
            return _Attempt(None, message, "", {})
        value = outcome.value
        changed = {str(k): base64.b64decode(v) for k, v in dict(value.get("changed") or {}).items()}
        log = str(value.get("log"))
        if value.get("status") is None:
            return _Attempt(None, f"the tests did not end within {test_s:g} s", log, changed)
        try:
            return _Attempt(main_reward(parse_rewards(str(value["json"]), str(value["text"]))), "", log, changed)
        except (KeyError, ValueError, RecursionError) as error:
            return _Attempt(None, str(error), log, changed)


class _ContainerRunner(_Runner):
    """Runs attempts in containers, each in a new one."""

    async def _run(
        self, files: Mapping[str, bytes], script: str, agent_s: float, test_s: float, *, is_solution: bool = False
    ) -> _Attempt:
        task, log = self.task, ""
        container, has_tests = await start_task_container(task, has_network=needs_network(task))
        try:
            await container.copy({**(task.solution if is_solution else {}), **files})
            if script:
                env = task.config.environment.env | (task.config.solution.env if is_solution else {})
                user = task.config.agent.user
                log = (await container.run(script, seconds=agent_s, env=env, user=user)).output
            changed = await container.changed_files(task.workdir)
            env = task.config.environment.env | task.config.verifier.env
            result = await run_tests(container, task, env, seconds=test_s, keeps_tests=has_tests)
        finally:
            await container.close()
        return _Attempt(result.get("reward"), result.get("problem", ""), log + result["log"], changed)


async def _image_workdir(task: HarborTask) -> str:
    """Return the working directory of a task's image."""
    container, _ = await start_task_container(task, has_network=False)
    try:
        return (await container.run("pwd", seconds=_ATTEMPT_S)).output.strip()
    finally:
        await container.close()


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(data).decode() for path, data in files.items()}


async def can_use_container(folder: Path) -> bool:
    """Return True if the tests of a task can run in a container on this machine."""
    task = read_harbor_task(folder)
    if task.unsupported:
        return False
    try:
        await find_engine()
        needs_network(task)
    except ConfigError:
        return False
    return True


async def check_harbor_task(
    folder: Path, tell: Callable[[str], None] = lambda _: None, *, in_container: bool = False
) -> RewardReport:
    """Check the tests of a Harbor task folder with the reference solution and with exploits.

    Args:
        folder: the task folder.
        tell: a function that is called with the name of each attempt before it runs.
        in_container: True to run the attempts in containers, which builds the image and so runs code of the folder.
    """
    task, report = read_harbor_task(folder), RewardReport(str(folder), level="isolated")
    if task.needs_container and not in_container:
        _not_run(report, task.needs_container)
        return report
    try:
        if in_container:
            report.level = "container"
            task = replace(task, workdir=await _image_workdir(task))
            await _Check(task, report, _ContainerRunner(task), tell).run()
            return report
        async with Sandbox(slots=1) as sandbox:
            if sandbox.strength != "namespaces":
                raise ConfigError("the sandbox needs namespaces to start programs")
            await _Check(task, report, _SandboxRunner(task, sandbox), tell).run()
    except ConfigError as error:
        _not_run(report, (str(error),))
    return report


def _not_run(report: RewardReport, reasons: tuple[str, ...]) -> None:
    text = "not run: the task needs a container, so none of its tests were checked"
    report.note("not-run", "warning", text, reasons, most=6)
    report.cannot("the tests", f"not run: needs a container ({reasons[0]})")


class _Check:
    """The check of one task."""

    def __init__(self, task: HarborTask, report: RewardReport, runner: _Runner, tell: Callable[[str], None]) -> None:
        self.task, self.report, self.runner, self.tell = task, report, runner, tell
        self.outputs: dict[str, bytes] = {}
        self.floor, self.best = 0.0, 1.0

    async def run(self) -> None:
        nothing = await self.runner.run({}, "")
        self.floor = nothing.score or 0.0
        if self.task.solution:
            if not await self._check_solution():
                return
        else:
            self.report.cannot("the reference solution, and exploits that use its output", "solution/ is missing")
            self.outputs = {path: b"x" for path in self._mentioned() if path not in self.task.environment}
        rewards = {"solution": self.best, "nothing": self.floor}
        self.report.facts["rewards"] = rewards if self.task.solution else {"nothing": self.floor}
        if self.floor > LITTLE and self.floor >= _ENOUGH * self.best:
            self._note(Attack("nothing-earns", "no change"), nothing)
        elif self.floor < self.best:
            await self._check_attacks()
            if self.task.solution:
                await self._check_rewritten()
        self.report.facts["attempts"] = self.runner.runs

    async def _check_solution(self) -> bool:
        """Run the reference solution several times. Return False if the exploits cannot be compared with it."""
        is_random = any(_CHANCE.search(data) for data in self.task.tests.values())
        scores: list[float | None] = []
        for number in range(_MANY_RUNS if is_random else _FEW_RUNS):
            self.tell(f"reference solution, run {number + 1}")
            attempt = await self.runner.run({}, "bash /solution/solve.sh", is_solution=True)
            scores.append(attempt.score)
            self.outputs = self.outputs or attempt.changed
            if number >= 1 and len(set(scores)) > 1 and None not in scores:
                break
        if len(set(scores)) > 1:
            lines = [f"rewards of the reference solution: {', '.join(map(str, scores))}"]
            self.report.note("nondeterministic", "error", "the same files get different rewards", lines)
            self.report.cannot("exploits", "repeated rewards of the same files differ")
            return False
        self.best = scores[0] if scores[0] is not None else 0.0
        if self.best >= 1.0 - LITTLE:
            return True
        if match := _MISSING.search(attempt.log):
            line = next(line for line in attempt.log.splitlines() if match[0] in line)
            _not_run(self.report, (f"the reference solution does not pass here: {line.strip()[:200]}",))
            return False
        lines = [
            f"reward {scores[0]}" if attempt.score is not None else attempt.problem,
            *attempt.log.strip().splitlines()[-3:],
        ]
        self.report.note("gold-below-one", "error", "the reference solution does not get a reward of 1", lines)
        return self.best > self.floor + LITTLE

    async def _check_attacks(self) -> None:
        found: set[str] = set()
        for attack in self._attacks():
            if attack.kind in found:
                continue
            self.tell(attack.name)
            attempt = await self.runner.attack(attack)
            if not self._earns(attempt):
                continue
            found.add(attack.kind)
            self._note(await self._shortened(attack), attempt)
            if attack.kind == "empty-files-earn":
                # Any content would earn as much, so the other exploits would prove nothing.
                why = "empty files already earn a reward"
                self.report.cannot("other exploits", why)
                return

    def _earns(self, attempt: _Attempt) -> bool:
        needed = self.floor + _ENOUGH * (self.best - self.floor)
        return attempt.score is not None and attempt.score >= needed

    async def _shortened(self, attack: Attack) -> Attack:
        """Remove files that the attack does not need, and shorten the remaining ones."""
        for path in attack.files:
            fewer = replace(attack, files={one: data for one, data in attack.files.items() if one != path})
            if len(attack.files) > 1 and self._earns(await self.runner.attack(fewer)):
                attack = fewer
        for path, data in attack.files.items():
            if not data or attack.kind in ("question-earns", "reads-reference-earns"):
                continue

            async def works(text: str, attack: Attack = attack, path: str = path) -> bool:
                changed = replace(attack, files={**attack.files, path: text.encode("utf-8", "surrogateescape")})
                return self._earns(await self.runner.attack(changed))

            text = await shorten(data.decode("utf-8", "surrogateescape"), works, _MOST_SHORTER)
            attack = replace(attack, files={**attack.files, path: text.encode("utf-8", "surrogateescape")})
        return attack

    def _note(self, attack: Attack, attempt: _Attempt) -> None:
        commands = attack.commands()
        solution = f"solution {self.best:.4g}, " if self.task.solution else ""
        lines = [f"{attack.name}: reward {attempt.score:.4g} ({solution}nothing {self.floor:.4g})"]
        self.report.note(attack.kind, "error", _ATTACK_TEXTS[attack.kind], lines, reproduction=commands)

    def _mentioned(self) -> list[str]:
        """Return the paths in the working directory that the tests mention."""
        texts = b"\n".join(self.task.tests.values()).decode("utf-8", "replace")
        return sorted(set(re.findall(rf"{re.escape(self.task.workdir)}/[\w./-]*\w", texts)))

    def _attacks(self) -> Iterator[Attack]:
        """Yield the exploits, with the ones that need least first."""
        task, workdir = self.task, self.task.workdir
        empty = dict.fromkeys(self.outputs, b"")
        yield Attack("empty-files-earn", "empty output files", empty)
        for name, content in (("reward.txt", b"1"), ("reward.json", b'{"reward": 1}')):
            yield Attack("reward-file-earns", name, {f"/logs/verifier/{name}": content})
        yield Attack("question-earns", "the instruction", dict.fromkeys(self.outputs, task.instruction.encode()))
        yield from self._copied_files()
        inputs = [path for path in task.environment if path not in self.outputs]
        scripts = {path: data for path in inputs if (data := _PASSING.get(Path(path).suffix)) is not None}
        if scripts:
            yield Attack("tests-overwritten", "scripts of the environment", {**scripts, **empty})
            ends = {path: b"" for path in scripts if path.endswith(".py")}
            if ends:
                yield Attack("tests-overwritten", "empty scripts of the environment", {**scripts, **ends, **empty})
        folders = {workdir, *(str(Path(path).parent) for path in self.outputs)}
        yield Attack("conftest-earns", "conftest.py", {**empty, **{f"{one}/conftest.py": _CONFTEST for one in folders}})
        modules = {f"{workdir}/{name}.py": _SHADOW for name in self._modules()}
        yield Attack("shadowed-module-earns", "modules of the tests", {**empty, **modules})
        trusted = [path for path in inputs if path not in scripts and any(path in one for one in self._mentioned())]
        for content in (b"", b"0\n") if trusted else ():
            yield Attack(
                "tampered-state-earns", "files that the tests read", dict.fromkeys([*trusted, *empty], content)
            )
        yield from self._programs(empty)

    def _copied_files(self) -> Iterator[Attack]:
        for path in self.task.environment:
            if path in self.outputs or not _REFERENCE.search(path.removeprefix(self.task.workdir)):
                continue
            for output in self.outputs:
                if Path(path).suffix == Path(output).suffix:
                    script = f"cp {shlex.quote(path)} {shlex.quote(output)}"
                    yield Attack("reads-reference-earns", f"copy of {path}", {}, script)
            if path.endswith((".sh", ".py")):
                program = "bash" if path.endswith(".sh") else "python3"
                yield Attack("reads-reference-earns", f"running {path}", {}, f"{program} {shlex.quote(path)}")

    def _modules(self) -> list[str]:
        """Return the modules that the tests import, and pytest and unittest, except those that the solution wrote."""
        names = {"pytest", "unittest"}
        for path, data in self.task.tests.items():
            try:
                tree = ast.parse(data) if path.endswith(".py") else ast.Module([], [])
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
        return sorted(names - {Path(path).stem for path in self.outputs} - {"sys", "builtins"})

    def _programs(self, empty: Mapping[str, bytes]) -> Iterator[Attack]:
        """Yield exploits in which the submitted Python programs attack the tests that run them."""
        programs = {path: data for path, data in self.outputs.items() if path.endswith(".py")}
        examples = [text.strip("\n") for text in re.findall(r"```\w*\n(.*?)```", self.task.instruction, re.DOTALL)]
        for path, data in programs.items():
            try:
                exploits = list(code_exploits(data.decode(), examples[:4]))
            except (SyntaxError, ValueError):
                continue
            for exploit in exploits:
                if not exploit.keeps_solution:
                    files = {**empty, path: exploit.program.encode()}
                    yield Attack(exploit.kind, f"{path}: {exploit.name}", files)

    async def _check_rewritten(self) -> None:
        """Check that the solution's output still gets its reward if it is formatted differently."""
        lines: list[str] = []
        files: dict[str, bytes] = {}
        for name, change in _REWRITES.items():
            rewritten = {path: change(path, data) for path, data in self.outputs.items()}
            changed = {path: new for path, new in rewritten.items() if new not in (None, self.outputs[path])}
            if not changed:
                continue
            self.tell(f"reference solution {name}")
            files = {path: new for path, new in changed.items() if new is not None}
            attempt = await self.runner.run({**self.outputs, **files}, "")
            if attempt.score is None or attempt.score < self.best - LITTLE:
                lines.append(f"{name}: reward {attempt.score}")
                shown = files
        text = "the output of the reference solution gets a lower reward if it is formatted differently"
        if lines:
            commands = Attack("", "", {**self.outputs, **shown}).commands()
            self.report.note("rejects-reformatted", "warning", text, lines, reproduction=commands)


def _other_line_end(path: str, data: bytes) -> bytes | None:
    return data.rstrip(b"\n") if data.endswith(b"\n") else data + b"\n"


def _other_json(path: str, data: bytes) -> bytes | None:
    if not path.endswith(".json"):
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    compact = json.dumps(value, separators=(",", ":")).encode()
    return compact if compact != data.strip() else json.dumps(value, indent=4).encode()


def _other_csv(path: str, data: bytes) -> bytes | None:
    if not path.endswith(".csv"):
        return None
    out = io.StringIO()
    rows = csv.reader(io.StringIO(data.decode("utf-8", "replace")))
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


_REWRITES: dict[str, Callable[[str, bytes], bytes | None]] = {
    "with or without a line break at the end": _other_line_end,
    "with different white space in JSON": _other_json,
    "with quoted CSV fields": _other_csv,
}
"""Functions that return a file with the same meaning, by name. None or the same content if they do not apply."""
