"""Test `reward-kit run` under failures: isolation of episodes, readable files and messages."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import click
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.samples import Sample
from reward_kit.cli.main import VERBS, LazyGroup, program
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.plan import NamedPolicy, RunPlan
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_folder import RunFolder, RunHeader, read_episodes, read_scores
from reward_kit.runs.runner import Run
from tests.agent.resources import Counter as World
from tests.agent.resources import call, failure, task_of, worker_of
from tests.cli.project import Project, lines

USER_CODE = """
import asyncio, dataclasses, datetime, os, time
from pathlib import Path
from reward_kit import AgentPolicy, EvaluateResult, ForkableResource, PolicyOutput, StepOutcome, reward_function
from reward_kit.environments.base import tool_spec

async def leak():
    "Await something that another task cancelled."
    foreign = asyncio.get_running_loop().create_future()
    foreign.cancel()
    await foreign

class Asks(AgentPolicy):
    "Calls `wait` with the question's number, then answers; leaks a cancellation in question 3."

    async def get_action(self, observation, available_tools_specs=None):
        number = int(observation[0].text.split()[-1])
        if number == 3:
            await leak()
        if len(observation) > 1:
            return PolicyOutput({"type": "text", "content": "done"})
        return PolicyOutput({"type": "tool_call", "name": "wait", "arguments": {"milliseconds": number}})

@reward_function
async def leaky(messages, sample):
    if sample["number"] == 7:
        await leak()
    return EvaluateResult(score=1.0)

@dataclasses.dataclass
class Place:
    x: int

class World(ForkableResource):
    "Answers with the value that the row's `kind` names."

    per_sample_keys = frozenset({"kind"})

    async def setup(self, config): self.kind = config["kind"]
    async def reset(self, seed=None): pass
    async def get_observation(self): return self.kind
    async def get_tools_spec(self): return [tool_spec("look", "look")]
    async def state_key(self): return self.kind
    async def step(self, name, arguments):
        values = {"place": Place(3), "date": datetime.date(2025, 3, 1)}
        info = {"seen": {1, 2}} if self.kind == "set" else {}
        return StepOutcome(values.get(self.kind, "fine"), info=info)

class Looks(AgentPolicy):
    async def get_action(self, observation, available_tools_specs=None):
        if len(observation) > 2:
            return PolicyOutput({"type": "text", "content": "done"})
        arguments = {"what": object()} if observation[-1].text == "object" else {}
        return PolicyOutput({"type": "tool_call", "name": "look", "arguments": arguments})

class KeepsAKey(AgentPolicy):
    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    async def get_action(self, observation, available_tools_specs=None):
        return PolicyOutput({"type": "text", "content": f"my key has {len(self.api_key)} letters"})

class Raises(AgentPolicy):
    def __init__(self) -> None:
        raise OSError("no weights here")

    async def get_action(self, observation, available_tools_specs=None): ...

class Unfinished(ForkableResource):
    async def setup(self, config): ...

@reward_function
def towards(messages, goal_description):
    return EvaluateResult(score=float(messages[-1].text in goal_description))

def when_allowed(messages):
    while not Path("allowed").exists():
        time.sleep(0.02)
    return {"score": 1.0}
"""

TALKATIVE = """
from reward_kit import AgentPolicy, PolicyOutput
print("printed at import")

class Prints(AgentPolicy):
    def __init__(self):
        print("printed while made")

    async def get_action(self, observation, available_tools_specs=None):
        print("printed by the policy")
        return PolicyOutput({"type": "text", "content": "done"})

    async def close(self):
        print("printed at the end")

def prints(messages):
    print("printed by the reward")
    return {"score": 1.0}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    (tmp_path / "mine.py").write_text(USER_CODE)
    return project


def status(path: Path) -> str:
    return str(json.loads((path / "run.json").read_text())["status"])


