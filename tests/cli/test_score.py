"""Test `reward-kit score`, `check` and `schema`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from reward_kit.agent.policies import BUILT_IN
from tests.cli.project import Project, lines


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


TRANSCRIPTS = [
    {
        "id": "a",
        "ground_truth": "4",
        "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
    },
    {
        "id": "a",
        "ground_truth": "4",
        "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "5"}],
    },
    {
        "id": "b",
        "ground_truth": "done",
        "policy": "other",
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
            {"role": "assistant", "content": "done"},
        ],
    },
]


def test_transcripts_are_scored_into_a_run(project: Project) -> None:
    data = project.folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in TRANSCRIPTS))
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right")
    assert done.returncode == 0, done.stderr
    assert "mean score" in done.stdout and "other" in done.stdout
    episodes = lines(project.run_path() / "episodes.jsonl")
    assert [(e["rollout_id"][:2], e["num_steps"], e["stop_reason"]) for e in episodes] == [
        ("a-", 1, "recorded"),
        ("a-", 1, "recorded"),
        ("b-", 2, "recorded"),
    ]
    assert [score["score"] for score in lines(project.run_path() / "scores.jsonl")] == [1.0, 0.0, 1.0]
    steps = lines(project.run_path() / "scores.jsonl")[2]["result"]["step_outputs"]
    assert [step["step_index"] for step in steps] == [0, 1]


def test_episodes_file_of_a_run_gets_equal_scores(project: Project) -> None:
    project.call("run", "task.yaml")
    run = project.run_path()
    done = project.call(
        "score", str(run / "episodes.jsonl"), "--reward", "reward.py:right", "--json", "--log-dir", "again"
    )
    assert done.returncode == 0, done.stderr
    (again,) = (project.folder / "again").iterdir()
    assert lines(again / "scores.jsonl") == lines(run / "scores.jsonl")


WAIT = {"type": "tool_call", "name": "wait", "arguments": {}}
DONE = {"type": "text", "content": "done"}
SECRET = "sk-a-long-secret-0123456789"


def test_secret_in_a_transcript_is_in_no_file_of_the_score(project: Project) -> None:
    text = {"messages": [{"role": "user", "content": f"key {SECRET}"}, {"role": "assistant", "content": "4"}]}
    (project.folder / "data.jsonl").write_text(json.dumps({**text, "ground_truth": SECRET}) + "\n")
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right", OPENAI_API_KEY=SECRET)
    assert done.returncode == 0, done.stderr
    written = [file.read_text() for file in project.run_path().rglob("*") if file.is_file()]
    assert len(written) >= 5 and not any(SECRET in text for text in written)
    assert any("key (hidden)" in text for text in written)


def test_redact_function_of_the_run_applies_when_scored_from_another_folder(project: Project) -> None:
    (project.folder / "privacy.py").write_text("def blot(text):\n    return text.replace('Question', 'REDACTED')\n")
    project.write_task(redact="privacy.py:blot")
    assert project.call("run", "task.yaml").returncode == 0
    episodes = project.run_path() / "episodes.jsonl"
    episodes.write_text(episodes.read_text().replace("REDACTED", "Question"))
    elsewhere = project.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reward.py").write_text("def right(messages):\n    return {'score': 1.0}\n")
    arguments = ("score", str(episodes), "--reward", "reward.py:right")
    refused = subprocess.run(project.command(*arguments), cwd=elsewhere, env=project.environment(), capture_output=True)
    assert refused.returncode == 2 and not (elsewhere / "runs").exists(), "nothing is written unredacted"
    command = project.command(*arguments, "-T", f"redact={project.folder / 'privacy.py'}:blot")
    done = subprocess.run(command, cwd=elsewhere, env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (again,) = (elsewhere / "runs").iterdir()
    assert "REDACTED" in (again / "episodes.jsonl").read_text()
    assert "Question" not in (again / "episodes.jsonl").read_text()


def test_exhausted_run_limit_does_not_stop_scoring(project: Project) -> None:
    project.write_task(run_limits={"steps": 4}, policy={"type": "scripted", "actions": [WAIT, DONE]})
    assert project.call("run", "task.yaml", "--max-concurrency", "1").returncode == 1
    done = project.call("score", str(project.run_path() / "episodes.jsonl"), "--reward", "reward.py:right", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"][0]["scored"] == 2


def test_failed_episode_is_kept_and_not_scored(project: Project) -> None:
    (project.folder / "mine.py").write_text(PRICELESS.replace("return PolicyOutput", "raise OSError"))
    project.write_task(policy={"type": "mine.py:Priceless"})
    assert project.call("run", "task.yaml").returncode == 3
    run = project.run_path()
    done = project.call("score", str(run / "episodes.jsonl"), "--reward", "reward.py:right")
    assert done.returncode == 3 and "All episodes ended with an error" in done.stderr
    (again,) = {*project.runs()} - {run}
    assert len(lines(again / "episodes.jsonl")) == 6 and not lines(again / "scores.jsonl")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a"}, "must have a list 'messages'"),
        ({"id": "a", "messages": [{"role": "asistant", "content": "x"}]}, "asistant"),
        ({"id": "a", "messages": [{"content": "x"}]}, "role: missing"),
    ],
)
def test_invalid_transcript_row_is_named(project: Project, row: dict[str, object], expected: str) -> None:
    (project.folder / "data.jsonl").write_text(json.dumps(TRANSCRIPTS[0]) + "\n" + json.dumps(row) + "\n")
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right")
    assert done.returncode == 2
    assert "data.jsonl:2" in done.stderr and expected in done.stderr
    assert not project.runs()


def test_check_accepts_tasks_and_resources(project: Project) -> None:
    assert "ok. 3 samples, 6 episodes with scripted, scored by right" in project.call("check", "task.yaml").stdout
    good = project.call("check", "python_state", "-c", "initial_state={x: 1}")
    assert good.returncode == 0, good.stdout + good.stderr
    (project.folder / "worlds.py").write_text(
        "from reward_kit.environments.python_state import PythonStateResource\n"
        "class Shared(PythonStateResource):\n"
        "    async def fork(self):\n"
        "        return self\n"
    )
    bad = project.call("check", "worlds.py:Shared", "-c", "initial_state={x: 1}")
    assert bad.returncode == 1 and "fork" in bad.stdout


PRICELESS = """
from reward_kit import AgentPolicy, PolicyOutput

