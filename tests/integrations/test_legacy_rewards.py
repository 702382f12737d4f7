"""Test that rewards written for reward-kit 0.4.1 give the same results as in that version, field by field.

Both packages score the same random conversations with one file of rewards, each in a Python of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.campaign
ROOT = Path(__file__).parents[2]
EARLIER = ROOT / ".integrations/earlier/bin/python"
REWARDS = """
from typing import Any, Dict, List, Optional

from reward_kit import EvaluateResult, Message, MetricResult, reward_function
from reward_kit.models import StepOutput


@reward_function
def words(messages: List[Message], ground_truth: Optional[str] = None, **kwargs: Any) -> EvaluateResult:
    answer = messages[-1].content or ""
    said = len(answer.split())
    metric = MetricResult(score=min(1.0, said / 10), is_score_valid=said > 0, reason=f"{said} words")
    return EvaluateResult(score=float(answer == ground_truth), reason="equal", metrics={"length": metric})


@reward_function
def as_dicts(messages: List[Dict[str, Any]], ground_truth: Any = None, **kwargs: Any) -> Dict[str, Any]:
    tools = [call for m in messages for call in m.get("tool_calls") or []]
    return {"score": len(tools) / 4, "reason": ",".join(c["function"]["name"] for c in tools), "metrics": {}}


@reward_function(id="steps", requirements=[])
def steps(messages: List[Message], **kwargs: Any) -> EvaluateResult:
    outputs = [StepOutput(step_index=i, base_reward=0.5 * i, reason=m.role) for i, m in enumerate(messages)]
    return EvaluateResult(score=0.25, reason=str(kwargs["scale"]), step_outputs=outputs, is_score_valid=False)


@reward_function(mode="batch")
def relative(rollouts_messages: List[List[Message]], ground_truth_for_eval: Any = None, **kwargs: Any):
    lengths = [len(messages) for messages in rollouts_messages]
    return [EvaluateResult(score=n / max(lengths), reason=str(n), metrics={}) for n in lengths]
"""


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
    for turn in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": " ".join(draw.choices(["red", "blue", "äöü", "7"], k=3))})
        if draw.random() < 0.5:
            call = {"id": f"c{turn}", "type": "function", "function": {"name": draw.choice("ab"), "arguments": "{}"}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{turn}", "name": "a", "content": "done"},
            ]
        messages.append({"role": "assistant", "content": " ".join(draw.choices(["yes", "no"], k=draw.randint(0, 3)))})
    return messages


def scored_by(python: Path | str, path: Path, calls: list[list[Any]]) -> list[Any]:
    own = {"PYTHONPATH": str(ROOT)} if python == sys.executable else {}
    done = subprocess.run(
        [python, Path(__file__).with_name("legacy_side.py")],
        input=json.dumps({"path": str(path), "calls": calls}),
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_scores_reasons_metrics_and_steps_are_equal(tmp_path: Path) -> None:
    if not EARLIER.exists():
        pytest.skip("reward-kit 0.4.1 is not installed; run `make test-integrations`")
    path, draw = tmp_path / "rewards.py", random.Random(4)
    path.write_text(REWARDS)
    calls: list[list[Any]] = []
    for _ in range(100):
        messages = conversation(draw)
        calls.append(["words", {"messages": messages, "ground_truth": draw.choice(["yes", "no", "yes no"])}])
        calls.append(["as_dicts", {"messages": messages}])
        calls.append(["steps", {"messages": messages, "scale": draw.randint(0, 9)}])
        calls.append(["relative", {"rollouts_messages": [messages, conversation(draw)]}])
    there, here = scored_by(EARLIER, path, calls), scored_by(sys.executable, path, calls)
    assert len(there) == len(here) == 400
    for call, theirs, ours in zip(calls, there, here, strict=True):
        assert ours == theirs, call
