"""Test rewards, rollouts and environments as parameters of TRL's `GRPOTrainer` in its own Python."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.peers import PYTHON, ROOT, Peer

pytestmark = pytest.mark.campaign

GROUP = 4


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    if not PYTHON.exists():
        pytest.skip("TRL is not installed; run `make integrations`")
    with Peer("trl_parameters_side.py", tmp_path_factory.mktemp("trl_parameters_side")) as peer:
        yield peer


@pytest.mark.parametrize("is_async", [False, True])
def test_reward_scores_trl_completions_and_unscored_is_not_zero(trl: Peer, is_async: bool) -> None:
    found = trl.ask("rewards", is_async=is_async)
    (first, second) = found["scores"]
    assert len(first) == len(second) == 2 * GROUP
    known = [score for score in first if score is not None]
    assert 0 < len(known) < len(first), "the seed of TRL gives some empty answers and some others"
    assert found["mean"] == pytest.approx(sum(known) / len(known))
    assert found["unscored"] == pytest.approx(1 - len(known) / len(first))
    assert found["counted"] == {"crash": [*first, *second].count(None)}
    assert [why is None for why in found["failures"]] == [score is not None for score in second]


def test_trl_trainer_learns_from_and_evaluates_with_rollouts(trl: Peer) -> None:
    found = trl.ask("rollouts")
    assert found["changed"]
    assert len(found["eval_rewards"]) == 2 and all(math.isfinite(reward) for reward in found["eval_rewards"])
    # In each group one of four episodes is unscored, and all of the second: neither is in the loss.
    has_part = (found["tool_mask"] * found["completion_mask"]).sum(dim=1) > 0
    assert has_part.tolist() == [True, True, False, True, False, False, False, False]
    assert not found["advantages"][~has_part].any()
    assert found["advantages"].shape == (2 * GROUP,)
    # Observations are attended to, and are no choice of the model.
    assert (found["completion_mask"] > found["tool_mask"])[0].any()
    assert found["versions"] == [found["step"]] == [2]


def test_trl_reward_functions_can_score_rollouts(trl: Peer) -> None:
    found = trl.ask("scored_by_trl")
    # The third episode of each group of four is unscored, and so has no advantage.
    scored = [reward for reward in found["rewards"] if not math.isnan(reward)]
    assert [math.isnan(reward) for reward in found["rewards"]] == [False, False, True, False] * 2
    assert scored == pytest.approx([found["returns"][place] / 3 for place in (0, 1, 3, 4, 5, 7)])
    assert not found["advantages"][[2, 6]].any()


def test_group_shares_a_start_state_and_has_its_own_id(trl: Peer) -> None:
    found = trl.ask("rollouts")
    first, second = found["groups"][:GROUP], found["groups"][GROUP:]
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    assert len(set(found["starts"][:GROUP])) == len(set(found["starts"][GROUP:])) == 1
    assert found["starts"][0] != found["starts"][GROUP]


def call(colour: str) -> str:
    return f'<tool_call>\n{{"name": "dial", "arguments": {{"colour": "{colour}"}}}}\n</tool_call>'


def test_trl_loop_plays_the_environment(trl: Peer) -> None:
    found = trl.ask("environment", script=[call("red"), call("blue"), call("green"), "Done."])
    assert found["tools"] == ["dial"]
    assert found["prompts"] == ["Open it.\n\nlock0 place0"] * GROUP + ["Open it.\n\nlock1 place0"] * GROUP
    assert found["told"] == [["lock0 place1", "lock0 place2", "open"]] * GROUP + [["lock1 place0"] * 3] * GROUP
    # The world's own reward, under the name of its class, and that of a function that sees the world.
    assert found["rewards"]["CombinationLock"] == [3.0] * GROUP + [0.0] * GROUP
    assert found["rewards"]["finished"] == [1.0] * GROUP + [0.0] * GROUP
    assert found["tool_tokens"] > 0


def test_call_after_the_end_is_reported_to_the_model(trl: Peer) -> None:
    found = trl.ask("environment", script=[call("red"), call("blue"), call("green"), call("red"), "Done."])
    assert found["told"][0][-1] == "{'error': 'the episode is over; no tool can be called'}"
    assert found["rewards"]["CombinationLock"][0] == 3.0


def test_documented_code_blocks_run(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("TRL is not installed; run `make integrations`")
    page = (ROOT / "docs" / "guides" / "trl.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\{ \.python \.learners \}\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "trl_locks")])
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [PYTHON, "page.py"], cwd=tmp_path, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
