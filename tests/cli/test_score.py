"""`reward-kit score`, `check` and `schema` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_transcripts_are_scored_with_the_same_files_and_table(project: Project) -> None:
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


def test_the_episodes_of_a_run_are_scored_again_alike(project: Project) -> None:
    project.call("run", "task.yaml")
    run = project.run_path()
    done = project.call(
        "score", str(run / "episodes.jsonl"), "--reward", "reward.py:right", "--json", "--log-dir", "again"
    )
    assert done.returncode == 0, done.stderr
    (again,) = (project.folder / "again").iterdir()
    assert lines(again / "scores.jsonl") == lines(run / "scores.jsonl")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a"}, "needs a list called 'messages'"),
        ({"id": "a", "messages": [{"role": "asistant", "content": "x"}]}, "asistant"),
        ({"id": "a", "messages": [{"content": "x"}]}, "role: missing"),
    ],
)
def test_a_row_that_is_no_transcript_is_named(project: Project, row: dict[str, object], expected: str) -> None:
    (project.folder / "data.jsonl").write_text(json.dumps(TRANSCRIPTS[0]) + "\n" + json.dumps(row) + "\n")
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right")
    assert done.returncode == 2
    assert "data.jsonl:2" in done.stderr and expected in done.stderr
    assert not project.runs()


def test_check_proves_a_task_and_a_resource(project: Project) -> None:
    assert "ok. 3 samples, 6 episodes by scripted, scored by right" in project.call("check", "task.yaml").stdout
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


def test_a_server_without_tools_is_a_warning_and_one_that_is_not_there_one_line(project: Project) -> None:
    (project.folder / "worlds.py").write_text(
        "from reward_kit.environments.python_state import PythonStateResource\n"
        "class Silent(PythonStateResource):\n"
        "    async def get_tools_spec(self):\n"
        "        return []\n"
    )
    silent = {"resource_type": "worlds.py:Silent", "base_resource_config": {"initial_state": {}}}
    project.write_task(**silent, tools_module_path=None, on_text=None)
    done = project.call("check", "task.yaml")
    assert done.returncode == 0 and "Silent' offers no tools, and an agent can only write texts" in done.stdout
    project.write_task(**silent)
    assert "warning" not in project.call("check", "task.yaml").stdout, "it has tools of its own"
    gone = project.call("check", "http", "-c", "base_url=http://127.0.0.1:1")
    assert gone.returncode == 3 and len(gone.stderr.splitlines()) == 1, gone.stderr


def test_the_schema_is_json_and_names_every_key(project: Project) -> None:
    schema = json.loads(project.call("schema").stdout)
    assert {"name", "max_episode_steps", "limits", "policy"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
