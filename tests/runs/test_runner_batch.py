"""Test `Run` with a batch reward: complete groups are scored, and scored again after changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.episodes.record import get_attempt
from reward_kit.runs.plan import Control, NamedPolicy, RunPlan
from reward_kit.runs.run_folder import read_scores
from reward_kit.runs.runner import Run
from reward_kit.runs.scoring import read_transcripts
from reward_kit.typed_interface import reward_function, reward_spec
from tests.agent.resources import task_of, text
from tests.runs.test_runner import RecordingListener, open_store, plan_of, run_in, scored_ids, status


@reward_function(mode="batch")
async def share(rollouts_messages: Any, rollout_id: Any) -> Any:
    reason = " ".join(rollout_id)
    return [{"score": 1.0 / len(rollouts_messages), "reason": reason} for _ in rollouts_messages]


class FailingPolicy(ScriptedPolicy):
    """A policy that fails in some rollouts, or stops the run after a number of actions."""

    def __init__(self, *rollouts: str, stop_after: int = 0, control: Control | None = None) -> None:
        super().__init__([])
        self.rollouts, self.stop_after, self.control, self.acted = rollouts, stop_after, control, 0

    async def open(self, context: Any) -> AgentPolicy:
        def act(observation: Any, tools: Any) -> Any:
            self.acted += 1
            if context.rollout_id.endswith(self.rollouts):
                raise ValueError("no action")
            if self.control is not None and self.acted == self.stop_after:
                self.control.finish("asked to")
            return text("x")

        return ScriptedPolicy(act)


def latest_scores(path: Path) -> dict[str, Any]:
    """Return the line that counts for each rollout, as a reader of the file does."""
    return {line["rollout_id"]: line for line in sorted(read_scores(path), key=get_attempt)}


def assert_scored_as_groups(path: Path, run: Run, *, members: int) -> None:
    """Assert that each score was given with exactly its group, in order."""
    lines = latest_scores(path)
    for rollout_id, row in run.rows.items():
        if row.error_class is None:
            group = rollout_id.rpartition("-")[0]
            beside = sorted(other for other in lines if other.startswith(group))
            assert len(beside) == members
            assert lines[rollout_id]["result"]["reason"] == " ".join(beside)
            assert row.score == lines[rollout_id]["score"] == 1.0 / members
            assert len({lines[other]["scored_group"] for other in beside}) == 1
    assert len({line["scored_group"] for line in lines.values()}) == len(lines) / members


class TestGroups:
    """Scoring of whole groups: one call when the last episode of a group has stopped."""

    @pytest.mark.parametrize("max_concurrency", [1, 2, 9])
    async def test_a_group_is_scored_when_its_last_episode_has_stopped(
        self, tmp_path: Path, max_concurrency: int
    ) -> None:
        told, path = RecordingListener(), tmp_path / "run"
        plan = plan_of([text("x")], reward=share, rollouts=3, max_concurrency=max_concurrency)
        run = await run_in(path, plan, listener=told)
        assert_scored_as_groups(path, run, members=3)
        assert len(scored_ids(path)) == 9 and status(path) == "complete"
        for rollout_id in run.rows:
            siblings = [other for other in run.rows if other.startswith(rollout_id.rpartition("-")[0])]
            scored = told.events.index(("scored", rollout_id))
            assert all(told.events.index(("stopped", other)) < scored for other in siblings)

    async def test_group_is_scored_while_other_groups_are_collected(self, tmp_path: Path) -> None:
        first, acted = anyio.Event(), []

        @reward_function(mode="batch")
        async def reward(rollouts_messages: Any) -> Any:
            first.set()
            return [{"score": 1.0}] * len(rollouts_messages)

        async def act(observation: Any, tools: Any) -> Any:
            acted.append(1)
            if len(acted) == 6:
                await first.wait()
            return text("x")

        run = await run_in(tmp_path / "run", plan_of(ScriptedPolicy(act), reward=reward, max_concurrency=1))
        assert [row.score for row in run.rows.values()] == [1.0] * 6

    async def test_failed_episodes_do_not_block_their_group_and_are_not_scored(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        run = await run_in(path, plan_of(FailingPolicy("-1"), reward=share, rollouts=3))
        assert sum(row.is_error for row in run.rows.values()) == 3
        assert_scored_as_groups(path, run, members=2)
        again = await run_in(path, plan_of(FailingPolicy("-1"), reward=share, rollouts=3))
        assert len(scored_ids(path)) == 6, "they are not scored again because of it"
        assert [row.score for row in again.rows.values()] == [row.score for row in run.rows.values()]

    async def test_incomplete_group_is_scored_after_a_resume(self, tmp_path: Path) -> None:
        path, control = tmp_path / "run", Control()
        plan = plan_of(
            FailingPolicy(stop_after=5, control=control), reward=share, rollouts=3, max_concurrency=1, samples=2
        )
        stopped = await run_in(path, plan, control=control)
        assert len(stopped.rows) == 5 and len(scored_ids(path)) == 3
        assert stopped.count_incomplete() == 3, "one to run, two that wait for it"
        assert status(path) == "interrupted"
        policy = FailingPolicy()
        run = await run_in(path, plan_of(policy, reward=share, rollouts=3, samples=2))
        assert policy.acted == 1 and status(path) == "complete"
        assert len(scored_ids(path)) == len(set(scored_ids(path))) == 6
        assert_scored_as_groups(path, run, members=3)

    @pytest.mark.parametrize("kept", range(6))
    async def test_group_with_a_lost_score_is_rescored_as_a_whole(self, tmp_path: Path, kept: int) -> None:
        path, plan = tmp_path / "run", plan_of([text("x")], reward=share, rollouts=3, samples=2)
        await run_in(path, plan)
        lines = (path / "scores.jsonl").read_bytes().splitlines(keepends=True)
        (path / "scores.jsonl").write_bytes(b"".join(lines[:kept]))
        told = RecordingListener()
        run = await run_in(path, plan, listener=told)
        assert_scored_as_groups(path, run, members=3)
        assert len(scored_ids(path)) == (6 if kept in (0, 3) else 6 + kept % 3)
        assert len(told.events) == len(set(told.events)) == 12, "each is told of once"
        await run_in(path, plan)
        assert len(scored_ids(path)) == (6 if kept in (0, 3) else 6 + kept % 3), "and now all hold"

    async def test_rerun_episode_has_its_group_rescored(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        first = await run_in(path, plan_of(FailingPolicy("-1"), reward=share, rollouts=3, samples=1))
        assert_scored_as_groups(path, first, members=2)
        run = await run_in(path, plan_of(FailingPolicy(), reward=share, rollouts=3, samples=1), only_failed=True)
        assert_scored_as_groups(path, run, members=3)
        lines = list(read_scores(path))
        assert [line["score"] for line in lines] == [0.5] * 2 + [1.0 / 3] * 3
        assert [line["attempt"] for line in lines] == [0, 0, 0, 1, 0]
        later = await run_in(path, plan_of(FailingPolicy(), reward=share, rollouts=3, samples=1))
        assert {row.score for row in later.rows.values()} == {1.0 / 3} and len(scored_ids(path)) == 5

    @pytest.mark.parametrize("written", [1, 2])
    async def test_kill_while_writing_a_group_does_not_mix_old_and_new_scores(
        self, tmp_path: Path, written: int
    ) -> None:
        path = tmp_path / "run"
        await run_in(path, plan_of(FailingPolicy("-0"), reward=share, rollouts=3, samples=1))
        await run_in(path, plan_of(FailingPolicy(), reward=share, rollouts=3, samples=1), only_failed=True)
        lines = (path / "scores.jsonl").read_bytes().splitlines(keepends=True)
        (path / "scores.jsonl").write_bytes(b"".join(lines[: 2 + written]))
        run = await run_in(path, plan_of(FailingPolicy(), reward=share, rollouts=3, samples=1))
        assert_scored_as_groups(path, run, members=3)

    async def test_rerun_episode_that_fails_again_keeps_the_scores_of_its_group(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        await run_in(path, plan_of(FailingPolicy("-1"), reward=share, rollouts=3, samples=1))
        run = await run_in(path, plan_of(FailingPolicy("-1"), reward=share, rollouts=3, samples=1), only_failed=True)
        assert len(scored_ids(path)) == 2 and run.count_incomplete() == 0
        assert [row.score for row in run.rows.values() if not row.is_error] == [0.5, 0.5]

    async def test_group_with_failed_scores_is_rescored_by_only_failed(self, tmp_path: Path) -> None:
        @reward_function(mode="batch", id="share")
        async def fails(rollouts_messages: Any) -> Any:
            return [{"score": 1.0}] * (len(rollouts_messages) - 1) + [None]

        path = tmp_path / "run"
        first = await run_in(path, plan_of([text("x")], reward=fails, rollouts=3, samples=2))
        assert sum(row.is_error for row in first.rows.values()) == 2
        await run_in(path, plan_of([], reward=share, rollouts=3, samples=2))
        assert len(scored_ids(path)) == 6, "a failed score is a result"
        run = await run_in(path, plan_of([], reward=share, rollouts=3, samples=2), only_failed=True)
        assert_scored_as_groups(path, run, members=3)

    async def test_additional_rollouts_form_new_groups(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        await run_in(path, plan_of([text("x")], reward=share, rollouts=2))
        run = await run_in(path, plan_of([text("x")], reward=share, rollouts=3))
        assert_scored_as_groups(path, run, members=3)
        assert len(scored_ids(path)) == 6 + 9

    async def test_episodes_of_different_policies_are_separate_groups(self, tmp_path: Path) -> None:
        path, plan = tmp_path / "run", plan_of([text("x")], reward=share, samples=2)
        plan = replace(plan, policies=[NamedPolicy(label, ScriptedPolicy([text(label)])) for label in ("a", "b")])
        run = await run_in(path, plan)
        assert len(run.rows) == 8
        assert_scored_as_groups(path, run, members=2)

    async def test_transcripts_with_equal_ids_are_a_group(self, tmp_path: Path) -> None:
        said = [{"id": name, "messages": [{"role": "assistant", "content": "x"}]} for name in ("a", "b", "a", "a", "c")]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
        episodes = read_transcripts(tmp_path / "rows.jsonl")
        plan = RunPlan(task_of(initial_user_prompt="go"), reward=reward_spec(share), given=len(episodes))
        with open_store(tmp_path / "run") as store:
            run = Run(plan, store)
            run.load_stored()
            run.add_episodes(episodes)
            with anyio.fail_after(30):
                await run.execute()
        assert run.count_incomplete() == 0
        assert sorted((row.sample_id, row.score) for row in run.rows.values()) == [
            *[("a", 1 / 3)] * 3,
            *[("b", 1.0), ("c", 1.0)],
        ]