class Priceless(AgentPolicy):
    async def get_action(self, observation, available_tools_specs=None):
        return PolicyOutput({"type": "text", "content": "done"})
"""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"limits": {"cost": 1.0}, "policy": {"type": "mine.py:Priceless"}},
            "class Priceless (an AgentPolicy) set is_",
        ),
        ({"redact": "nowhere.py:f"}, "task.yaml:18: redact: no such file"),
        ({"redact": "reward.py:broken_off"}, "task.yaml:18: redact: 'reward.py:broken_off'"),
        ({"user": {"type": "expert"}, "on_text": None}, "cannot be a user"),
        ({"policy": {"type": "scripted", "acts": []}}, "acts"),
    ],
)
def test_check_and_run_reject_tasks_with_the_same_message(project: Project, keys: dict, said: str) -> None:
    (project.folder / "mine.py").write_text(PRICELESS)
    project.write_task(**keys)
    checked, run = project.call("check", "task.yaml"), project.call("run", "task.yaml", "--dry-run")
    assert (checked.returncode, run.returncode) == (2, 2)
    assert said in checked.stderr and checked.stderr == run.stderr


@pytest.mark.parametrize(("option", "value"), [("--config", "x=1"), ("--steps", "3")])
def test_resource_option_is_rejected_with_a_task_file(project: Project, option: str, value: str) -> None:
    done = project.call("check", "task.yaml", option, value)
    assert done.returncode == 2 and f"{option} applies to a resource" in done.stderr


def test_server_without_tools_is_a_warning_and_a_missing_server_an_error(project: Project) -> None:
    (project.folder / "worlds.py").write_text(
        "from reward_kit.environments.python_state import PythonStateResource\n"
        "class Silent(PythonStateResource):\n"
        "    async def get_tools_spec(self):\n"
        "        return []\n"
    )
    silent = {"resource_type": "worlds.py:Silent", "base_resource_config": {"initial_state": {}}}
    project.write_task(**silent, tools_module_path=None, on_text=None)
    done = project.call("check", "task.yaml")
    assert done.returncode == 0 and "Silent' has no tools, so an agent can only write text" in done.stdout
    project.write_task(**silent)
    assert "has no tools" not in project.call("check", "task.yaml").stdout, "it has tools of its own"
    gone = project.call("check", "http", "-c", "base_url=http://127.0.0.1:1")
    assert gone.returncode == 1 and "http: 1 error" in gone.stdout and "127.0.0.1:1" in gone.stdout, gone


def test_schema_is_json_and_names_every_key(project: Project) -> None:
    schema = json.loads(project.call("schema").stdout)
    assert {"name", "max_episode_steps", "limits", "policy"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
    named = schema["$defs"]["PolicyModel"]["properties"]["type"]["description"]
    assert set(named.replace("`", "").replace("or ", "").split(", ")) == {*BUILT_IN, "module:Class"}


def test_rows_without_a_required_ground_truth_are_reported(project: Project) -> None:
    data = project.folder / "data.jsonl"
    rows = [{"groundtruth" if key == "ground_truth" else key: row[key] for key in row} for row in TRANSCRIPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right")
    assert done.returncode == 2 and not project.runs()
    assert "needs ground_truth, but no row has one" in done.stderr
    assert "rename 'groundtruth' to 'ground_truth'" in done.stderr
    data.write_text("".join(json.dumps(row) + "\n" for row in [TRANSCRIPTS[0], *rows[1:]]))
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right", "--json")
    scores = lines(project.run_path() / "scores.jsonl")
    assert sorted((score["score"] for score in scores), key=str) == [1.0, None, None]
    assert "requires a ground_truth, but the sample has none" in done.stdout