def summary(path: Path) -> dict[str, Any]:
    (policy,) = json.loads((path / "summary.json").read_text())["policies"]
    return dict(policy)


def refused(*arguments: str) -> str:
    """Return the error message of the command line in this process, which exits with 2."""
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        program(arguments, prog_name="reward-kit", auto_envvar_prefix="REWARD_KIT", standalone_mode=False)
    assert caught.value.exit_code == 2
    return str(caught.value)


class TestEpisodeIsolation:
    def test_leaked_cancellation_fails_only_the_code_that_leaked_it(self, project: Project) -> None:
        tools = (project.folder / "tools.py").read_text()
        leak = "    if milliseconds == 5:\n        from mine import leak\n        await leak()\n"
        before = '    "Wait a while."\n'
        (project.folder / "tools.py").write_text(tools.replace(before, before + leak))
        project.write_rows([{"id": f"q{n}", "number": n} for n in range(20)])
        project.write_task(policy="mine.py:Asks", reward_function_path="mine.py:leaky", num_rollouts_per_sample=1)
        done = project.call("run", "task.yaml")
        assert done.returncode == 0, done.stderr
        path = project.run_path()
        assert status(path) == "complete"
        episodes = {line["sample_id"]: line for line in lines(path / "episodes.jsonl")}
        assert len(episodes) == 20
        assert [key for key, line in episodes.items() if line["failure"]] == ["q3", "q5"]
        assert "a task that it awaited was cancelled" in episodes["q3"]["failure"]["message"]
        assert episodes["q5"]["failure"]["message"] == "tool 'wait': a task that it awaited was cancelled"
        unscored = [line for line in lines(path / "scores.jsonl") if line["score"] is None]
        assert [line["rollout_id"] for line in unscored] == [episodes["q7"]["rollout_id"]]
        figures = summary(path)
        assert (figures["scored"], figures["errors"], figures["tool_errors"]) == (17, {"crash": 3}, 1)

    def test_value_without_json_form_fails_only_its_own_episode(self, project: Project) -> None:
        kinds = ["set", "place", "date", "object", "plain"]
        project.write_rows([{"id": kind, "number": 0, "resource_config": {"kind": kind}} for kind in kinds])
        project.write_task(
            policy="mine.py:Looks", resource_type="mine.py:World", reward_function_path=None, tools_module_path=None
        )
        done = project.call("run", "task.yaml")
        assert done.returncode == 0, done.stderr
        episodes = lines(project.run_path() / "episodes.jsonl")
        assert Counter(line["sample_id"] for line in episodes) == dict.fromkeys(kinds, 2)
        failures = {line["sample_id"]: line["failure"] for line in episodes}
        assert failures["plain"] is failures["place"] is None
        for kind, named in (("set", "a set"), ("date", "a date"), ("object", "an object")):
            assert f"{named} cannot be converted to JSON" in failures[kind]["message"]
        answers = {
            m["content"] for e in episodes if e["sample_id"] == "place" for m in e["messages"] if m["role"] == "tool"
        }
        assert answers == {'{"x": 3}'}

    async def test_policy_that_never_opens_times_out(self) -> None:
        class NeverOpens(AgentPolicy):
            async def open(self, context):
                await anyio.sleep_forever()

            async def get_action(self, observation, available_tools_specs=None):
                raise AssertionError("there is no session")

        with anyio.fail_after(20):
            episode = await worker_of(NeverOpens(), limits={"policy_time_s": 0.05}).collect_episode()
        assert (failure(episode)["where"], failure(episode)["class"]) == ("DeadlineError", "timeout")
        assert "open of NeverOpens" in failure(episode)["message"]

    async def test_unknown_tool_on_an_unresponsive_resource_times_out(self) -> None:
        with anyio.fail_after(20):
            worker = worker_of(
                [call("nosuch")], resource_type=f"{__name__}:HangsOnSecondListing", limits={"tool_time_s": 0.05}
            )
            episode = await worker.collect_episode()
        assert failure(episode)["class"] == "timeout"
        assert "tool 'nosuch' did not respond within 0.05 s (limits.tool_time_s)" in failure(episode)["message"]
        assert not World.open_instances


