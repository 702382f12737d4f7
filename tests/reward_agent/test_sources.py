"""Test which modules of a reward count as the user's code, if directories are reached through links."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import reward_kit

REWARD = """
import numpy as np
import own

def score(messages, **others) -> float:
    return float(np.float64(own.VALUE))
"""
INSTALLED = """
def full(messages, **others) -> float:
    return 1.0
"""
PROGRAM = """
import asyncio, json
from pathlib import Path
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.runs.trust import plan_reference_code

async def main():
    found = {}
    for reference in ("reward.py:score", "installed:full"):
        reward = load_reward(reference, choice=SandboxChoice(level="warm")).reward
        async with make_scorer(reward) as scorer:
            scored = await scorer.score(ScoringRequest("r", [Message(role="assistant", content="4")]))
        consent = plan_reference_code([reference], Path.cwd()).files
        found[reference] = scored.score, [file.name for file in reward.files], [file.name for file in consent]
    print(json.dumps(found))

asyncio.run(main())
"""


def test_packages_behind_links_are_not_the_code_of_the_user(tmp_path):
    """The project, with its environment, and the directory of NumPy are links."""
    project = tmp_path / "real"
    venv.create(project / ".venv")
    next(project.glob(".venv/lib/python*/site-packages")).joinpath("installed.py").write_text(INSTALLED)
    (project / "reward.py").write_text(REWARD)
    (project / "own.py").write_text("VALUE = 0.5\n")
    (tmp_path / "link").symlink_to(project)
    (tmp_path / "packages").symlink_to(sysconfig.get_path("purelib"))
    paths = (Path(reward_kit.__file__).parents[1], tmp_path / "packages")
    done = subprocess.run(
        [tmp_path / "link/.venv/bin/python", "-c", PROGRAM],
        cwd=tmp_path / "link",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    own = ["own.py", "reward.py"]
    assert json.loads(done.stdout) == {"reward.py:score": [0.5, own, own], "installed:full": [1.0, [], []]}
