"""Test verifiers tasksets as datasets and rewards on reward-kit's command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from click.testing import CliRunner

from reward_kit.cli.main import program
from reward_kit.errors import ConfigError
from reward_kit.integrations.verifiers.rewards import as_reward_function, dataset_rows, write_samples
from reward_kit.models import Message
from reward_kit.reward_agent.in_process import score_one
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.typed_interface import reward_spec


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def shapes(self, trace: vf.Trace) -> dict[str, float]:
        if trace.last_reply == "crash":
            raise ValueError("no shape")
        return {"short": float(len(trace.last_reply) < 3), "turns": float(trace.num_turns)}

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.transcript.split()))


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        yield SumTask(SumData(id="a", prompt="2+2?", system_prompt="Be brief.", answer="4"))
        yield SumTask(SumData(prompt=[vf.UserMessage(content="2+3?")], answer="5"))


class Boxed(vf.Task[SumData]):
    @vf.reward
    async def passes(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class Unrewarded(vf.Task[SumData]):
    pass


def sums() -> Sums:
    return Sums(vf.TasksetConfig())


def test_each_verifiers_task_is_a_row() -> None:
    first, second = dataset_rows(sums())
    assert first["id"] == "a"
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert (second["id"], second["verifiers"]["answer"], second["verifiers"]["idx"]) == ("task-1", "5", 1)


async def scored(said: str, *before: str) -> Scored:
    row = next(dataset_rows(sums()))
    messages = [Message(**message) for message in row["messages"]]
    messages += [Message(role="assistant", content=text) for text in (*before, said)]
    turns = list(range(2, len(messages)))
    request = ScoringRequest("r", messages, assistant_turns=turns, sample=row)
    return await score_one(reward_spec(as_reward_function(sums())), request)


async def test_rollout_score_equals_verifiers() -> None:
    right = await scored("4", "let me think about it")
    assert right.score == 2.0 * 1.0 + 0.5 * (1.0 + 2.0)
    assert right.result is not None
    shown = {name: metric.score for name, metric in right.result.metrics.items()}
    assert shown == {"correct": 1.0, "short": 1.0}, "turns and words are no numbers in [0, 1]"
    assert (await scored("four")).score == 0.5


async def test_failed_verifiers_reward_leaves_the_rollout_unscored() -> None:
    broken = await scored("crash")
    assert broken.score is None
    assert broken.failure is not None
    assert (broken.failure.failure_class, "no shape" in broken.failure.message) == ("crash", True)


def test_reward_that_needs_a_verifiers_rollout_is_rejected() -> None:
    def of(kind: Any, **data: Any) -> vf.Taskset:
        class Some(vf.Taskset[kind]):  # type: ignore[valid-type]
            def load(self) -> Iterator[Any]:
                yield kind(SumData(answer="4", **data))

        return Some(vf.TasksetConfig())

    with pytest.raises(ConfigError, match=r"Boxed.passes needs a runtime, but only verifiers rollouts have a runtime"):
        as_reward_function(of(Boxed))
    with pytest.raises(ConfigError, match="Unrewarded has no @vf"):
        as_reward_function(of(Unrewarded))
    with pytest.raises(ConfigError, match="task 0 has no prompt, because its user starts the conversation"):
        list(dataset_rows(of(SumTask)))
    with pytest.raises(ConfigError, match="task 0 needs a container"):
        list(dataset_rows(of(SumTask, prompt="?", image="python:3")))
    endless = of(SumTask, prompt="?")
    type(endless).INFINITE = True
    with pytest.raises(ConfigError, match=r"is infinite; select a part of it with taskset.take\(n\)"):
        write_samples(endless, Path("unused"))


def test_command_line_runs_and_scores_the_taskset(tmp_path: Path) -> None:
    assert write_samples(sums(), tmp_path / "sums.jsonl") == 2
    here = Path(__file__)
    source = f"""
import sys
sys.path.insert(0, {str(here.parent)!r})
from {here.stem} import sums
from reward_kit.integrations.verifiers.rewards import as_reward_function
score = as_reward_function(sums())
"""
    (tmp_path / "rewards.py").write_text(source)
    policy = "policy: {type: scripted, actions: [{type: text, content: '4'}]}"
    task = f"name: sums\ndataset_path: sums.jsonl\nreward_function_path: rewards.py:score\n{policy}\n"
    (tmp_path / "task.yaml").write_text(task)
    ended = CliRunner().invoke(
        program,
        ["run", str(tmp_path / "task.yaml"), "--log-dir", str(tmp_path / "runs"), "--json", "--sandbox", "in_process"],
    )
    assert ended.exit_code == 0, ended.output
    (scores,) = tmp_path.glob("runs/*/scores.jsonl")
    found = {
        line["rollout_id"].split("-")[0]: line["result"]["score"]
        for line in map(json.loads, scores.read_text().splitlines())
    }
    assert found == {"a": 3.0, "task": 1.0}
