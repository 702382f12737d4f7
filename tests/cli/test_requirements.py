"""`reward-kit run` with a reward whose requirements are not met."""

from __future__ import annotations

from pathlib import Path

from tests.cli.project import Project

REWARD = """
from reward_kit import reward_function

@reward_function(requirements=["tiny-words>=1"])
def right(messages):
    return {"score": 1.0}
"""


def test_run_names_missing_requirements_and_writes_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path, num_rollouts_per_sample=1)
    (tmp_path / "reward.py").write_text(REWARD)
    done = project.call("run", "task.yaml")
    assert done.returncode == 2 and not project.runs()
    assert (
        "task.yaml:6: reward_function_path: reward 'right' requires 'tiny-words>=1', but tiny-words is not installed"
        in done.stderr
    )
