"""Test `reward-kit run` and `score` with sandboxed rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.project import Project, lines

HOSTILE = {
    "reads_env": ("import os; return {'score': float(len(os.environ['SECRET_KEY']))}", "crash", "KeyError"),
    "opens_socket": ("import socket; socket.socket(); return {'score': 1.0}", "refused", "PermissionError"),
    "prints_a_result": ("return print('{\"score\": 1.0}'); return None", "invalid_result", "returned nothing"),
    "exits": ("import os; os._exit(0)", "crash", "exited with status 0"),
    "raises": ("1 / 0", "crash", "ZeroDivisionError"),
    "loops": ("\n    while True: pass", "timeout", "raise limits.reward_time_s"),
    "nan": ("return {'score': float('nan')}", "invalid_result", "finite"),
    "text": ("return {'score': '1'}", "invalid_result", "got a str"),
    "memory": ("return {'score': float(len(bytearray(1 << 30)))}", "limit", "raise sandbox.limits.memory_mb"),
    "reads_itself": ("open(__file__)", "crash", "the file exists but is hidden in the sandbox"),
    "writes": ("open(__file__ + '.marker', 'w')", "crash", "No such file"),
    "forges": (
        "import os; os.write(3, b'RKF1' + b'0' * 16 + b'\\0\\0\\0\\2{}'); return {'score': 1.0}",
        "invalid_result",
        "not written by the harness",
    ),
    "changes_the_models": (
        "import reward_kit.models as m; m.EvaluateResult.model_validate = lambda *a: None; return {'score': 1.0}",
        "crash",
        "",
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("level", ["warm", "isolated"])
def test_hostile_reward_fails_only_its_own_score(project: Project, level: str) -> None:
    branches = "".join(f"  if sample['id'] == {name!r}:\n    {body}\n" for name, (body, _, _) in HOSTILE.items())
    (project.folder / "reward.py").write_text(f"def right(messages, sample):\n{branches}  return {{'score': 1.0}}\n")
    rows = [{"id": name, "number": 1} for kind in HOSTILE for name in (kind, f"fine-after-{kind}")]
    project.write_rows(rows)
    project.write_task(num_rollouts_per_sample=1, limits={"reward_time_s": 1.0})
    done = project.call("run", "task.yaml", "--sandbox", level, SECRET_KEY="sk-12345")
    assert done.returncode == 0, done.stderr
    scores = {line["rollout_id"].rsplit("-", 2)[0]: line for line in lines(project.run_path() / "scores.jsonl")}
    assert len(scores) == len(rows)
    for name, (_, failure_class, said) in HOSTILE.items():
        failure = scores[name]["failure"] or {"class": None}
        assert (scores[name]["score"], failure["class"]) == (None, failure_class), scores[name]
        assert said in failure["message"]
        assert (scores[f"fine-after-{name}"]["score"], scores[name]["sandbox"]["level"]) == (1.0, level)
    assert "sk-12345" not in (project.run_path() / "scores.jsonl").read_text()
    assert not list(project.folder.glob("*.marker"))


class TestLevels:
    def test_sandbox_flag_overrides_the_task_file(self, project: Project) -> None:
        project.write_task(sandbox={"level": "isolated"})
        levels = []
        for arguments in ([], ["--sandbox", "in_process"]):
            assert project.call("run", "task.yaml", *arguments, "--log-dir", f"runs{len(levels)}").returncode == 0
            (run,) = (project.folder / f"runs{len(levels)}").iterdir()
            levels += [{line["sandbox"]["level"] for line in lines(run / "scores.jsonl")}]
        assert levels == [{"isolated"}, {"in_process"}]

    def test_score_has_its_own_sandbox_options(self, project: Project) -> None:
        (project.folder / "data.jsonl").write_text(
            json.dumps({"messages": [{"role": "assistant", "content": "x"}], "ground_truth": "x"}) + "\n"
        )
        done = project.call("score", "data.jsonl", "--reward", "reward.py:right", "-T", "sandbox.limits.memory_mb=64")
        assert done.returncode == 0, done.stderr
        (line,) = lines(project.run_path() / "scores.jsonl")
        assert line["sandbox"]["level"] == "warm"
        done = project.call("score", "data.jsonl", "--reward", "reward.py:right", "-T", "policy.type=x")
        assert done.returncode == 2 and "-T policy.type: only limits.reward_time_s" in done.stderr
        done = project.call("score", "data.jsonl", "--reward", "reward.py:right", "-T", "sandbox.limits.memory=64")
        assert done.returncode == 2 and "did you mean 'memory_mb'?" in done.stderr

    def test_sandbox_without_a_reward_is_rejected(self, project: Project) -> None:
        project.write_task(reward_function_path=None, sandbox={"level": "warm"})
        done = project.call("run", "task.yaml")
        assert done.returncode == 2 and "sandbox has no effect" in done.stderr
