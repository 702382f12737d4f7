"""`Run`: groups, overlap of collecting and scoring, resume, limits and shutdown."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.samples import Sample
from reward_kit.loading import load_object
from reward_kit.runs.inputs import scorer_hash
from reward_kit.runs.plan import Control, NamedPolicy, RunPlan
from reward_kit.runs.run_folder import RunFolder, RunHeader, read_episodes, read_scores
from reward_kit.runs.runner import Run
from reward_kit.runs.summary import EpisodeRow
from reward_kit.typed_interface import reward_spec
from tests.agent.resources import Counter, call, task_of, text


class BaseCounter(Counter):
    """A resource that counts group bases, which are set up and not forked: now open, and at most."""

    open_bases: set = set()  # noqa: RUF012 - shared on purpose
    setups = most = 0

    async def setup(self, config):
        await super().setup(config)
        self.open_bases.add(self)
        BaseCounter.setups, BaseCounter.most = BaseCounter.setups + 1, max(BaseCounter.most, len(self.open_bases))

    async def close(self):
        await super().close()
        self.open_bases.discard(self)


@pytest.fixture(autouse=True)
def no_resource_is_open():
    Counter.open_instances.clear()
    BaseCounter.open_bases.clear()
    BaseCounter.setups = BaseCounter.most = 0
    yield
    assert not Counter.open_instances


COUNTER = f"{__name__}:BaseCounter"


async def one(messages):
    return {"score": 1.0}


async def broken(messages):
    raise ValueError("no score")


class CloseCountingPolicy(ScriptedPolicy):
    """A policy that counts how often it, rather than a session, is closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


def plan_of(
    policy: AgentPolicy | Sequence[Any],
    *,
    samples: int = 3,
    rollouts: int = 2,
    reward: Any = one,
    max_concurrency: int = 4,
    seed: int = 0,
    **fields: Any,
) -> RunPlan:
    definition = task_of(**{"initial_user_prompt": "go", **fields})
    chosen = tuple(Sample(f"s{n}") for n in range(samples))
    acting = policy if isinstance(policy, AgentPolicy) else ScriptedPolicy(policy)
    scored_by = reward and reward_spec(reward)
    return RunPlan(definition, [NamedPolicy("p", acting)], chosen, rollouts, seed, max_concurrency, scored_by)


