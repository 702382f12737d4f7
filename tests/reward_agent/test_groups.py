"""Batch rewards are called once per group, at every sandbox level."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_kit.environments.base import StateSnapshot
from reward_kit.errors import ConfigError, Failure, PolicyError
from reward_kit.models import Message
from reward_kit.reward_agent import AsyncRewardAgent, InProcessScorer, Scored, ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.sandboxed import SandboxedReward
from reward_kit.reward_agent.scoring import Reward, check_parameters
from reward_kit.typed_interface import reward_function, reward_spec
from tests.profiles import examples

LEVELS = ("in_process", "warm")
BROKEN = Failure.from_exception(PolicyError("no action"))

REWARDS = """
import time
from reward_kit import EvaluateResult, Message, StepOutput, reward_function

@reward_function(mode="batch")
def ranks(rollouts_messages: list[list[Message]], ground_truths: list, sample, stop_reason, rollout_id, **others):
    texts = [messages[-1].text for messages in rollouts_messages]
    order = sorted(texts, key=len)
    told = zip(texts, ground_truths, sample, stop_reason, rollout_id)
    return [{"score": float(order.index(text)), "reason": f"{of} {len(others['task_name'])}"} for text, *of in told]

@reward_function(mode="batch")
async def obeys(rollouts_messages: list[list[dict]]):
    results = []
    for messages in rollouts_messages:
        said = messages[-1]["content"]
        made = {
            "nan": {"score": float("nan")}, "none": None, "error": {"score": 1.0, "error": "no key"},
            "invalid": {"score": 0.5, "is_score_valid": False, "reason": "unreadable"},
            "no step": {"score": 1.0, "step_outputs": [{"step_index": 7, "base_reward": 1.0}]},
            "long": {"score": 1.0, "reason": "x" * 100_000},
        }
        if said == "crash":
            raise ValueError("bad row")
        if said != "drop":
            results.append(made.get(said, {"score": float(len(said)), "reason": str(len(rollouts_messages))}))
    return tuple(results) if results else "nothing"

@reward_function(mode="batch")
def sleeps(rollouts_messages):
    time.sleep(60)

@reward_function(mode="batch")
def of_states(rollouts_messages, state):
    totals = [one["total"] if one else None for one in state]
    return [{"score": float(total or 0), "reason": str(totals)} for total in totals]

@reward_function(mode="batch")
def changes(rollouts_messages, ground_truths, sample):
    rollouts_messages[0].clear()
    ground_truths[0].append("changed")
    sample[0]["x"].append("changed")
    print("changed")
    return [{"score": float(len(truth) == 1)} for truth in ground_truths]

def alone(messages):
    return {"score": float(len(messages))}
