"""Test `reward-kit run`."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from reward_kit.providers.cassette import Cassette
from tests.cli.project import Project, lines


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_run_writes_all_documented_files(project: Project) -> None:
    done = project.call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    path = project.run_path()
    header = json.loads((path / "run.json").read_text())
    assert (header["status"], header["total"], header["seed"]) == ("complete", 6, 0)
    assert {"reward_kit", "python"} <= header["versions"].keys()
    episodes, scores = lines(path / "episodes.jsonl"), lines(path / "scores.jsonl")
    assert len(episodes) == len(scores) == 6
    assert {episode["stop_reason"] for episode in episodes} == {"answered"}
    expected = {"schema_version", "rollout_id", "sample_id", "group_id", "messages", "steps"}
    assert all(expected <= episode.keys() for episode in episodes)
    assert [message["role"] for message in episodes[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [step["assistant_turn"] for step in episodes[0]["steps"]] == [1, 3]
    assert {score["score"] for score in scores} == {0.0, 1.0}
    assert len(scores[0]["scorer"]["hash"]) == 64
    summary = json.loads((path / "summary.json").read_text())["policies"][0]
    assert summary["score"]["mean"] == pytest.approx(1 / 3)
    assert (summary["episodes"], summary["scored"], summary["failures"], summary["errors"]) == (6, 6, 4, {})


def test_table_names_the_results_and_the_next_command(project: Project) -> None:
    done = project.call("run", "task.yaml")
    for word in ("mean score", "pass@1", "pass^2", "failures", "errors", "limits", "answered 6", "steps per episode"):
        assert word in done.stdout
    assert "reward-kit score runs/" in done.stderr


def test_json_is_the_only_standard_output(project: Project) -> None:
    done = project.call("run", "task.yaml", "--json")
    document = json.loads(done.stdout)
    assert document["policies"][0]["episodes"] == 6
    assert Path(project.folder, document["run"]).is_dir()


def test_runs_of_one_seed_are_equal_for_any_concurrency(project: Project) -> None:
    for concurrency in ("1", "16", "16"):
        assert project.call("run", "task.yaml", "--max-concurrency", concurrency).returncode == 0
    first, *others = project.runs()
    for other in others:
        for name in ("episodes.jsonl", "scores.jsonl"):
            assert json.dumps(lines(first / name)) == json.dumps(lines(other / name))
        assert (first / "summary.json").read_bytes() == (other / "summary.json").read_bytes()


def test_another_seed_gives_other_ids(project: Project) -> None:
    project.call("run", "task.yaml")
    project.call("run", "task.yaml", "--seed", "1")
    ids = [{line["rollout_id"] for line in lines(path / "episodes.jsonl")} for path in project.runs()]
    assert not ids[0] & ids[1]


def test_limit_sample_id_rollouts_and_overrides_select_episodes(project: Project) -> None:
    assert (
        json.loads(project.call("run", "task.yaml", "--limit", "1", "-n", "5", "--json").stdout)["policies"][0]["k"]
        == 5
    )
    chosen = project.call("run", "task.yaml", "--sample-id", "q1", "-T", "pass_threshold=0.5", "--json")
    assert json.loads(chosen.stdout)["policies"][0]["pass_at_1"] == 1.0


def test_several_policies_share_one_table(project: Project) -> None:
    done = project.call("run", "task.yaml", "--policy", "scripted", "--policy", "random", "--json")
    assert [policy["policy"] for policy in json.loads(done.stdout)["policies"]] == ["random", "scripted"]


BAD_INPUT = {
    "an unknown key, with the nearest": ({"max_episode_step": 3}, [], ["task.yaml:", "max_episode_steps"]),
    "an unknown inner key": ({"limits": {"wall_time": 3}}, [], ["limits.wall_time", "wall_time_s"]),
    "a wrong value": ({"max_episode_steps": "many"}, [], ["max_episode_steps", "'many'"]),
    "a missing dataset": ({"dataset_path": "row.jsonl"}, [], ["row.jsonl does not exist", "rows.jsonl"]),
    "an unknown resource": ({"resource_type": "pythonstate"}, [], ["pythonstate", "python_state"]),
    "a resource's unknown key": (
        {"resource_type": "python_state", "base_resource_config": {"initial_stat": {}}},
        [],
        ["initial_stat", "initial_state"],
    ),
    "a reward file that is not there": (
        {"reward_function_path": "rewards.py:right"},
        [],
        ["no such file", "rewards.py"],
    ),
    "a reward that is not in the file": ({"reward_function_path": "reward.py:rigth"}, [], ["rigth", "right"]),
    "no policy": ({"policy": None}, [], ["no policy", "--model openai/NAME"]),
    "an unknown policy": ({"policy": {"type": "randm"}}, [], ["randm", "random"]),
    "a policy's file without its class": (
        {"policy": {"type": "clerk.py"}},
        [],
        ["name of the class", "clerk.py:Agent"],
    ),
    "an unknown key of a policy": ({"policy": {"type": "scripted", "action": []}}, [], ["policy.action", "actions"]),
    "an unknown provider": ({}, ["--model", "opnai/x"], ["opnai/x", "openai"]),
    "a tool module that is not there": ({"tools_module_path": "tool.py"}, [], ["no such file", "tool.py"]),
    "a sample that is not there": ({}, ["--sample-id", "q9"], ["q9"]),
    "an override that is no key": ({}, ["-T", "max_stps=3"], ["max_stps"]),
    "a recording that is not there": ({}, ["--replay", "task.yml"], ["No such file", "did you mean 'task.yaml'"]),
    "a price file that is not there": (
        {"policy": {"type": "openai", "model": "m", "api_key": "x", "price_file": "task.yml"}},
        [],
        ["price file", "No such file or directory; did you mean 'task.yaml'"],
    ),
    "a regular expression that is none": ({"termination_regex": "("}, [], ["termination_regex"]),
}


@pytest.mark.parametrize(("changes", "arguments", "expected"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_invalid_input_is_one_clear_line_and_writes_nothing(
    tmp_path: Path, changes: dict[str, object], arguments: list[str], expected: list[str]
) -> None:
    done = Project(tmp_path, **changes).call("run", "task.yaml", *arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for part in expected:
        assert part in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(["a", "b", "a"], ["rows.jsonl:3: sample id 'a'", "rows.jsonl:1"]), ([], ["rows.jsonl has no rows"])],
    ids=["duplicate", "empty"],
)
def test_duplicate_row_ids_and_empty_dataset_are_rejected(
    project: Project, ids: list[str], expected: list[str]
) -> None:
    project.write_rows([{"id": name, "number": 1, "ground_truth": ""} for name in ids])
    done = project.call("run", "task.yaml")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    for part in expected:
        assert part in done.stderr
    assert not project.runs()


def test_row_without_a_template_field_is_named_with_its_line(project: Project) -> None:
    project.write_rows([{"id": "a", "number": 1, "ground_truth": ""}, {"id": "b", "nmber": 2}])
    done = project.call("run", "task.yaml")
    assert done.returncode == 2
    assert "rows.jsonl:2" in done.stderr and "number" in done.stderr
    assert not project.runs()


def test_import_error_of_a_reward_file_shows_its_line(project: Project) -> None:
    (project.folder / "reward.py").write_text("import os\n\nright = undefined_name\n")
    done = project.call("run", "task.yaml")
    assert done.returncode == 2
    assert "reward.py:3" in done.stderr and "undefined_name" in done.stderr


def test_non_numeric_option_value_is_reported(project: Project) -> None:
    assert "'abc' is not a valid number." in project.call("run", "task.yaml", "--max-cost", "abc").stderr
    assert "'2.5' is not a valid integer." in project.call("run", "task.yaml", "-n", "2.5").stderr


def test_appending_to_a_recording_reports_its_exchanges(project: Project) -> None:
    recording = Cassette.record(project.folder / "answers.jsonl")
    for number in range(2):
        recording.record_answer(recording.lookup(b'{"messages": []}', f"episode {number}", "http://a/b"), {}, 0)
    recording.close()
    for name, said in (("answers.jsonl", "--record answers.jsonl appends to 2 existing exchanges\n"), ("new", "")):
        done = project.call("run", "task.yaml", "--dry-run", "--record", name)
        assert (done.returncode, done.stderr) == (0, said)


def test_missing_task_file_and_unknown_command_exit_with_2(project: Project) -> None:
    assert "cannot read" in project.call("run", "tsk.yaml").stderr
    assert project.call("run", "tsk.yaml").returncode == 2
    unknown = project.call("rn")
    assert unknown.returncode == 2 and "did you mean 'run'?" in unknown.stderr


def test_run_with_only_failed_episodes_exits_with_3(project: Project) -> None:
    project.write_task(reward_function_path="reward.py:broken")
    done = project.call("run", "task.yaml")
    assert done.returncode == 3
    assert "All episodes ended with an error." in done.stderr


def test_user_exception_shows_its_frame_first_and_logs_the_traceback(project: Project) -> None:
    project.write_task(reward_function_path="reward.py:broken")
    done = project.call("run", "task.yaml", "--sandbox", "in_process")
    shown = done.stdout[done.stdout.index("first error") :].strip().splitlines()
    assert len(shown) <= 15
    assert "ZeroDivisionError" in shown[0] and "reward.py:11" in shown[1] and "return 1 / 0" in shown[2]
    assert "Traceback (most recent call last)" in (project.run_path() / "run.log").read_text()


def test_unscored_episodes_are_not_zero(project: Project) -> None:
    project.write_task(reward_function_path="reward.py:broken")
    project.call("run", "task.yaml")
    scores = lines(project.run_path() / "scores.jsonl")
    assert {score["score"] for score in scores} == {None}
    assert {score["failure"]["class"] for score in scores} == {"crash"}
    summary = json.loads((project.run_path() / "summary.json").read_text())["policies"][0]
    assert (summary["scored"], summary["score"], summary["errors"]) == (0, None, {"crash": 6})


def test_gates_set_the_exit_code(project: Project) -> None:
    assert project.call("run", "task.yaml", "--fail-under", "0.3").returncode == 0
    below = project.call("run", "task.yaml", "--fail-under", "0.5")
    assert below.returncode == 1 and "Gate failed" in below.stderr
    project.write_task(reward_function_path="reward.py:broken")
    assert project.call("run", "task.yaml", "--fail-on-error", "1").returncode == 3
    (project.folder / "reward.py").write_text(
        "def odd(messages, sample):\n    return {'score': 1 / (sample['number'] % 2)}\n"
    )
    project.write_task(reward_function_path="reward.py:odd")
    stopped = project.call("run", "task.yaml", "--fail-on-error", "1", "--max-concurrency", "1")
    assert stopped.returncode == 1 and "--fail-on-error 1" in stopped.stderr
    assert project.call("run", "task.yaml", "--fail-on-error", "0.9").returncode == 0
    gated = project.call("run", "task.yaml", "--fail-under", "0.1")
    assert gated.returncode == 1 and "Gate failed: 4 of 6 episodes ended with an error" in gated.stderr
    assert project.call("run", "task.yaml", "--fail-under", "0.1", "--fail-on-error", "4").returncode == 0


def test_rejected_input_and_dry_run_leave_no_recording(project: Project) -> None:
    assert project.call("run", "task.yaml", "--dry-run", "--record", "c.jsonl").returncode == 0
    for wrong in ("nmae=x", "policy.type=nosuch", "resource_type=gymnasium"):
        assert project.call("run", "task.yaml", "-T", wrong, "--record", "c.jsonl").returncode == 2
    assert not (project.folder / "c.jsonl").exists()


def test_option_of_a_policy_that_does_not_run_is_rejected(project: Project) -> None:
    arguments = ["run", "task.yaml", "--model", "openai/m", "--base-url", "http://127.0.0.1:9/v1"]
    done = project.call(*arguments, "-T", "policy.temprature=0")
    message = (
        "-T policy.temprature: has no effect, because the policy of the task is 'scripted', but this run uses "
        "'openai/m'"
    )
    assert done.returncode == 2 and f"{message}; did you mean 'temperature'?" in done.stderr, done.stderr
    done = project.call(*arguments, "-T", "policy.temperature=0")
    assert "; write -T 'policy={type: openai, temperature: VALUE}'" in done.stderr
    assert not project.runs()


def test_dry_run_writes_nothing(project: Project) -> None:
    done = project.call("run", "task.yaml", "--dry-run")
    assert done.returncode == 0 and "episodes: 6" in done.stdout
    assert not project.runs()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (("--model", "openai/your-model"), "set OPENAI_API_KEY"),
        (("-T", "policy={type: openai, model: m, api_key_env: MY_KEY}"), "set MY_KEY"),
    ],
)
def test_dry_run_needs_no_key_and_notes_the_missing_one(project: Project, how: tuple[str, str], named: str) -> None:
    done = project.call("run", "task.yaml", *how, "--dry-run")
    assert done.returncode == 0 and "episodes: 6" in done.stdout, done.stderr
    assert done.stderr.startswith("note: no API key for https://api.openai.com/v1") and named in done.stderr
    real = project.call("run", "task.yaml", *how)
    assert real.returncode == 2 and "error: " in real.stderr and named in real.stderr
    assert not project.runs()


def test_dry_run_of_a_judged_task_needs_no_key(project: Project) -> None:
    judge = "from reward_kit import with_options\nfrom reward_kit.rewards import llm_judge\n"
    (project.folder / "judge.py").write_text(f"{judge}judge = with_options(llm_judge, model='judge')\n")
    project.write_task(
        reward_function_path="judge.py:judge",
        evaluation_criteria={"rubric": {"manners": "Polite."}},
    )
    done = project.call("run", "task.yaml", "--dry-run", "--sandbox", "in_process")
    assert done.returncode == 0 and "note: no API key" in done.stderr, done.stderr


def test_task_without_a_reward_is_collected_unscored(project: Project) -> None:
    project.write_task(reward_function_path=None)
    done = project.call("run", "task.yaml")
    assert done.returncode == 0 and "unscored" in done.stdout
    assert not lines(project.run_path() / "scores.jsonl")


def test_changed_task_is_resumed_only_with_force(project: Project) -> None:
    project.call("run", "task.yaml")
    project.write_task(num_rollouts_per_sample=3)
    done = project.call("run", "--resume")
    run = project.run_path().relative_to(project.folder)
    problem = (
        f"{run} cannot be resumed, because its inputs changed:\nthe task file {project.folder}/task.yaml changed:\n"
    )
    fixes = "\nUndo the changes, start again in a new directory, or continue anyway with --force\n"
    assert done.returncode == 2 and problem in done.stderr and fixes in done.stderr
    assert "    -num_rollouts_per_sample: 2\n    +num_rollouts_per_sample: 3\n" in done.stderr
    assert len(lines(project.run_path() / "episodes.jsonl")) == 6
    forced = project.call("run", "--resume", "--force")
    assert forced.returncode == 0 and "+num_rollouts_per_sample: 3" in forced.stderr
    assert len(lines(project.run_path() / "episodes.jsonl")) == 9


def test_resume_scores_unscored_episodes_and_cuts_a_torn_line(project: Project) -> None:
    project.call("run", "task.yaml")
    path = project.run_path()
    before = {name: lines(path / name) for name in ("episodes.jsonl", "scores.jsonl")}
    scores = (path / "scores.jsonl").read_text().splitlines(keepends=True)
    (path / "scores.jsonl").write_text("".join(scores[:2]) + scores[2][:40])
    episodes = (path / "episodes.jsonl").read_bytes()
    (path / "episodes.jsonl").write_bytes(episodes[:-30])
    done = project.call("run", "task.yaml", "--resume")
    assert done.returncode == 0, done.stderr
    assert {name: lines(path / name) for name in before} == before
    assert project.runs() == [path]


def test_second_process_on_one_run_is_rejected(tmp_path: Path) -> None:
    project = Project(tmp_path, rows=40)
    slow = {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": 200}}
    project.write_task(policy={"type": "scripted", "actions": [slow] * 9})
    process = project.start("run", "task.yaml", "--max-concurrency", "1")
    try:
        wait_for_lines(project, 1)
        done = project.call("run", "--resume")
        assert done.returncode == 3 and "another process" in done.stderr
    finally:
        process.kill()
        process.wait()


def wait_for_lines(project: Project, count: int, seconds: float = 30.0) -> None:
    """Wait until the only run of the project has `count` episodes."""
    for _ in range(int(seconds / 0.02)):
        files = [path / "episodes.jsonl" for path in project.runs()]
        if any(file.exists() and file.read_bytes().count(b"\n") >= count for file in files):
            return
        time.sleep(0.02)
    raise AssertionError("the run wrote nothing")


def slow_project(folder: Path, rows: int, milliseconds: int) -> Project:
    wait = {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": milliseconds}}
    actions = [wait, {"type": "text", "content": "done"}]
    return Project(folder, rows, policy={"type": "scripted", "actions": actions})


def test_ctrl_c_finishes_running_episodes_and_resume_does_the_rest(tmp_path: Path) -> None:
    project = slow_project(tmp_path, rows=6, milliseconds=500)
    process = project.start("run", "task.yaml", "--max-concurrency", "4")
    wait_for_lines(project, 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    path = project.run_path()
    kept = lines(path / "episodes.jsonl")
    assert 8 <= len(kept) < 12, "the four in flight are finished, and no other begins"
    assert len(lines(path / "scores.jsonl")) == len(kept)
    assert json.loads((path / "run.json").read_text())["status"] == "interrupted"
    assert project.call("run", "--resume").returncode == 0
    whole = lines(path / "episodes.jsonl")
    assert len(whole) == len({line["rollout_id"] for line in whole}) == 12
    assert [line for line in whole if line in kept] == kept


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    project = slow_project(tmp_path, rows=4, milliseconds=60_000)
    process = project.start("run", "task.yaml")
    wait_for_lines(project, 0)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


@pytest.mark.parametrize(
    ("rows", "kills"),
    [pytest.param(30, 3, id="short"), pytest.param(150, 15, id="campaign", marks=pytest.mark.campaign)],
)
def test_sigkill_loses_and_repeats_no_episode(tmp_path: Path, rows: int, kills: int) -> None:
    total = rows * 2
    chance = random.Random(5)
    project = slow_project(tmp_path, rows, milliseconds=50)
    # As slow as an episode, so that kills fall between an episode and its score.
    (tmp_path / "reward.py").write_text(
        "import asyncio\nasync def right(messages):\n    await asyncio.sleep(0.05)\n    return {'score': 1.0}\n"
    )
    arguments = ["run", "task.yaml", "--max-concurrency", "4"]
    landed, finished = 0, {}
    while landed < kills:
        process = project.start(*arguments)
        already = len(finished)
        share = max((total - already) // (kills - landed + 1), 1)
        wait_for_lines(project, min(already + max(chance.randrange(share + 1), already == 0), total - 1))
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.wait()
        whole = (project.run_path() / "episodes.jsonl").read_bytes()
        complete = [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
        landed += 1 <= len(complete) < total
        now = {record["rollout_id"]: record for record in complete}
        assert len(now) == len(complete)
        assert {key: now[key] for key in finished} == finished, "a finished episode was run again"
        finished = now
        arguments = ["run", "--resume", "--max-concurrency", "4"]
    assert project.call(*arguments).returncode == 0
    episodes, scores = (lines(project.run_path() / name) for name in ("episodes.jsonl", "scores.jsonl"))
    assert len(episodes) == len({line["rollout_id"] for line in episodes}) == total
    assert len(scores) == len({line["rollout_id"] for line in scores}) == total


def test_resume_rejects_options_that_would_change_the_run(project: Project) -> None:
    project.call("run", "task.yaml")
    done = project.call("run", "--resume", "latest", "--seed", "3")
    assert done.returncode == 2 and "--seed cannot be changed by --resume" in done.stderr


def test_base_url_without_a_model_is_rejected(project: Project) -> None:
    done = project.call("run", "task.yaml", "--base-url", "http://127.0.0.1:1/v1")
    assert done.returncode == 2 and "--base-url" in done.stderr
    assert not project.runs()


def test_endless_tool_or_reward_does_not_keep_the_program(project: Project) -> None:
    (project.folder / "tools.py").write_text(
        "import time\nfrom reward_kit import ToolRegistry\nregistry = ToolRegistry('r')\n"
        "@registry.tool\ndef wait() -> str:\n    time.sleep(600)\n    return ''\n"
    )
    (project.folder / "reward.py").write_text("import time\ndef right(messages):\n    time.sleep(600)\n")
    project.write_task(limits={"tool_time_s": 0.2, "reward_time_s": 0.2})
    done = project.call("run", "task.yaml")
    assert done.returncode == 3
    scores = lines(project.run_path() / "scores.jsonl")
    assert {score["failure"]["class"] for score in scores} == {"timeout"}
    (episode, *_) = lines(project.run_path() / "episodes.jsonl")
    assert "did not respond within 0.2 s" in episode["messages"][2]["content"]


def test_human_plays_one_episode_at_a_time(project: Project) -> None:
    lines_typed = 'wait milliseconds=0\nwait {"milliseconds": 0}\ndone\n' + "done\n" * 5
    done = subprocess.run(
        project.command("run", "task.yaml", "--policy", "human", "--json"),
        cwd=project.folder,
        env=project.environment(),
        input=lines_typed,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (human,) = json.loads(done.stdout)["policies"]
    assert (human["episodes"], human["tool_errors"], human["errors"]) == (6, 0, {})
    assert done.stderr.index("Question 0") < done.stderr.index("Question 1") < done.stderr.index("Question 2")
    (first, *_) = (line for line in lines(project.run_path() / "episodes.jsonl") if line["num_steps"] == 3)
    assert [message["role"] for message in first["messages"]][1:4] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("signals", [1, 2])
def test_run_interrupted_while_scoring_is_completed_by_resume(tmp_path: Path, signals: int) -> None:
    """A hanging reward does not delay the end: no second signal is needed."""
    project = Project(tmp_path, rows=2)
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n"
        "def right(messages):\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.05)\n"
        "    return {'score': 1.0}\n"
    )
    process = project.start("run", "task.yaml", "--sandbox", "in_process")
    wait_for_lines(project, 4)
    time.sleep(0.3)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.wait(timeout=30) == 130
    path = project.run_path()
    assert json.loads((path / "run.json").read_text())["status"] == "interrupted"
    assert len(lines(path / "episodes.jsonl")) == 4 and not lines(path / "scores.jsonl")
    (tmp_path / "go").touch()
    assert project.call("run", "--resume").returncode == 0
    assert [line["score"] for line in lines(path / "scores.jsonl")] == [1.0] * 4
    assert json.loads((path / "run.json").read_text())["status"] == "complete"