class RecordingListener:
    """A listener that records its notifications in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def episode_stopped(self, row: EpisodeRow) -> None:
        self.events.append(("stopped", row.rollout_id))

    def episode_scored(self, row: EpisodeRow) -> None:
        self.events.append(("scored", row.rollout_id))


def open_store(path: Path) -> RunFolder:
    return RunFolder(path) if path.exists() else RunFolder.create(path, RunHeader(task_name="t"))


async def run_in(path: Path, plan: RunPlan, **options: Any) -> Run:
    """Run a plan in a new or existing run directory."""
    with open_store(path) as store:
        run = Run(plan, store, **options)
        run.load_stored()
        with anyio.fail_after(30):
            await run.execute()
    return run


def status(path: Path) -> str:
    return str(json.loads((path / "run.json").read_text())["status"])


def scored_ids(path: Path) -> list[str]:
    return [record["rollout_id"] for record in read_scores(path)]


class TestGroups:
    async def test_group_resource_is_set_up_once_and_closed_before_the_next_group(self, tmp_path: Path) -> None:
        run = await run_in(tmp_path / "run", plan_of([call(), text("x")], resource_type=COUNTER, max_concurrency=1))
        assert len(run.rows) == 6
        assert (BaseCounter.setups, BaseCounter.most) == (3, 1)

    @pytest.mark.parametrize("script", [[call("crash")], lambda *_: None], ids=["a broken world", "a broken policy"])
    async def test_group_resources_are_closed_if_every_episode_fails(self, tmp_path: Path, script: Any) -> None:
        run = await run_in(tmp_path / "run", plan_of(ScriptedPolicy(script), resource_type=COUNTER))
        assert all(row.error_class == "crash" for row in run.rows.values())
        assert BaseCounter.setups == 3 and not BaseCounter.open_bases

    async def test_group_resources_are_closed_if_the_run_is_cancelled(self, tmp_path: Path) -> None:
        control = Control()

        async def act(observation: Any, tools: Any) -> Any:
            control.scope.cancel()
            await anyio.sleep_forever()

        policy = CloseCountingPolicy(act)
        run = await run_in(tmp_path / "run", plan_of(policy, resource_type=COUNTER), control=control)
        assert not run.rows and BaseCounter.setups > 0 and not BaseCounter.open_bases
        assert policy.closed == 1
        assert status(tmp_path / "run") == "interrupted"

    async def test_resumed_group_runs_only_its_missing_episodes(self, tmp_path: Path) -> None:
        fields = {"samples": 2, "resource_type": COUNTER, "on_text": "end", "max_concurrency": 1}
        await run_in(tmp_path / "run", plan_of([text("x")], rollouts=1, **fields))
        BaseCounter.setups = BaseCounter.most = 0
        await run_in(tmp_path / "run", plan_of([text("x")], rollouts=3, **fields))
        assert len(list(read_episodes(tmp_path / "run"))) == 6
        assert (BaseCounter.setups, BaseCounter.most) == (2, 1)


class TestOverlap:
    async def test_an_episode_is_scored_while_others_are_collected(self, tmp_path: Path) -> None:
        first_score = anyio.Event()

        async def reward(messages: Any) -> Any:
            first_score.set()
            return {"score": 1.0}

        acted: list[int] = []

        async def act(observation: Any, tools: Any) -> Any:
            acted.append(1)
            if len(acted) == 6:
                await first_score.wait()
            return text("x")

        run = await run_in(tmp_path / "run", plan_of(ScriptedPolicy(act), reward=reward, max_concurrency=1))
        assert len(run.rows) == 6 and all(row.score == 1.0 for row in run.rows.values())

    async def test_slow_score_does_not_occupy_an_episode_slot(self, tmp_path: Path) -> None:
        all_collected = anyio.Event()

        async def reward(messages: Any) -> Any:
            await all_collected.wait()
            return {"score": 1.0}

        class Watch(RecordingListener):
            def episode_stopped(self, row: EpisodeRow) -> None:
                super().episode_stopped(row)
                if len(self.events) == 6:
                    all_collected.set()

        listener = Watch()
        await run_in(tmp_path / "run", plan_of([text("x")], reward=reward, max_concurrency=1), listener=listener)
        assert [kind for kind, _ in listener.events] == ["stopped"] * 6 + ["scored"] * 6

    async def test_scoring_progress_is_shown(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        async def reward(messages: Any) -> Any:
            seen.append(run.scoring)
            return {"score": 1.0}

        with open_store(tmp_path / "run") as store:
            run = Run(plan_of([text("x")], reward=reward, max_concurrency=1), store)
            assert run.scoring is None
            await run.execute()
        assert all(stats.in_flight >= 1 for stats in seen) and len(seen) == 6
        assert run.scoring is not None and (run.scoring.done, run.scoring.pending) == (6, 0)

    async def test_every_episode_is_reported_once_before_its_score(self, tmp_path: Path) -> None:
        listener = RecordingListener()
        run = await run_in(tmp_path / "run", plan_of([text("x")], max_concurrency=3), listener=listener)
        assert len(listener.events) == len(set(listener.events)) == 12
        for rollout_id in run.rows:
            assert listener.events.index(("stopped", rollout_id)) < listener.events.index(("scored", rollout_id))
        written = [record["rollout_id"] for record in read_episodes(tmp_path / "run")]
        assert sorted(written) == sorted(scored_ids(tmp_path / "run")) == sorted(run.rows)

    async def test_episodes_use_all_allowed_slots_and_no_more(self, tmp_path: Path) -> None:
        acting = most = 0
        everybody = anyio.Event()

        async def act(observation: Any, tools: Any) -> Any:
            nonlocal acting, most
            acting += 1
            most = max(most, acting)
            if acting == 3:
                everybody.set()
            await everybody.wait()
            await anyio.lowlevel.checkpoint()
            acting -= 1
            return text("x")

        await run_in(tmp_path / "run", plan_of(ScriptedPolicy(act), samples=6, max_concurrency=3))
        assert most == 3


class TestResume:
    async def test_only_missing_episodes_are_run(self, tmp_path: Path) -> None:
        plan = plan_of([text("x")])
        whole = await run_in(tmp_path / "whole", plan)
        await run_in(tmp_path / "run", plan_of([text("x")], samples=2))
        acted: list[int] = []

        def act(observation: Any, tools: Any) -> Any:
            acted.append(1)
            return text("x")

        told = RecordingListener()
        again = await run_in(tmp_path / "run", plan_of(ScriptedPolicy(act)), listener=told)
        assert len(acted) == 2
        assert again.rows.keys() == whole.rows.keys()
        assert len(told.events) == 12, "what was there already is told too"
        assert len(scored_ids(tmp_path / "run")) == len(set(scored_ids(tmp_path / "run"))) == 6

    async def test_unscored_episodes_are_scored_without_running_again(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        await run_in(path, plan_of([text("x")], reward=None))
        assert scored_ids(path) == []

        def act(observation: Any, tools: Any) -> Any:
            raise AssertionError("nothing is missing")

        run = await run_in(path, plan_of(ScriptedPolicy(act)))
        assert sorted(scored_ids(path)) == sorted(run.rows)
        assert all(row.score == 1.0 for row in run.rows.values())
        assert status(path) == "complete"

    async def test_stored_final_state_is_available_for_later_scoring(self, tmp_path: Path) -> None:
        async def total(messages: Any, state: Any) -> Any:
            return {"score": float(state["total"])}

        fields = {"resource_type": COUNTER, "on_text": "end"}
        await run_in(tmp_path / "run", plan_of([call(by=3), text("x")], reward=None, **fields))
        run = await run_in(tmp_path / "run", plan_of([], reward=total, **fields))
        assert {row.score for row in run.rows.values()} == {3.0}

    async def test_failed_episodes_are_neither_scored_nor_rerun(self, tmp_path: Path) -> None:
        scored: list[int] = []

        async def reward(messages: Any) -> Any:
            scored.append(1)
            return {"score": 1.0}

        plan = plan_of(ScriptedPolicy(lambda *_: None), reward=reward)
        for _ in range(2):
            run = await run_in(tmp_path / "run", plan)
            assert {row.error_class for row in run.rows.values()} == {"crash"}
            assert scored == scored_ids(tmp_path / "run") == []

    async def test_failed_score_is_not_retried_on_resume(self, tmp_path: Path) -> None:
        await run_in(tmp_path / "run", plan_of([text("x")], reward=broken))
        run = await run_in(tmp_path / "run", plan_of([text("x")]))
        assert {(row.score, row.score_error) for row in run.rows.values()} == {(None, "crash")}
        assert len(scored_ids(tmp_path / "run")) == 6


@pytest.mark.parametrize(("max_concurrency", "cpus"), [(24, 1), (1, 24)])
async def test_scores_in_flight_match_concurrency_or_sandbox_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_concurrency: int, cpus: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    arrived, everybody = [], anyio.Event()

    async def meets(messages):
        arrived.append(1)
        if len(arrived) == 24:
            everybody.set()
        await everybody.wait()
        return {"score": 1.0}

    plan = plan_of([text("x")], samples=24, rollouts=1, reward=meets, max_concurrency=max_concurrency)
    await run_in(tmp_path / "run", plan)
    assert len(scored_ids(tmp_path / "run")) == 24


def breaks(observation: Any, tools: Any) -> Any:
    raise ValueError("no action")


class Flaky(ScriptedPolicy):
    """A policy that fails in the episodes of one sample until it is repaired."""

    def __init__(self, sample: str) -> None:
        super().__init__([])
        self.sample, self.is_repaired, self.acted = sample, False, 0

    async def open(self, context: Any) -> AgentPolicy:
        def act(observation: Any, tools: Any) -> Any:
            self.acted += 1
            if context.sample_id == self.sample and not self.is_repaired:
                raise ValueError("no action")
            return text("x")

        return ScriptedPolicy(act)


class TestOnlyFailed:
    async def test_only_failed_reruns_failed_episodes_under_their_ids(self, tmp_path: Path) -> None:
        path, policy = tmp_path / "run", Flaky("s1")
        first = await run_in(path, plan_of(policy))
        broken_ids = {row.rollout_id for row in first.rows.values() if row.is_error}
        assert len(broken_ids) == 2
        policy.is_repaired, policy.acted = True, 0
        run = await run_in(path, plan_of(policy, samples=4), only_failed=True)
        assert policy.acted == 2, "neither what succeeded nor what is missing"
        assert not any(row.is_error for row in run.rows.values())
        attempts = [(line["rollout_id"], line["attempt"]) for line in read_episodes(path)]
        assert sorted(attempts)[-6:] and {key for key, n in attempts if n == 1} == broken_ids
        assert {line["attempt"] for line in read_scores(path) if line["rollout_id"] in broken_ids} == {1}
        latest = {line["rollout_id"]: line["attempt"] for line in read_episodes(path)}
        assert latest == {key: int(key in broken_ids) for key in first.rows}

    async def test_later_resume_uses_the_latest_attempt(self, tmp_path: Path) -> None:
        path, policy = tmp_path / "run", Flaky("s1")
        await run_in(path, plan_of(policy))
        policy.is_repaired = True
        await run_in(path, plan_of(policy), only_failed=True)
        run = await run_in(path, plan_of(ScriptedPolicy(breaks)))
        assert [row.score for row in run.rows.values()] == [1.0] * 6
        assert status(path) == "complete"

    async def test_only_failed_retries_failed_scores(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        await run_in(path, plan_of([text("x")], reward=broken))
        run = await run_in(path, plan_of(ScriptedPolicy(breaks)), only_failed=True)
        assert {(row.score, row.score_error) for row in run.rows.values()} == {(1.0, None)}


def spends(tokens: int, cost: float) -> ScriptedPolicy:
    facts = {"usage": {"prompt_tokens": tokens - 1, "completion_tokens": 1, "cost": cost}}
    return ScriptedPolicy(lambda *_: PolicyOutput(call(), None, facts))


class TestRunLimits:
    @pytest.mark.parametrize(
        ("limits", "said"),
        [
            ({"total_tokens": 70}, "70 of 70 tokens (run_limits.total_tokens)"),
            ({"cost": 0.7}, "0.7000 of 0.7 US dollars (run_limits.cost)"),
            ({"steps": 7}, "7 of 7 steps (run_limits.steps)"),
        ],
    )
    async def test_no_step_is_taken_after_the_budget_is_used_up(
        self, tmp_path: Path, limits: dict[str, float], said: str
    ) -> None:
        fields = {"resource_type": COUNTER, "max_episode_steps": 3, "reward": None, "max_concurrency": 1}
        control, path = Control(), tmp_path / "run"
        plan = plan_of(spends(10, 0.1), **fields, run_limits=limits)
        run = await run_in(path, plan, control=control)
        assert said in str(control.stop_reason)
        # Two episodes of three steps are results; the third was cut off after one and is none.
        assert len(run.rows) == 2 and run.count_incomplete() == 4
        reasons = [record["stop_reason"] for record in read_episodes(path)]
        assert reasons == ["max_steps", "max_steps", "run_limit"]
        assert status(path) == "interrupted"

        spent = Control()
        await run_in(path, plan, control=spent)
        assert spent.stop_reason and len(list(read_episodes(path))) == 3, "what earlier processes spent counts"
        more = {key: value * 10 for key, value in limits.items()}
        again = await run_in(path, plan_of(spends(10, 0.1), **fields, run_limits=more))
        assert len(again.rows) == 6 and status(path) == "complete"
        assert {line["attempt"] for line in read_episodes(path) if line["num_steps"] == 1} == {0}

    async def test_wall_time_of_earlier_processes_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        plan = plan_of([text("x")], reward=None, run_limits={"wall_time_s": 0.2})
        with open_store(path) as store:
            store.update_status(status="interrupted", worked_s=0.3)
        control = Control()
        run = await run_in(path, plan, control=control)
        assert not run.rows and "0 of 0.2 s (run_limits.wall_time_s)" in str(control.stop_reason)


class TestErrorLimit:
    @pytest.mark.parametrize(
        ("limit", "episodes"), [(0, 1), (2, 3), (0.2, 3), (0.25, 3), (1, 2), (9, 10), (10, 10), (0.95, 10)]
    )
    async def test_error_limit_is_a_count_or_a_share_of_the_total(
        self, tmp_path: Path, limit: float, episodes: int
    ) -> None:
        control = Control()
        plan = plan_of(ScriptedPolicy(breaks), samples=5, max_concurrency=1)
        run = await run_in(tmp_path / "run", plan, error_limit=limit, control=control)
        assert len(run.rows) == episodes
        assert (control.stop_reason is None) == (limit == 10)
        if control.stop_reason:
            count = "1 episode" if episodes == 1 else f"{episodes} episodes"
            assert control.stop_reason.startswith(f"--fail-on-error {limit:g}: {count} ended with an error")
        assert status(tmp_path / "run") == ("complete" if episodes == 10 else "interrupted")

    async def test_run_without_an_error_limit_runs_everything(self, tmp_path: Path) -> None:
        run = await run_in(tmp_path / "run", plan_of(ScriptedPolicy(breaks)))
        assert len(run.rows) == 6

    async def test_unscored_episode_counts_as_an_error(self, tmp_path: Path) -> None:
        control = Control()
        plan = plan_of([text("x")], reward=broken)
        await run_in(tmp_path / "run", plan, error_limit=5, control=control)
        assert control.stop_reason == "--fail-on-error 5: 6 episodes ended with an error"

    async def test_errors_before_a_resume_count(self, tmp_path: Path) -> None:
        await run_in(tmp_path / "run", plan_of(ScriptedPolicy(breaks), samples=2))
        control = Control()
        run = await run_in(tmp_path / "run", plan_of([text("x")], samples=4), error_limit=3, control=control)
        assert control.stop_reason and len(run.rows) == 4


class TestEnd:
    async def test_episodes_in_flight_are_finished_and_scored(self, tmp_path: Path) -> None:
        control, begun = Control(), []

        async def act(observation: Any, tools: Any) -> Any:
            begun.append(1)
            control.finish("asked to")
            await anyio.lowlevel.checkpoint()
            return text("x")

        run = await run_in(tmp_path / "run", plan_of(ScriptedPolicy(act), max_concurrency=2), control=control)
        assert len(begun) == len(run.rows) == len(scored_ids(tmp_path / "run")) < 6
        assert status(tmp_path / "run") == "interrupted"

    async def test_the_first_stop_reason_is_kept(self) -> None:
        control = Control()
        control.finish("first")
        control.finish("second")
        assert control.stop_reason == "first"

    async def test_concurrency_changes_only_the_order_of_lines(self, tmp_path: Path) -> None:
        found = []
        for slots in (1, 7):
            path = tmp_path / f"run-{slots}"
            plan = plan_of([call(), text("x")], max_concurrency=slots, resource_type=COUNTER, on_text="end")
            await run_in(path, plan)
            records = [*read_episodes(path), *read_scores(path)]
            found.append(sorted(json.dumps({**record, "timing": None}) for record in records))
        assert found[0] == found[1]

    async def test_the_policy_is_closed_once(self, tmp_path: Path) -> None:
        policy = CloseCountingPolicy([text("x")])
        await run_in(tmp_path / "run", plan_of(policy))
        assert policy.closed == 1

    async def test_error_while_closing_a_policy_is_logged_and_does_not_fail_the_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Clings(ScriptedPolicy):
            async def close(self) -> None:
                raise OSError("the engine is gone")

        run = await run_in(tmp_path / "run", plan_of(Clings([text("x")])))
        assert len(run.rows) == 6
        assert status(tmp_path / "run") == "complete"
        assert "close of p: OSError: the engine is gone" in caplog.text


class TestScoreRecord:
    async def test_score_record_contains_the_scorer_and_the_result(self, tmp_path: Path) -> None:
        await run_in(tmp_path / "run", plan_of([text("x")], samples=1, rollouts=1))
        (record,) = read_scores(tmp_path / "run")
        assert record["scorer"] == {"id": "one", "hash": scorer_hash(reward_spec(one))}
        assert (record["score"], record["result"]["score"], record["failure"]) == (1.0, 1.0, None)
        assert record["timing"]["duration_s"] >= 0

    def test_scorer_hash_covers_the_file_or_the_name_of_the_function(self, tmp_path: Path) -> None:
        (tmp_path / "alone.py").write_text("def fair(messages):\n    return None\n")
        spec = reward_spec(load_object("alone.py:fair", tmp_path))
        assert scorer_hash(spec) == hashlib.sha256((tmp_path / "alone.py").read_bytes()).hexdigest()
        made: dict[str, Any] = {}
        exec("def nowhere(messages):\n    return None\n", made)
        spec = reward_spec(made["nowhere"])
        assert scorer_hash(spec) == hashlib.sha256(spec.id.encode()).hexdigest()
