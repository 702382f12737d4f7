"""Test hostile rewards behind a server: each affects only its own answer."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.integrations.reward_server.options import Keys, ServerOptions
from reward_kit.integrations.reward_server.server import NamedReward, serving
from reward_kit.reward_agent.loading import SandboxChoice, load_reward
from reward_kit.sandbox.host import best_strength
from reward_kit.task_parts import SandboxLevel
from tests.integrations.reward_server.running_server import KEY, RawClient
from tests.sandbox.hostile_case import Case, read_case, read_cases

CASES = Path(__file__).parents[2] / "sandbox" / "cases"
QUICK = ("crash_kill_itself", "forge_two_answers", "secrets_in_memory")
MARK = "the-secret-of-the-host-0c1d2e"
LIMITS = {"memory_mb": 400, "disk_mb": 8, "result_kb": 256, "cpu_s": 1}

# What an attack achieved is told in a place that a result has.
SERVED = """

def served(messages, ground_truth=None):
    answer = evaluate(messages=[message.to_chat() for message in messages], ground_truth=ground_truth)
    if isinstance(answer, dict) and ("breach" in answer or "denied" in answer):
        return {"score": answer["score"], "reason": "breach: " + str(answer.get("breach") or "none")}
    return answer
"""
HONEST = "def honest(messages, ground_truth=None):\n    return {'score': float(messages[-1].text == ground_truth)}\n"
BODY = {"messages": [{"role": "assistant", "content": "4"}], "ground_truth": "4"}


def confines() -> str:
    """Return why this machine has no sandbox; "" if it has one."""
    try:
        asyncio.run(best_strength("auto"))
    except ConfigError as error:
        return str(error)
    return ""


CANNOT = confines()
pytestmark = pytest.mark.skipif(CANNOT != "", reason=CANNOT)


def loaded(cases: Sequence[Case], folder: Path, level: SandboxLevel) -> tuple[list[NamedReward], list[str]]:
    """Load the rewards in the sandbox; also return the names of those rejected at loading."""
    canary = folder / "canary"
    canary.write_text(MARK)
    values = {"MARK": "", "CANARYFILE": str(canary), "CANARYDIR": str(folder), "HOSTPID": str(os.getpid())}
    values |= {"CANARYPID": str(os.getpid()), "PORT": "9", "UDPPORT": "9", "UNIX": str(folder / "s"), "ABSTRACT": "x"}
    choice = SandboxChoice(level, limits=LIMITS, reward_time_s=2.0)
    found, refused = [], []
    for case in cases:
        text = case.filled(values) + SERVED
        (folder / f"{case.name}.py").write_text(text, encoding="utf-8", errors="surrogateescape")
        try:
            found.append(NamedReward(case.name, load_reward(f"{case.name}.py:served", folder, choice).reward))
        except ConfigError:
            refused.append(case.name)
    (folder / "honest.py").write_text(HONEST)
    found.append(NamedReward("honest", load_reward("honest.py:honest", folder, choice).reward))
    return found, refused


def wrong_with(case: Case, told: Any) -> str:
    """Return what is wrong with an answer; "" if nothing is."""
    result = told["result"] or {}
    if not told["error"] and not math.isfinite(told["score"]):
        return "a score that is none"
    if (told["score"] is None) != (told["error"] is not None):
        return "neither a score nor a failure"
    if "breach: " in str(result.get("reason")) and result["reason"] != "breach: none":
        return str(result["reason"])
    if MARK in json.dumps(told):
        return "the host's secret"
    if not told["error"] and case.score is not None and told["score"] != case.score:
        return f"a score of {told['score']}"
    if not told["error"] and not case.expect & {"ok", "denied", "output-capped"}:
        return f"a score of {told['score']} where {sorted(case.expect)} was due"
    return ""


async def attacked(named: Sequence[NamedReward], cases: Sequence[Case]) -> list[str]:
    """Call every hostile reward twice, and the honest one in between."""
    problems = []
    options = ServerOptions(deadline_s=2.0, max_concurrency=4)
    async with serving(named, Keys([KEY]), options) as running:
        asker, served = RawClient(running.address), {one.name for one in named}
        for case in (case for case in cases if case.name in served):
            twice = (asker.score(case.name, BODY) for _ in range(2))
            *hostile, honest = await asyncio.gather(*twice, asker.score("honest", BODY))
            assert honest.json()["score"] == 1.0, case.name
            for answer in hostile:
                assert answer.status == 200, case.name
                if problem := wrong_with(case, answer.json()):
                    problems.append(f"{case.name}: {problem}: {answer.body[:300]!r}")
        wrong = (await asker.score("honest", {**BODY, "ground_truth": "5"})).json()
        assert (wrong["score"], (await asker.get("/health", None)).status) == (0.0, 200)
        figures = (await asker.get("/metrics")).body.decode().splitlines()
        pending = [line for line in figures if line.startswith("reward_kit_serve_pending{")]
        assert len(pending) == len(named) and all(line.endswith(" 0") for line in pending)
    return problems


def attack(cases: Sequence[Case], folder: Path, level: SandboxLevel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve the cases and attack; return those rejected at loading."""
    monkeypatch.setenv("CANARY_API_KEY", MARK)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as canary:
        try:
            named, refused = loaded(cases, folder, level)
            problems = asyncio.run(attacked(named, cases))
            # A reward may return True, which is a score of 1.0. The cases expect it to be rejected.
            assert [one for one in problems if not one.startswith("result_boolean: a score of 1.0 ")] == []
            assert canary.poll() is None
        finally:
            canary.kill()
    return refused


def test_quick_hostile_rewards_affect_only_their_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [read_case(CASES / f"{name}.py") for name in QUICK]
    assert attack(cases, tmp_path, "isolated", monkeypatch) == []


@pytest.mark.campaign
@pytest.mark.parametrize("level", ["isolated", "warm"])
def test_all_hostile_rewards_affect_only_their_own_answers(
    level: SandboxLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in read_cases(CASES) if case.kind == "reward"]
    refused = attack(cases, tmp_path, level, monkeypatch)
    print(f"\n{level}: {len(cases)} hostile rewards, of which {len(refused)} were refused when loaded: {refused}")
    assert len(cases) - len(refused) >= 40