class HangsOnSecondListing(World):
    """A resource that lists its tools before the action, and hangs afterwards."""

    asked = 0

    async def get_tools_spec(self):
        self.asked += 1
        if self.asked > 1:
            await anyio.sleep_forever()
        return await super().get_tools_spec()


async def test_as_many_blocking_tools_run_at_once_as_episodes(tmp_path: Path) -> None:
    everybody = threading.Barrier(120)
    tools = ToolRegistry("meeting")

    @tools.tool
    def meet() -> str:
        """Wait until all episodes have arrived; with fewer threads than episodes, this never happens."""
        everybody.wait(timeout=15)
        return "met"

    task = task_of(name="meeting", initial_user_prompt="go", max_episode_steps=1)
    policies = [NamedPolicy("p", ScriptedPolicy([call("meet")]))]
    plan = RunPlan(task, policies, [Sample("s")], 120, max_concurrency=120, tools=tools)
    with RunFolder.create(tmp_path / "run", RunHeader(task_name="t")) as store:
        run = Run(plan, store)
        await run.execute()
    assert sum(row.tool_errors for row in run.rows.values()) == 0
    assert len(run.rows) == 120


def test_full_disk_is_one_line_and_keeps_earlier_results(project: Project) -> None:
    project.write_rows([{"id": f"q{n}", "number": n, "ground_truth": "done"} for n in range(40)])
    limited = f"ulimit -f 16; exec {shlex.join(project.command('run', 'task.yaml', '--display', 'none'))}"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=project.folder, env=project.environment(), capture_output=True, text=True
    )
    assert done.returncode == 3
    line, resume = done.stderr.splitlines()
    assert line.startswith("error: cannot write") and "episodes.jsonl: " in line
    path = project.run_path()
    assert resume == f"Resume with:  reward-kit run --resume runs/{path.name}"
    assert status(path) == "failed"
    kept = {record["rollout_id"] for record in read_episodes(path)}
    assert 0 < len(kept) < 80
    assert {record["rollout_id"] for record in read_scores(path)} <= kept
    assert (path / "episodes.jsonl").read_bytes().endswith(b"\n")
    assert project.call("run", "--resume").returncode == 0
    assert kept < {record["rollout_id"] for record in read_episodes(path)}


def test_broken_attempt_excludes_its_sample_from_pass_hat_k(project: Project) -> None:
    (project.folder / "reward.py").write_text(
        "def right(messages, sample, rollout_id):\n"
        "    if sample['id'] == 'a' and rollout_id.endswith('-0'):\n        raise RecursionError\n"
        "    return {'score': float(sample['id'] == 'b')}\n"
    )
    project.write_rows([{"id": "a", "number": 1}, {"id": "b", "number": 2}])
    project.write_task(num_rollouts_per_sample=4)
    done = project.call("run", "task.yaml")
    figures = summary(project.run_path())
    assert (figures["k"], figures["scored"], figures["errors"]) == (4, 7, {"crash": 1})
    assert (figures["pass_at_1"], figures["pass_at_k"], figures["pass_hat_k"]) == (1.0, 1.0, 1.0)
    assert figures["pass_excluded"] == 1
    shares = dict(line.split() for line in done.stdout.splitlines() if "pass" in line[:7])
    assert shares == {"pass@1": "100.0%", "pass@4": "100.0%", "pass^4": "100.0%"}