"""


def request(text: str, number: int = 0, **fields: Any) -> ScoringRequest:
    chat = [Message(role="user", content="?"), Message(role="assistant", content=text)]
    return ScoringRequest(f"r{number}", chat, **{"assistant_turns": [1], **fields})


def group(*texts: str | None) -> list[ScoringRequest]:
    """Return a group of rollouts with these answers; None is a failed one."""
    return [request(text or "", i, failure=None if text is not None else BROKEN) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "reward.py").write_text(textwrap.dedent(REWARDS))
    return path


@functools.cache
def described(folder: Path, name: str, level: Any, deadline_s: float | None, result_kb: int | None) -> Reward:
    limits = {} if result_kb is None else {"result_kb": result_kb}
    return load_reward(f"reward.py:{name}", folder, SandboxChoice(level, limits, reward_time_s=deadline_s)).reward


async def load(
    folder: Path, name: str, level: str = "warm", deadline_s: float | None = None, result_kb: int | None = None
) -> Reward:
    return await asyncio.to_thread(described, folder, name, level, deadline_s, result_kb)


async def score(
    folder: Path,
    name: str,
    level: str,
    requests: list[ScoringRequest],
    deadline_s: float | None = None,
    result_kb: int | None = None,
) -> list[Scored]:
    async with make_scorer(await load(folder, name, level, deadline_s, result_kb), deadline_s) as scorer:
        return await scorer.score_group(requests)


def told(scored: list[Scored]) -> list[Any]:
    return [one.score if one.failure is None else one.failure.failure_class for one in scored]


@pytest.mark.parametrize("level", LEVELS)
class TestGroupCall:
    async def test_batch_reward_receives_lists_in_rollout_order(self, folder: Path, level: str) -> None:
        fields = [{"ground_truth": n, "sample": {"n": n}, "stop_reason": f"s{n}"} for n in range(3)]
        requests = [request("x" * (5 - n), n, extra={"task_name": "t"}, **fields[n]) for n in range(3)]
        scored = await score(folder, "ranks", level, requests)
        assert [one.rollout_id for one in scored] == ["r0", "r1", "r2"]
        assert told(scored) == [2.0, 1.0, 0.0]
        reasons = [one.result.reason for one in scored if one.result]
        assert reasons == [f"[{n}, {{'n': {n}}}, 's{n}', 'r{n}'] 3" for n in range(3)]
        assert len({one.duration_s for one in scored}) == 1, "it is one call"

    async def test_failed_rollout_is_left_out_and_keeps_its_failure(self, folder: Path, level: str) -> None:
        scored = await score(folder, "obeys", level, group("a", None, "abc"))
        assert [one.score for one in scored] == [1.0, None, 3.0]
        assert scored[1].failure == BROKEN and scored[1].sandbox is None
        assert [one.result.reason for one in scored if one.result] == ["2", "2"]

    async def test_invalid_result_affects_only_its_rollout(self, folder: Path, level: str) -> None:
        said = ("a", "nan", "none", "error", "invalid", "no step", "ab")
        scored = await score(folder, "obeys", level, group(*said))
        assert told(scored) == [1.0, *["invalid_result"] * 5, 2.0]
        messages = [one.failure.message for one in scored if one.failure]
        parts = [
            "obeys'[1]: score: ",
            "obeys'[2] returned nothing",
            ": no key",
            ": unreadable",
            "unknown step_index '7'",
        ]
        assert all(part in message for part, message in zip(parts, messages, strict=True)), messages

    @pytest.mark.parametrize(
        ("said", "kind", "message"),
        [
            (("a", "drop", "b"), "invalid_result", "2 results for 3 rollouts"),
            (("a", "crash", "b"), "crash", "ValueError: bad row"),
            (("drop",), "invalid_result", "a batch reward must return a list, got a str"),
        ],
    )
    async def test_failed_call_fails_every_rollout_of_the_group(
        self, folder: Path, level: str, said: tuple[str, ...], kind: str, message: str
    ) -> None:
        scored = await score(folder, "obeys", level, [*group(*said), request("", 9, failure=BROKEN)])
        assert told(scored) == [*[kind] * len(said), BROKEN.failure_class]
        assert all(message in one.failure.message for one in scored[:-1] if one.failure)
        assert scored[-1].failure == BROKEN

    async def test_deadline_applies_to_the_whole_group_call(self, folder: Path, level: str) -> None:
        scored = await score(folder, "sleeps", level, group("a", "b"), deadline_s=0.5)
        assert told(scored) == ["timeout", "timeout"]

    async def test_group_of_failed_rollouts_is_not_called(self, folder: Path, level: str) -> None:
        scored = await score(folder, "sleeps", level, group(None, None))
        assert [one.failure for one in scored] == [BROKEN] * 2

    async def test_unreadable_state_leaves_out_only_its_rollout(self, folder: Path, level: str) -> None:
        payloads = [b'{"total": 3}', b"{", None, b'{"total": 4}']
        states = [StateSnapshot("json", payload) if payload else None for payload in payloads]
        requests = [request("x", n, final_state=state) for n, state in enumerate(states)]
        scored = await score(folder, "of_states", level, requests)
        assert [one.score for one in scored] == [3.0, None, 0.0, 4.0]
        assert scored[1].failure and scored[1].failure.where == "EnvironmentFailure"
        assert scored[0].result and scored[0].result.reason == "[3, None, 4]"

    async def test_changes_to_arguments_do_not_reach_other_rollouts(self, folder: Path, level: str) -> None:
        truth, row = ["4"], {"x": [1]}
        requests = [request("x", n, ground_truth=truth, sample=row) for n in range(2)]
        scored = await score(folder, "changes", level, requests)
        assert told(scored) == [0.0, 1.0], "the copy of one rollout is not that of its sibling"
        assert (truth, row, len(requests[0].messages)) == (["4"], {"x": [1]}, 2)
        assert [one.stdout for one in scored] == ["" if level == "in_process" else "changed\n"] * 2

    async def test_single_request_is_scored_as_a_group_of_one(self, folder: Path, level: str) -> None:
        async with make_scorer(await load(folder, "obeys", level)) as scorer:
            assert scorer.mode == "batch"
            scored = await scorer.score(request("abc"))
            assert (await scorer.score(request("", failure=BROKEN))).failure == BROKEN
        assert scored.score == 3.0 and scored.result and scored.result.reason == "1"

    async def test_pointwise_reward_scores_each_rollout_of_a_group(self, folder: Path, level: str) -> None:
        async with make_scorer(await load(folder, "alone", level)) as scorer:
            assert scorer.mode == "pointwise"
            scored = await scorer.score_group(group("a", None, "b"))
        assert [one.score for one in scored] == [2.0, None, 2.0]


async def test_groups_score_equally_in_process_and_in_the_sandbox(folder: Path) -> None:
    groups: list[list[ScoringRequest]] = []
    said = st.sampled_from([None, "", "a", "ab", "nan", "none", "error", "invalid", "no step", "drop", "crash"])

    @settings(
        max_examples=examples(30),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(said, min_size=1, max_size=6))
    def collect(texts: list[str | None]) -> None:
        groups.append(group(*texts))

    collect()
    found = []
    for level in ("in_process", "warm"):
        async with make_scorer(await load(folder, "obeys", level)) as scorer:
            found.append([await scorer.score_group(requests) for requests in groups])
    for here, behind in zip(*found, strict=True):
        assert [(one.rollout_id, one.result, one.failure) for one in here] == [
            (one.rollout_id, one.result, one.failure) for one in behind
        ]
    assert {one.failure is None for scored in found[0] for one in scored} == {True, False}


async def test_isolated_level_scores_a_whole_group(folder: Path) -> None:
    scored = await score(folder, "obeys", "isolated", group("a", None, "nan", "abc"))
    assert told(scored) == [1.0, "crash", "invalid_result", 3.0]
    assert [one.sandbox["level"] for one in scored if one.sandbox] == ["isolated"] * 3


class TestLimits:
    async def test_result_size_limit_applies_per_rollout(self, folder: Path) -> None:
        assert told(await score(folder, "obeys", "warm", group(*["long"] * 8), result_kb=128)) == [1.0] * 8
        (one,) = await score(folder, "obeys", "warm", group("long"), result_kb=64)
        assert one.failure and one.failure.failure_class == "limit"
        assert "sandbox.limits.result_kb" in one.failure.message

    async def test_groups_of_similar_size_share_workers(self, folder: Path) -> None:
        reward = await load(folder, "obeys", result_kb=64)
        assert isinstance(reward, SandboxedReward)
        sizes = [reward.limits_for(count).result_kb for count in (1, 2, 3, 4, 5, 8, 1 << 30)]
        assert sizes == [64, 128, 256, 256, 512, 512, 1 << 20]
        assert reward.limits_for(1) == reward.limits


async def test_states_are_open_during_the_call_and_closed_afterwards() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (x)")
    payload = connection.serialize()
    connection.close()
    seen: list[Any] = []

    @reward_function(mode="batch")
    def reward(rollouts_messages: Any, state: Any) -> Any:
        seen.extend(state)
        return [{"score": float(one.tables() == ["t"])} for one in state]

    requests = [request("x", n, final_state=StateSnapshot("sqlite", payload)) for n in range(2)]
    async with InProcessScorer(reward_spec(reward)) as scorer:
        assert told(await scorer.score_group(requests)) == [1.0, 1.0]
    assert len({id(one) for one in seen}) == 2
    for one in seen:
        with pytest.raises(sqlite3.ProgrammingError):
            one._connection.execute("SELECT 1")


class TestAgent:
    """The agent calls a batch reward once per submitted group."""

    @staticmethod
    def sizes(calls: list[list[str]]) -> Any:
        @reward_function(mode="batch")
        async def reward(rollouts_messages: list[list[Message]]) -> Any:
            calls.append([messages[-1].text for messages in rollouts_messages])
            return [{"score": float(len(rollouts_messages))} for _ in rollouts_messages]

        return reward_spec(reward)

    async def test_agent_calls_a_batch_reward_per_group(self) -> None:
        calls: list[list[str]] = []
        async with AsyncRewardAgent(self.sizes(calls)) as agent:
            ticket = await agent.submit(group("a", "b", "c", None, "e", "f"), group_size=3)
            chunk = await agent.get(6)
        assert calls == [["a", "b", "c"], ["e", "f"]]
        assert [one.score for one in ticket.results if one] == [3.0, 3.0, 3.0, None, 2.0, 2.0]
        assert sorted(chunk.data_idxs) == list(range(6))

    async def test_rollouts_without_groups_are_called_separately(self) -> None:
        calls: list[list[str]] = []
        async with AsyncRewardAgent(self.sizes(calls)) as agent:
            await agent.submit(group("a", "b"))
            assert (await agent.get(2)).rewards == [1.0, 1.0]
        assert sorted(calls) == [["a"], ["b"]]

    async def test_concurrency_limit_counts_group_calls(self) -> None:
        running = most = 0

        @reward_function(mode="batch")
        async def watch(rollouts_messages: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return [{"score": 0.0}] * len(rollouts_messages)

        async with AsyncRewardAgent(reward_spec(watch), max_concurrency=2) as agent:
            await agent.submit(group(*"abcdefghijkl"), group_size=3)
            await agent.get(12)
        assert most == 2

    async def test_get_group_returns_groups_of_any_size_as_they_complete(self) -> None:
        async with AsyncRewardAgent(self.sizes([]), max_concurrency=1) as agent:
            await agent.submit(group("a", "b"), group_size=2)
            await agent.submit(group("c", "d", "e"), group_size=3)
            with pytest.raises(ConfigError, match="would split a group"):
                await agent.get(1)
            assert (await agent.get_group()).data_idxs == [0, 1]
            chunk = await agent.get_group()
            assert (chunk.data_idxs, chunk.rewards) == ([0, 1, 2], [3.0] * 3)
            with pytest.raises(ConfigError, match=r"get_group\(\) cannot return"):
                await agent.get_group()


@pytest.mark.parametrize(
    ("mode", "names", "near"),
    [
        (
            "batch",
            "rollouts_messages, ground_truth",
            "unknown parameter 'ground_truth'; did you mean 'ground_truths'",
        ),
        ("pointwise", "messages, ground_truths", "unknown parameter 'ground_truths'; did you mean 'ground_truth'"),
    ],
)
def test_parameters_of_the_other_mode_are_rejected(mode: Any, names: str, near: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def reward({names}): ...", made)
    with pytest.raises(ConfigError, match=near):
        check_parameters(reward_spec(reward_function(mode=mode)(made["reward"])))
