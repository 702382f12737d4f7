"""Test a judge at a real endpoint that fails, limits, stalls and disconnects: every rollout has a score or an error.

The scorers are those of `examples/llm_judge` and the built-in `llm_judge`.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from reward_kit.models import Message
from reward_kit.reward_agent import AsyncRewardAgent, Scored, ScoringRequest, load_reward
from reward_kit.reward_agent.loading import SandboxChoice, load_custom_reward, make_scorer
from tests import command_line
from tests.chat_server import Behavior, ChatServer, answer, dropped, slow, status
from tests.cli.project import lines
from tests.rewards.judges import fair, grades

EXAMPLE = Path(__file__).parents[2] / "examples" / "llm_judge"
RATHER_BAD = {"error": 0.10, "limited": 0.15, "stalled": 0.17, "dropped": 0.20}
WORSE = {"error": 0.10, "limited": 0.20, "stalled": 0.26, "dropped": 0.35}
"""Which share of requests meets what, added up."""


@dataclass
class Faults:
    """An endpoint with seeded faults, and a log of how long each request kept its caller.

    Args:
        service_s: shortest and longest time of an answer.
        timeout_s: after which the caller gives up on a request that stalls.
        retry_after_s: what a limited request is told to wait.
        is_verdict: the built-in judge is answered, in its own form.
        bounds: which share of requests meets what.
        hopeless: the share of rollouts whose requests are refused for good.
        is_kind_twice: a request that is made again meets nothing more.
    """

    service_s: tuple[float, float]
    timeout_s: float
    retry_after_s: float
    is_verdict: bool
    bounds: Mapping[str, float] = field(default_factory=lambda: RATHER_BAD)
    hopeless: float = 0.01
    is_kind_twice: bool = False
    kept_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    met: set[str] = field(default_factory=set)

    def __call__(self, body: dict[str, Any]) -> Behavior:
        found = re.search(r"rollout (\d+)\b", body["messages"][-1]["content"])
        assert found is not None
        draw = random.Random(f"{found[1]} {len(self.kept_s[found[1]])}")
        key = found[1]
        is_let_be = self.is_kind_twice and bool(self.kept_s[key])
        service_s = draw.uniform(*self.service_s)
        kind = self.kind(key, 1.0 if is_let_be else draw.random())
        self.met.add(kind)
        self.kept_s[key].append(0.0)
        place = len(self.kept_s[key]) - 1
        return self._logged(key, place, self._behaviour(kind, service_s, body), kind)

    def kind(self, key: str, chance: float) -> str:
        """Return the fault of a rollout's request, drawn separately for each."""
        if random.Random(f"hopeless {key}").random() < self.hopeless:
            return "refused"
        return next((kind for kind, bound in self.bounds.items() if chance < bound), "answered")

    def _behaviour(self, kind: str, service_s: float, body: dict[str, Any]) -> Behavior:
        faults: dict[str, Behavior] = {
            "refused": slow(service_s / 4, status(403, text="this answer cannot be judged")),
            "error": slow(service_s / 4, status(500)),
            "limited": status(429, {"Retry-After": f"{self.retry_after_s:g}"}),
            "stalled": slow(3 * self.timeout_s, answer("too late")),
            "dropped": slow(service_s / 2, dropped()),
        }
        good = fair(grades(4))(body) if self.is_verdict else answer("It is right. Grade: 7")
        return faults.get(kind, slow(service_s, good))

    def _logged(self, key: str, place: int, then: Behavior, kind: str) -> Behavior:
        async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            began = time.monotonic()
            try:
                return await then(request, body)
            finally:
                kept_s = min(time.monotonic() - began, self.timeout_s)
                self.kept_s[key][place] = kept_s + (self.retry_after_s if kind == "limited" else 0.0)

        return behave

    def ideal_s(self, order: Sequence[str], width: int) -> float:
        """Return the makespan of greedy list scheduling, with each rollout's request and retry times."""
        slots = [0.0] * width
        for key in order:
            kept = [self.timeout_s if kept_s == 0.0 else kept_s for kept_s in self.kept_s[key]]
            heapq.heapreplace(slots, slots[0] + sum(kept))
        return max(slots)


def requests(count: int) -> list[ScoringRequest]:
    question = Message(role="user", content="Is it so?")
    return [
        ScoringRequest(
            f"r{i}", [question, Message(role="assistant", content=f"rollout {i} ends")], ground_truth="yes",
            sample={"question": "Is it so?"},
        )
        for i in range(count)
    ]  # fmt: skip