@pytest.mark.parametrize(
    "arguments",
    [["-T", "policy.api_key=sk-SECRET"], ["-T", "policy={type: 'mine.py:KeepsAKey', api_key: sk-SECRET}"], []],
    ids=["dotted", "nested", "file"],
)
def test_secret_is_in_no_file_of_the_run(
    project: Project, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_file = {} if arguments else {"api_key": "sk-SECRET"}
    project.write_task(policy={"type": "mine.py:KeepsAKey", **in_file})
    done = project.call("run", "task.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    files = [file for file in project.run_path().rglob("*") if file.is_file()]
    assert {"run.json", "episodes.jsonl", "scores.jsonl", "summary.json"} <= {file.name for file in files}
    assert not [file for file in files if b"sk-SECRET" in file.read_bytes()]
    assert "my key has 9 letters" in (project.run_path() / "episodes.jsonl").read_text()
    assert "sk-SECRET" not in done.stdout + done.stderr
    if arguments:
        # What stands in its place in run.json is never taken for the secret.
        monkeypatch.chdir(project.folder)
        assert refused("run", "--resume").endswith("task.yaml:11: policy 'mine.py:KeepsAKey' needs policy.api_key")
        again = project.call("run", "--resume", "-T", "policy.api_key=sk-SECRET")
        assert again.returncode == 0, again.stderr
        assert "was not stored" in project.call("run", "--resume").stderr


def test_redacted_base_url_must_be_given_again_on_resume(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.call("run", "task.yaml", "--limit", "1")
    file = project.run_path() / "run.json"
    header = RunHeader.read(file.parent).replace(base_url="http://gateway.example/of-a-gateway/v1")
    file.write_bytes(Redaction(["of-a-gateway"]).redact_line(header.to_bytes()))
    assert RunHeader.read(file.parent).base_url == "http://gateway.example/(hidden)/v1"
    monkeypatch.chdir(project.folder)
    assert "contains a secret that was not stored; pass --base-url" in refused("run", "--resume")
    again = project.call("run", "--resume", "--base-url", "http://gateway.example/of-a-gateway/v1")
    assert "--base-url applies only to models" in again.stderr, "it is taken, and this run has no use for it"


class TestRescoring:
    def test_rescoring_passes_the_task_values_to_the_reward(self, project: Project, monkeypatch: Any) -> None:
        project.write_task(reward_function_path="mine.py:towards", goal_description="it is done")
        project.call("run", "task.yaml", "--limit", "1")
        run = project.run_path()
        episodes = run / "episodes.jsonl"
        done = project.call("score", str(episodes), "--reward", "mine.py:towards", "--log-dir", "again")
        assert done.returncode == 0, done.stderr
        (again,) = (project.folder / "again").iterdir()
        assert [line["score"] for line in lines(run / "scores.jsonl")] == [1.0, 1.0]
        assert lines(again / "scores.jsonl") == lines(run / "scores.jsonl")

        episodes.write_text(episodes.read_text() + episodes.read_text().splitlines(keepends=True)[1])
        monkeypatch.chdir(project.folder)
        message = refused("score", str(episodes), "--reward", "mine.py:towards", "--log-dir", "third")
        assert f"{episodes}:3: rollout" in message and f"is already used at {episodes}:2" in message
        assert not (project.folder / "third").exists()


class TestResume:
    def test_finished_run_is_unchanged_and_a_later_score_is_not_resumed(
        self, project: Project, monkeypatch: Any
    ) -> None:
        project.call("run", "task.yaml")
        run = project.run_path()
        names = ("episodes.jsonl", "scores.jsonl", "summary.json")
        before = {name: (run / name).read_bytes() for name in names}
        project.call("score", str(run / "episodes.jsonl"), "--reward", "reward.py:right")
        assert len(project.runs()) == 2
        done = project.call("run", "--resume")
        assert done.returncode == 0, done.stderr
        assert f"Written to runs/{run.name}" in done.stderr
        assert {name: (run / name).read_bytes() for name in names} == before
        assert status(run) == "complete"

        monkeypatch.chdir(project.folder)
        done = project.call("run", "--resume", REWARD_KIT_RUN_SEED="3")
        assert done.returncode == 0 and "--seed from the environment is ignored" in done.stderr
        (project.folder / "reward.py").write_text((project.folder / "reward.py").read_text() + "\n")
        for message in (refused("run", "--resume", str(run)), refused("run", "--resume")):
            assert f"the reward {project.folder / 'reward.py'} changed" in message
        assert {name: (run / name).read_bytes() for name in names} == before

    def test_folder_without_a_run_is_named(self, project: Project, monkeypatch: Any) -> None:
        monkeypatch.chdir(project.folder)
        assert "nosuch is not a run" in refused("run", "--resume", "nosuch")
        assert "no run in runs" in refused("run", "--resume")


def options_of(verb: str) -> list[click.Option]:
    command = LazyGroup().get_command(click.Context(program), verb)
    assert command is not None
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize(("verb", "option"), [(verb, option) for verb in VERBS for option in options_of(verb)])
def test_every_option_is_read_from_its_environment_variable(
    verb: str, option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(option.opts, key=len)
    name = f"REWARD_KIT_{verb}_{longest.removeprefix('--')}".replace("-", "_").upper()
    monkeypatch.setenv(name, "1")
    context = click.Context(program.commands.get(verb, program), auto_envvar_prefix=f"REWARD_KIT_{verb.upper()}")
    assert option.value_from_envvar(context), f"{longest} is not read from {name}"


def test_output_of_user_code_does_not_mix_with_the_json(project: Project) -> None:
    (project.folder / "talk.py").write_text(TALKATIVE)
    project.write_task(policy="talk.py:Prints", reward_function_path="talk.py:prints")
    done = project.call("run", "task.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"][0]["score"]["mean"] == 1.0
    for place in ("at import", "while made", "by the policy", "at the end"):
        assert f"printed {place}" in done.stderr
    (output, *_) = (line["output"] for line in lines(project.run_path() / "scores.jsonl"))
    assert output == {"stdout": "printed by the reward\n", "stderr": "", "is_output_cut": False}
    dry = project.call("run", "task.yaml", "--json", "--dry-run")
    assert json.loads(dry.stdout)["episodes"] == 6
    again = project.call(
        "score", str(project.run_path() / "episodes.jsonl"), "--reward", "talk.py:prints", "--json", "--log-dir", "two"
    )
    assert json.loads(again.stdout)["policies"][0]["scored"] == 6


ROW = {"id": "a", "number": 1, "ground_truth": "é"}
UNREADABLE = {
    "a JSONL dataset in UTF-16": ("rows.jsonl", json.dumps(ROW).encode("utf-16"), "rows.jsonl cannot be read as UTF-8"),
    "a CSV dataset in Latin-1": ("rows.csv", "number\né\n".encode("latin-1"), "rows.csv cannot be read as UTF-8"),
    "a YAML dataset in UTF-16": ("rows.yaml", "- {number: 1}".encode("utf-16"), "cannot read"),
    "a CSV column twice": (
        "rows.csv",
        b"id,number,number\na,1,2\n",
        "rows.csv:1: duplicate column 'number'",
    ),
}


class TestErrorMessages:
    @pytest.mark.parametrize(("name", "data", "expected"), UNREADABLE.values(), ids=UNREADABLE)
    def test_unreadable_dataset_is_reported(
        self, project: Project, monkeypatch: Any, name: str, data: bytes, expected: str
    ) -> None:
        (project.folder / name).write_bytes(data)
        project.write_task(dataset_path=name)
        monkeypatch.chdir(project.folder)
        (message,) = refused("run", "task.yaml").splitlines()
        assert expected in message

    def test_task_file_in_another_encoding_is_reported(self, project: Project, monkeypatch: Any) -> None:
        (project.folder / "task.yaml").write_bytes("name: t".encode("utf-16"))
        monkeypatch.chdir(project.folder)
        (message,) = refused("run", "task.yaml").splitlines()
        assert message.startswith("cannot read task.yaml")

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.yaml"])
    def test_byte_order_mark_is_not_part_of_the_first_field(self, tmp_path: Path, name: str) -> None:
        text = {"rows.jsonl": '{"id": "a"}\n', "rows.csv": "id\na\n", "rows.yaml": "- id: a\n"}[name]
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [row for _, row in read_rows(tmp_path / name)] == [{"id": "a"}]

    def test_failing_policy_constructor_is_reported(self, project: Project, monkeypatch: Any) -> None:
        project.write_task(policy="mine.py:Raises")
        monkeypatch.chdir(project.folder)
        (message,) = refused("run", "task.yaml").splitlines()
        assert message == "policy 'mine.py:Raises': OSError: no weights here"

    def test_abstract_resource_is_reported_with_its_missing_methods(self, project: Project) -> None:
        project.write_task(resource_type="mine.py:Unfinished")
        done = project.call("run", "task.yaml")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "Unfinished' is abstract: it does not define get_tools_spec, reset" in line
        assert not project.runs()

    def test_ctrl_c_during_loading_exits_without_a_run(self, project: Project) -> None:
        (project.folder / "reward.py").write_text(
            "import time\nfrom pathlib import Path\nPath('loading').touch()\ntime.sleep(60)\n"
        )
        with RunProcess(project) as watched:
            watched.wait_until(lambda: (project.folder / "loading").exists())
            watched.process.send_signal(signal.SIGINT)
            assert watched.process.wait(timeout=30) == 130
        assert "Traceback" not in watched.said()
        assert not project.runs()

    def test_second_ctrl_c_prints_the_resume_command(self, project: Project) -> None:
        wait = {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": 60_000}}
        project.write_task(policy={"type": "scripted", "actions": [wait]})
        with RunProcess(project) as watched:
            watched.wait_until(lambda: bool(project.runs()) and (project.run_path() / "scores.jsonl").exists())
            time.sleep(0.2)  # the signals are watched from the same moment on
            watched.process.send_signal(signal.SIGINT)
            watched.wait_until(lambda: "press Ctrl-C again to stop now" in watched.said())
            watched.process.send_signal(signal.SIGINT)
            assert watched.process.wait(timeout=30) == 130
        assert "Traceback" not in watched.said()
        assert f"Resume with:  reward-kit run --resume runs/{project.run_path().name}" in watched.said()
        assert status(project.run_path()) == "interrupted"

    def test_ctrl_c_after_the_last_episode_changes_nothing(self, project: Project) -> None:
        project.write_task(reward_function_path="mine.py:when_allowed")
        with RunProcess(project) as watched:
            watched.wait_until(lambda: bool(project.runs()) and len(list(read_episodes(project.run_path()))) == 6)
            watched.process.send_signal(signal.SIGINT)
            watched.wait_until(lambda: "press Ctrl-C again to stop now" in watched.said())
            (project.folder / "allowed").touch()
            assert watched.process.wait(timeout=30) == 0
        assert status(project.run_path()) == "complete"
        assert summary(project.run_path())["scored"] == 6
        assert "Stopped" not in watched.said()


class RunProcess:
    """`reward-kit run task.yaml` in a separate process, with its standard error."""

    def __init__(self, project: Project) -> None:
        self._said = project.folder / "said.txt"
        with self._said.open("wb") as file:
            self.process = subprocess.Popen(
                project.command("run", "task.yaml", "--display", "plain"),
                cwd=project.folder,
                env=project.environment(PYTHONUNBUFFERED="1", REWARD_KIT_RUN_SANDBOX="in_process"),
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def __enter__(self) -> RunProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self._said.read_text()

    def wait_until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        for _ in range(int(seconds / 0.02)):
            if holds():
                return
            time.sleep(0.02)
        raise AssertionError(f"it never came about; the run said:\n{self.said()}")
