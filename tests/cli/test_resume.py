"""Test what a resume keeps, may change, and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.report.run_data import read_run
from reward_kit.report.viewer_runs import WatchedRun
from tests.cli.project import Project, lines

PRICED = """
from reward_kit import AgentPolicy, PolicyOutput

class Priced(AgentPolicy):
    knows_cost = True

    async def get_action(self, observation, available_tools_specs=None):
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.25}
        return PolicyOutput({"type": "text", "content": "done"}, "done", {"usage": usage})
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    (tmp_path / "mine.py").write_text(PRICED)
    return project


def ids(project: Project) -> list[str]:
    done = lines(project.run_path() / "episodes.jsonl")
    return [line["rollout_id"] for line in done if line["stop_reason"] != "run_limit"]


def test_command_line_limit_holds_on_resume_until_raised(project: Project) -> None:
    project.write_task(policy={"type": "mine.py:Priced"})
    first = project.call("run", "task.yaml", "--max-cost", "0.5", "--max-concurrency", "1")
    assert first.returncode == 1 and len(ids(project)) == 2
    assert "-T run_limits.cost=MORE" in first.stderr and "0.5000 of 0.5 US dollars" in first.stderr
    assert project.call("run", "--resume").returncode == 1 and len(ids(project)) == 2
    more = project.call("run", "--resume", "-T", "run_limits.cost=1", "--max-concurrency", "1")
    assert more.returncode == 1 and len(ids(project)) == 4
    done = project.call("run", "--resume", "--max-cost", "9")
    assert done.returncode == 0 and len(ids(project)) == len(set(ids(project))) == 6
    again = project.call("run", "--resume", "--max-cost", "1")
    assert again.returncode == 0, "a complete run has nothing left to stop"


def test_cost_of_unfinished_attempts_is_shown(project: Project) -> None:
    wait = "{'type': 'tool_call', 'name': 'wait', 'arguments': {'milliseconds': 1}}"
    first_step = (
        f"        if len(observation) < 3:\n            return PolicyOutput({wait}, None, {{'usage': usage}})\n"
    )
    two_steps = PRICED.replace("        return PolicyOutput(", first_step + "        return PolicyOutput(")
    (project.folder / "mine.py").write_text(two_steps)
    project.write_task(policy={"type": "mine.py:Priced"})
    first = project.call("run", "task.yaml", "--max-cost", "0.2", "--max-concurrency", "1")
    assert (
        first.returncode == 1 and "Attempts that were replaced or not finished cost another $0.2500" in first.stderr
    ), first.stderr
    done = project.call("run", "--resume", "--max-cost", "9")
    assert done.returncode == 0, done.stderr
    spent = sum(line["usage"]["cost"] for line in lines(project.run_path() / "episodes.jsonl"))
    summary = json.loads((project.run_path() / "summary.json").read_text())
    assert summary["repeated_cost"] == pytest.approx(0.25)
    assert summary["policies"][0]["cost"] + summary["repeated_cost"] == pytest.approx(spent)
    watch = WatchedRun(project.run_path())  # for the served page
    watch.poll_all()
    for facts in (read_run(project.run_path()), watch.facts()):
        assert facts.repeated_cost == pytest.approx(0.25)
    assert "do not include $0.2500 for replaced" in (project.run_path() / "report.html").read_text()


def test_lifted_limit_stays_lifted(project: Project) -> None:
    project.write_task(policy={"type": "mine.py:Priced"}, run_limits={"cost": 0.5})
    assert project.call("run", "task.yaml", "--max-concurrency", "1").returncode == 1 and len(ids(project)) == 2
    lifted = project.call("run", "--resume", "-T", "run_limits.cost=null", "-T", "run_limits.steps=4")
    assert lifted.returncode == 1 and "run_limits.steps=MORE" in lifted.stderr and len(ids(project)) >= 4
    header = json.loads((project.run_path() / "run.json").read_text())
    assert header["run_limits"]["cost"] is None
    again = project.call("run", "--resume", "-T", "run_limits.steps=null")
    assert again.returncode == 0 and len(ids(project)) == 6, again.stderr


def test_resume_reports_changed_files_of_the_reward(project: Project) -> None:
    (project.folder / "helper.py").write_text("def grade(text):\n    return 1.0\n")
    (project.folder / "words").mkdir()
    (project.folder / "words" / "good.txt").write_text("fine")
    reward = "from helper import grade\ndef right(messages):\n    return {'score': grade(messages[-1].content)}\n"
    (project.folder / "reward.py").write_text(reward)
    project.write_task(sandbox={"read_paths": ["words"]})
    assert project.call("run", "task.yaml", "--limit", "1").returncode == 0
    (project.folder / "helper.py").write_text("def grade(text):\n    return 0.5\n")
    (project.folder / "words" / "good.txt").write_text("good")
    refused = project.call("run", "--resume")
    assert refused.returncode == 2
    told = refused.stderr.splitlines()
    where = told.index(f"the file helper.py {project.folder / 'helper.py'} changed:")
    assert told[where + 2 : where + 4] == ["    -    return 1.0", "    +    return 0.5"]
    assert f"the folder words {project.folder / 'words'} changed" in told
    assert project.call("run", "--resume", "--force").returncode == 0


def test_resume_rejects_other_keys_and_misspelled_limits(project: Project) -> None:
    project.call("run", "task.yaml")
    done = project.call("run", "--resume", "-T", "num_rollouts_per_sample=4")
    assert done.returncode == 2 and "-T num_rollouts_per_sample: --resume can change only run_limits" in done.stderr
    done = project.call("run", "--resume", "--sandbox", "isolated")
    assert done.returncode == 2 and "--sandbox cannot be changed by --resume" in done.stderr
    done = project.call("run", "--resume", "-T", "run_limits.stepps=4")
    assert done.returncode == 2 and "stepps: unknown key; did you mean 'steps'?" in done.stderr


def test_cost_of_a_simulated_user_is_in_the_table(project: Project) -> None:
    project.write_task(
        policy={"type": "mine.py:Priced"},
        user={"type": "mine.py:Priced", "opens": True},
        on_text=None,
        max_episode_steps=2,
        num_rollouts_per_sample=1,
    )
    done = project.call("run", "task.yaml", "--limit", "1", "--json")
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    (episode,) = lines(project.run_path() / "episodes.jsonl")
    turns = episode["usage"]["cost"] / 0.25 + episode["custom_data"]["user_usage"]["cost"] / 0.25
    assert (policy["cost"], policy["tokens"]) == (turns * 0.25, turns * 2) and turns >= 3


def test_damaged_run_does_not_block_resume_of_the_latest(project: Project) -> None:
    project.call("run", "task.yaml")
    broken = project.folder / "runs" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    assert project.call("run", "--resume").returncode == 0
