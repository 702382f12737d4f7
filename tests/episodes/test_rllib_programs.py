"""Test that programs written for RLlib's class give equal results on ours, as recorded in `rllib_outputs.json`."""

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from tests.episodes import rllib_programs

HERE = Path(__file__).parent
RLLIB = HERE.parent.parent / ".peers" / "rllib" / "bin" / "python"
RECORDED = json.loads((HERE / "rllib_outputs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", rllib_programs.SPACES)
@pytest.mark.parametrize("program", ["getters", "one_hot", "runner", "slices", "learner"])
def test_program_gives_the_result_of_the_rllib_class(program, kind):
    given = getattr(rllib_programs, program)(SingleAgentEpisode, kind)
    assert json.loads(json.dumps(given)) == RECORDED[f"{program} {kind}"]


@pytest.mark.campaign
def test_rllib_still_gives_the_recorded_results():
    if not RLLIB.exists():
        pytest.skip("benchmarks/episodes.py installs RLlib")
    command = [str(RLLIB), rllib_programs.__file__, "ray.rllib.env.single_agent_episode"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == RECORDED