def scorer(name: str, url: str, timeout_s: float, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    if name == "llm_judge":
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        client = {"total_timeout_s": timeout_s, "max_attempts": 8, "retry_base_s": 0.25, "retry_budget_s": 60.0}
        options = {"model": "judge", "base_url": url, "client": client}
        return make_scorer(load_reward("reward_kit.rewards:llm_judge", options=options).reward)
    monkeypatch.setenv("JUDGE_BASE_URL", url)
    monkeypatch.setenv("JUDGE_TIMEOUT_S", str(timeout_s))
    # A copy, since a file is loaded once per process and reads these variables then.
    (folder / "reward.py").write_text((EXAMPLE / "reward.py").read_text(encoding="utf-8"))
    choice = SandboxChoice(level="in_process")
    return make_scorer(load_custom_reward("reward.py", name, folder=folder, choice=choice).reward)


async def judged(made: Any, batch: Sequence[ScoringRequest], group_size: int, width: int) -> tuple[list[Scored], float]:
    async with AsyncRewardAgent(made, max_concurrency=width) as agent:
        began = time.perf_counter()
        await agent.submit(batch, group_size)
        found = [each for _ in range(0, len(batch), group_size) for each in (await agent.get_group()).extra_infos]
        return found, time.perf_counter() - began


def check(found: Sequence[Scored], count: int, score: float) -> None:
    """Check that each rollout occurs once, with the judge's score, its group's mean, or an error."""
    assert sorted(each.rollout_id for each in found) == sorted(f"r{i}" for i in range(count))
    for each in found:
        if each.score is None:
            assert each.failure is not None
            # The built-in judge does not ask again where an answer did not end in its time: it may have been paid for.
            assert re.search("cannot be judged|did not finish its response", each.failure.message), each.failure
        else:
            assert each.result is not None and each.score == pytest.approx(score)


@pytest.mark.parametrize(("name", "score"), [("compute_score", 0.7), ("RewardAgent", 0.7), ("llm_judge", 0.75)])
async def test_faulty_judge_scores_or_names_every_rollout(
    name: str, score: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = 24
    faults = Faults((0.001, 0.01), 0.5, 0.05, name == "llm_judge", WORSE, hopeless=0.1, is_kind_twice=True)
    async with ChatServer(faults) as server:
        batch = requests(count)
        found, _ = await judged(scorer(name, server.base_url, 0.5, monkeypatch, tmp_path), batch, 4, count)
    check(found, count, score)
    assert faults.met >= {"refused", "error", "limited", "stalled", "dropped", "answered"}
    imputed = [each.rollout_id for each in found if each.result is not None and each.result.is_imputed]
    unscored = [each.rollout_id for each in found if each.score is None]
    refused = [f"r{key}" for key in faults.kept_s if faults.kind(key, 1.0) == "refused"]
    stalled = [each for each in found if each.failure is not None and "did not finish" in each.failure.message]
    assert refused and sorted(imputed + unscored) == sorted([*refused, *(each.rollout_id for each in stalled)])
    assert not stalled or name == "llm_judge"
    assert bool(imputed) == (name == "RewardAgent")


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "score"), [("llm_judge", 0.75), ("RewardAgent", 0.7)])
async def test_judge_scoring_is_nearly_as_fast_as_the_endpoint(
    name: str,
    score: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count, width = 960, 64
    faults = Faults((0.5, 1.5), 2.0, 1.0, name == "llm_judge")
    async with ChatServer(faults) as server:
        batch = requests(count)
        found, took_s = await judged(scorer(name, server.base_url, 2.0, monkeypatch, tmp_path), batch, 4, width)
    check(found, count, score)
    ideal_s = faults.ideal_s([str(i) for i in range(count)], width)
    asked = sum(map(len, faults.kept_s.values()))
    with capsys.disabled():
        named = sum(each.score is None for each in found)
        print(f"\n{name}: {count} rollouts, {asked} requests, {named} unscored and named; {took_s:.2f} s, ", end="")
        print(f"ideal {ideal_s:.2f} s, ratio {took_s / ideal_s:.3f}")
    assert took_s <= 1.2 * ideal_s


def both_models(body: dict[str, Any]) -> Behavior:
    """Serve the agent's model and the judge at one endpoint; the judge omits one grade."""
    if not body["messages"][0]["content"].startswith("You judge"):
        return answer("Because of the Moon." if "tides" in body["messages"][-1]["content"] else "Nobody knows.")
    is_graded = "the Moon" in body["messages"][-1]["content"]
    return answer("It is short. Grade: 4" if is_graded else "I cannot say.")


@pytest.mark.parametrize(("name", "scored"), [("RewardAgent", 4), ("compute_score", 4)])
async def test_judge_example_runs_with_both_forms(tmp_path: Path, name: str, scored: int) -> None:
    async with ChatServer(both_models) as server:
        words = ("--base-url", server.base_url, "-T", f"custom_reward_function.name={name}", "--json")
        done = await asyncio.to_thread(
            command_line.call,
            *("run", str(EXAMPLE / "task.yaml"), *words),
            cwd=tmp_path,
            env=command_line_environment(JUDGE_BASE_URL=server.base_url),
        )
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    # A whole group without a grade has no mean that could be filled in.
    assert (policy["scored"], policy["episodes"], policy["errors"]) == (scored, 16, {"invalid_result": 12})
    found = lines(tmp_path / json.loads(done.stdout)["run"] / "scores.jsonl")
    assert {each["score"] for each in found} == {0.4, None}
    assert all("<question>Why" in each["result"]["query"] and each["result"]["response"] for each in found)


def test_stand_in_server_of_the_example_answers_and_judges(tmp_path: Path, stand_in: str) -> None:
    environment = command_line_environment(JUDGE_BASE_URL=stand_in)
    words = ("run", str(EXAMPLE / "task.yaml"), "--base-url", stand_in, "--json")
    done = command_line.call(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    assert (policy["scored"], policy["errors"]) == (16, {})
    assert policy["imputed"] > 0 and 0.2 < policy["score"]["mean"] < 0.9


@pytest.fixture
def stand_in() -> Iterator[str]:
    """The address of the example's stand-in for both models."""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE / "stand_in.py"), "0"], stdout=subprocess.PIPE, text=True
    ) as model:
        try:
            assert model.stdout is not None
            yield re.findall(r"http://\S+/v1", model.stdout.readline())[0]
        finally:
            model.terminate()


def command_line_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without variables that name another endpoint."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "REWARD_KIT_", "JUDGE_"))}
    return {**kept, "NO_COLOR": "1", "REWARD_KIT_TRUST": "1", "REWARD_KIT_RUN_SANDBOX": "in_process", **variables}
