"""Test the faults listed in `development/faults.md`: disks, signals, clocks and descriptors."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.samples import Sample
from reward_kit.environments.base import StepOutcome, ToolSpec, tool_spec
from reward_kit.errors import StoreError
from reward_kit.runs.plan import NamedPolicy, RunPlan
from reward_kit.runs.run_folder import RunFolder, RunHeader, load_episode, read_episodes, read_scores
from reward_kit.runs.runner import Run
from reward_kit.typed_interface import reward_spec
from tests.agent.resources import COUNTER, Counter, call, task_of, text
from tests.chat_server import Behavior, ChatServer, answer, status
from tests.cli.project import Project, lines
from tests.cli.test_run import slow_project, wait_for_lines

DISK_FULL = """
mount -t tmpfs -o size=2m tmpfs "$1" || exit 77
cd "$2"
"${@:3}" run task.yaml --log-dir "$1" --display none
echo "rc $?"
rm "$1/ballast"
"${@:3}" run --resume --log-dir "$1" --display none
echo "rc $?"
cp -r "$1"/clock-* "$2/kept"
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("unshare"), reason="mounts a file system of its own")
def test_full_disk_ends_the_run_with_one_line_and_resume_completes_it(tmp_path: Path) -> None:
    project = Project(tmp_path, rows=60)
    long = {"type": "text", "content": "done " * 600}
    project.write_task(policy={"type": "scripted", "actions": [long]})
    disk = tmp_path / "disk"
    disk.mkdir()
    script = DISK_FULL.replace('cd "$2"', 'head -c 1500000 /dev/zero > "$1/ballast"\ncd "$2"')
    command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "_", str(disk)]
    done = subprocess.run(
        [*command, str(tmp_path), *project.command()], env=project.environment(), capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine does not let us mount a tmpfs")
    first, second = [line for line in done.stdout.splitlines() if line.startswith("rc ")]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert (first, second) == ("rc 3", "rc 0") and len(errors) == 1, done.stderr
    assert "No space left on device" in errors[0] and str(disk) in errors[0]
    assert "run.json" not in errors[0], "the end of the run, which cannot be noted either, hides nothing"
    kept = tmp_path / "kept"
    episodes = [record["rollout_id"] for record in read_episodes(kept)]
    assert len(episodes) == len(set(episodes)) == 120
    assert sorted(record["rollout_id"] for record in read_scores(kept)) == sorted(episodes)
    assert not list(kept.glob(".*.????????")), "no half-written file"


def test_removal_of_the_run_folder_stops_the_run(tmp_path: Path) -> None:
    project = slow_project(tmp_path, rows=40, milliseconds=100)
    process = subprocess.Popen(
        project.command("run", "task.yaml", "--max-concurrency", "2", "--display", "none"),
        cwd=project.folder,
        env=project.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_lines(project, 2)
    path = project.run_path()
    shutil.rmtree(path)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert f"{path.relative_to(project.folder)}/" in errors.splitlines()[-1] and "deleted" in errors


def test_writing_to_a_removed_file_raises(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RunHeader(task_name="t")) as store:
        (store.path / "scores.jsonl").unlink()
        with pytest.raises(StoreError, match=r"scores\.jsonl was deleted during the run"):
            store.append_score({"rollout_id": "a"})


def test_unwritable_log_dir_is_reported_before_the_run(project: Project) -> None:
    (project.folder / "file").write_text("")
    done = project.call("run", "task.yaml", "--log-dir", "file/runs")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cannot create the run directory file/runs/clock-") and "--log-dir" in line


def test_sigterm_stops_like_ctrl_c(tmp_path: Path) -> None:
    project = slow_project(tmp_path, rows=6, milliseconds=500)
    process = project.start("run", "task.yaml", "--max-concurrency", "4")
    wait_for_lines(project, 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    kept = lines(project.run_path() / "episodes.jsonl")
    assert 8 <= len(kept) < 12 and len(lines(project.run_path() / "scores.jsonl")) == len(kept)


class _Clock:
    """A wall clock that jumps back and forth by a day at each read."""

    def __init__(self) -> None:
        self.reads, self.real = 0, time.time

    def __call__(self) -> float:
        self.reads += 1
        return self.real() + 86_400 * (-1) ** self.reads


async def test_clock_jump_changes_neither_durations_nor_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", _Clock())
    limits = {"wall_time_s": 20, "tool_time_s": 10, "policy_time_s": 10}
    run = await run_in(tmp_path, [call("slow", seconds=0.05), text("x")], limits=limits, run_limits={"wall_time_s": 30})
    assert {row.stop_reason for row in run.rows.values()} == {"answered"}
    for record in read_episodes(tmp_path / "run"):
        assert "at last" in [message["content"] for message in record["messages"]], "no call was cut off"
        timing = record["timing"]
        assert 0 <= timing["policy_s"] <= timing["duration_s"] < 20 and timing["environment_s"] >= 0
    assert all(0 <= record["timing"]["duration_s"] < 20 for record in read_scores(tmp_path / "run"))


async def one(messages: Any) -> Any:
    return {"score": 1.0}


async def run_in(folder: Path, actions: Any, *, rollouts: int = 4, **fields: Any) -> Run:
    definition = task_of(**{"initial_user_prompt": "go", "resource_type": COUNTER, "on_text": "end", **fields})
    policies = [NamedPolicy("p", ScriptedPolicy(actions))]
    plan = RunPlan(definition, policies, [Sample("s")], rollouts, reward=reward_spec(one))
    with RunFolder.create(folder / "run", RunHeader(task_name="t")) as store, anyio.fail_after(60):
        run = Run(plan, store)
        run.load_stored()
        await run.execute()
    return run


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("rollouts", [200, pytest.param(10_000, marks=pytest.mark.campaign)])
async def test_episodes_and_scores_leave_no_open_descriptors(tmp_path: Path, rollouts: int) -> None:
    (tmp_path / "first").mkdir()
    await run_in(tmp_path / "first", [call(), text("x")])
    before = open_descriptors()
    run = await run_in(tmp_path, [call(), text("x")], rollouts=rollouts)
    assert len(run.rows) == rollouts
    assert open_descriptors() <= before


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class EchoPolicy(Counter):
    """A policy that repeats its input."""

    async def get_tools_spec(self) -> list[ToolSpec]:
        return [tool_spec("say", "say it")]

    async def do_say(self, params: Any) -> StepOutcome:
        return StepOutcome(params["text"])


STRANGE = "lone \ud800 surrogate, NUL \x00, \u202eright to left\u202c, 👩‍👩‍👧, \u2028 separator, " + "x" * 1_000_000


async def test_unusual_text_survives_the_files_in_one_line(tmp_path: Path) -> None:
    await run_in(
        tmp_path, [call("say", text=STRANGE), text(STRANGE)], rollouts=1, resource_type=f"{__name__}:EchoPolicy"
    )
    (raw,) = (tmp_path / "run" / "episodes.jsonl").read_bytes().splitlines()
    episode = load_episode(tmp_path / "run", json.loads(raw))
    assert episode.messages[-1].text == STRANGE
    assert episode.messages[-2].text.startswith(STRANGE[:60]) and "characters omitted" in episode.messages[-2].text
    assert episode.get_actions(1) == text(STRANGE)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_dataset_may_have_any_line_endings_and_a_byte_order_mark(project: Project, ending: str) -> None:
    rows = [{"id": f"q{n}", "number": n, "ground_truth": "done"} for n in range(2)]
    data = "\ufeff" + ending.join(json.dumps(row) for row in rows) + ending + ending
    (project.folder / "rows.jsonl").write_bytes(data.encode())
    assert project.call("run", "task.yaml").returncode == 0
    assert {line["sample_id"] for line in lines(project.run_path() / "episodes.jsonl")} == {"q0", "q1"}


def test_cost_limit_without_prices_is_rejected(project: Project) -> None:
    arguments = ["run", "task.yaml", "--model", "openai/m", "--base-url", "http://127.0.0.1:9/v1", "--max-cost", "1"]
    done = project.call(*arguments)
    assert done.returncode == 2 and not project.runs()
    assert "the price of openai/m is unknown" in done.stderr
    assert "policy: {type: openai, price_file: prices.yaml}" in done.stderr and "is_free" not in done.stderr
    (project.folder / "prices.yaml").write_text("m: {input: 1, output: 1}\n")
    known = project.call(*arguments, "-T", "policy={type: openai, price_file: prices.yaml}", "--dry-run")
    assert known.returncode == 0, known.stderr


REFUSED = {
    "a key": (status(401, text="no such key"), "no such key"),
    "an account": (status(429, error={"message": "no money", "code": "insufficient_quota"}), "no money"),
}


@pytest.mark.parametrize(("refusal", "said"), REFUSED.values(), ids=REFUSED)
async def test_rejected_key_stops_the_run_and_resume_completes_it(
    project: Project, refusal: Behavior, said: str
) -> None:
    script = [refusal]
    async with ChatServer(lambda _: script[-1]) as server:
        arguments = ["run", "task.yaml", "--model", "openai/m", "--base-url", server.base_url]
        stopped = await asyncio.to_thread(project.call, *arguments, OPENAI_API_KEY="sk-0123456789")
        assert stopped.returncode == 3 and f"{said}): 0 of 6 episodes are complete" in stopped.stderr, stopped.stderr
        assert "add --base-url URL. To change a judge" in stopped.stderr
        script.append(answer("done"))
        resumed = await asyncio.to_thread(project.call, "run", "--resume", OPENAI_API_KEY="sk-0123456789")
    assert resumed.returncode == 0, resumed.stderr
    assert len(lines(project.run_path() / "episodes.jsonl")) == 6


LEAKS = """
import os
from reward_kit import ToolRegistry

registry = ToolRegistry("leaks")

@registry.tool
def show() -> str:
    "Show everything."
    return "the key is " + os.environ["SHOP_API_KEY"]

@registry.tool
def fail() -> str:
    "Fail loudly."
    raise ValueError("refused " + os.environ["SHOP_API_KEY"])
"""


def test_secret_shown_by_a_tool_or_error_is_in_no_file_of_the_run(project: Project) -> None:
    (project.folder / "tools.py").write_text(LEAKS)
    calls = [{"type": "tool_call", "name": name, "arguments": {}} for name in ("show", "fail")]
    project.write_task(policy={"type": "scripted", "actions": [*calls, {"type": "text", "content": "done"}]})
    secret = "sk-0123456789abcdef"
    done = project.call("run", "task.yaml", "--limit", "1", SHOP_API_KEY=secret)
    assert done.returncode == 3 and "All episodes ended with an error" in done.stderr
    files = {file.name: file.read_bytes() for file in project.run_path().rglob("*") if file.is_file()}
    assert not [name for name, data in files.items() if secret.encode() in data]
    assert files["episodes.jsonl"].count(b"the key is (hidden)") and b"refused (hidden)" in files["run.log"]
