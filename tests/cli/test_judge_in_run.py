"""Test a run with an LLM judge as its reward, recorded and replayed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from reward_kit.report.run_data import read_run
from tests.chat_server import ChatServer, answer, silent
from tests.cli.project import Project, lines
from tests.rewards.judges import data_block, fair, grades

REWARD = """
from reward_kit import with_options
from reward_kit.rewards import llm_judge

judge = with_options(llm_judge, model="judge", base_url="{url}")
"""

POLICY = {"type": "scripted", "actions": [{"type": "text", "content": "done"}]}


async def test_judged_run_uses_the_task_rubric_and_replays(tmp_path: Path) -> None:
    criteria = {"rubric": {"manners": {"description": "It is polite.", "weight": 2}}}
    project = Project(
        tmp_path,
        reward_function_path="judge.py:judge",
        evaluation_criteria=criteria,
    )
    async with ChatServer(fair(grades(4))) as server:
        (tmp_path / "judge.py").write_text(REWARD.format(url=server.base_url))
        done = await asyncio.to_thread(
            project.call,
            "run",
            "task.yaml",
            "--record",
            "tape.jsonl",
            "--log-dir",
            "one",
            REWARD_KIT_RUN_SANDBOX="in_process",
        )
        assert done.returncode == 0, done.stderr
        asked = [data_block(body)[1] for body in server.bodies]
    # Six episodes of three questions and two ground truths, answered alike: three different requests.
    assert len(asked) == 3 and {data["answer"] for data in asked} == {"done"}
    assert "- manners: It is polite." in json.dumps(server.bodies[0])
    assert {score["score"] for score in scores(tmp_path / "one")} == {0.75}
    done = await asyncio.to_thread(
        project.call,
        "run",
        "task.yaml",
        "--replay",
        "tape.jsonl",
        "--log-dir",
        "two",
        REWARD_KIT_RUN_SANDBOX="in_process",
    )
    assert done.returncode == 0, done.stderr
    assert {score["score"] for score in scores(tmp_path / "two")} == {0.75}


def scores(folder: Path) -> list[dict[str, object]]:
    (run,) = folder.iterdir()
    found = lines(run / "scores.jsonl")
    assert len(found) == 6
    return found


async def test_judge_cost_is_in_the_totals_and_counts_towards_max_cost(tmp_path: Path) -> None:
    criteria = {"rubric": {"manners": {"description": "It is polite.", "weight": 2}}}
    # Slower than the judge, so that its calls are paid for before the last episode starts.
    wait = {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": 500}}
    policy = {"type": "scripted", "actions": [wait, {"type": "text", "content": "done"}]}
    task = {"reward_function_path": "judge.py:judge", "evaluation_criteria": criteria, "policy": policy}
    project = Project(tmp_path, rows=4, **task)
    (tmp_path / "prices.yaml").write_text("judge: {input: 100000, output: 100000}\n")
    dear = 'model="judge", client={"price_file": "prices.yaml"}, '
    options = {"REWARD_KIT_RUN_SANDBOX": "in_process"}
    async with ChatServer(fair(grades(4))) as server:
        (tmp_path / "judge.py").write_text(REWARD.format(url=server.base_url).replace('model="judge", ', dear))
        limits = ["--max-cost", "1.5", "--max-concurrency", "1"]
        stopped = await asyncio.to_thread(project.call, "run", "task.yaml", *limits, **options)
        assert stopped.returncode == 1 and "of 1.5 US dollars" in stopped.stderr
        (path,) = (tmp_path / "runs").iterdir()
        assert len(lines(path / "episodes.jsonl")) < 8
        done = await asyncio.to_thread(project.call, "run", "--resume", "--max-cost", "100", **options)
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads((path / "summary.json").read_text())["policies"]
    usages = [line["result"]["metrics"]["judge_usage"]["reason"] for line in lines(path / "scores.jsonl")]
    paid = sum(float(usage.rpartition("cost_usd=")[2]) for usage in usages)
    assert policy["judge_cost"] == pytest.approx(paid) and paid > 1.5
    calls = {episode.row.judge_call for episode in read_run(path).episodes}  # for the viewer, without summary.json
    assert sum(call.cost for call in calls) == pytest.approx(paid)
    assert f"${paid:.4f}" in done.stdout


@pytest.mark.parametrize("is_named", [False, True], ids=["one reward", "named rewards"])
async def test_judge_that_gives_no_verdict_is_paid_and_counted(tmp_path: Path, is_named: bool) -> None:
    rewards = [
        {"name": "right", "reward_function_path": "reward.py:right"},
        {"name": "polite", "reward_function_path": "judge.py:judge"},
    ]
    one = {"reward_function_path": "judge.py:judge"}
    keys = {"reward_function_path": None, "rewards": rewards} if is_named else one
    project = Project(tmp_path, rows=4, policy=POLICY, **keys)
    (tmp_path / "prices.yaml").write_text("judge: {input: 100000, output: 100000}\n")
    async with ChatServer(lambda body: answer("I cannot judge this.")) as server:
        client = ', client={"price_file": "prices.yaml"}'
        (tmp_path / "judge.py").write_text(NAMED.format(url=server.base_url, client=client))
        options = {"REWARD_KIT_RUN_SANDBOX": "in_process"}
        done = await asyncio.to_thread(project.call, "run", "task.yaml", **options)
    (path,) = (tmp_path / "runs").iterdir()
    (policy,) = json.loads((path / "summary.json").read_text())["policies"]
    assert done.returncode == 3 and policy["scored"] == 0 and sum(policy["errors"].values()) == policy["episodes"]
    results = [line["result"] for line in lines(path / "scores.jsonl")]
    # Equal requests share a call, which is counted for one of them.
    usages = [result["metrics"]["judge_usage"]["reason"] for result in results if result is not None]
    paid = sum(float(usage.rpartition("cost_usd=")[2]) for usage in usages)
    assert policy["judge_cost"] == pytest.approx(paid) and paid > 0
    assert len(server.bodies) == sum(int(usage.partition("calls=")[2].split()[0]) for usage in usages)


NAMED = """
from reward_kit import with_options
from reward_kit.rewards import exact_answer, llm_judge, weighted

judge = with_options(llm_judge, model="judge", base_url="{url}"{client})
both = weighted(judge=judge, exact=exact_answer)
"""
OWN = """
from reward_kit import EvaluateResult, MetricResult, reward_function

@reward_function
def judge(messages):
    usage = MetricResult(score=0.0, is_score_valid=False, reason="calls=1 cost_usd=unknown")
    return EvaluateResult(score=1.0, metrics={"judge_usage": usage})
"""


@pytest.mark.parametrize("reference", ["judge.py:judge", "judge.py:both"])
async def test_cost_limit_rejects_a_judge_without_a_price_before_the_run(tmp_path: Path, reference: str) -> None:
    rewards = [
        {"name": "right", "reward_function_path": "reward.py:right"},
        {"name": "polite", "reward_function_path": reference},
    ]
    project = Project(tmp_path, rows=4, reward_function_path=None, rewards=rewards, policy=POLICY)
    options = {"REWARD_KIT_RUN_SANDBOX": "in_process"}
    async with ChatServer(fair(grades(4))) as server:
        (tmp_path / "judge.py").write_text(NAMED.format(url=server.base_url, client=""))
        rejected = await asyncio.to_thread(project.call, "run", "task.yaml", "--max-cost", "1.5", **options)
        assert not server.bodies and not (tmp_path / "runs").exists()
        free = await asyncio.to_thread(project.call, "run", "task.yaml", **options)
        (tmp_path / "prices.yaml").write_text("judge: {input: 1, output: 1}\n")
        client = ', client={"price_file": "prices.yaml"}'
        (tmp_path / "judge.py").write_text(NAMED.format(url=server.base_url, client=client))
        priced = await asyncio.to_thread(project.call, "run", "task.yaml", "--max-cost", "1.5", **options)
    assert rejected.returncode == 2 and "the price of the judge 'judge' is unknown" in rejected.stderr
    assert free.returncode == priced.returncode == 0, free.stderr + priced.stderr
    assert judge_cost(free.stdout) == "unknown" and judge_cost(priced.stdout).startswith("$0.0")


def judge_cost(table: str) -> str:
    return table.partition("judge cost")[2].splitlines()[0].strip()


def test_cost_limit_stops_a_run_whose_reward_reports_an_unknown_price(tmp_path: Path) -> None:
    project = Project(tmp_path, rows=4, reward_function_path="own.py:judge", policy=POLICY)
    (tmp_path / "own.py").write_text(OWN)
    options = {"REWARD_KIT_RUN_SANDBOX": "in_process"}
    stopped = project.call("run", "task.yaml", "--max-cost", "1.5", "--max-concurrency", "1", **options)
    assert stopped.returncode == 3 and "the judge's price is unknown" in stopped.stderr


async def test_judge_that_never_answers_ends_the_run_at_its_first_timeout(tmp_path: Path) -> None:
    limits = {"outage_time_s": 0.1}
    project = Project(tmp_path, reward_function_path="judge.py:judge", policy=POLICY, run_limits=limits)
    async with ChatServer([silent()] * 40) as server:
        client = ', client={"total_timeout_s": 0.5}'
        (tmp_path / "judge.py").write_text(NAMED.format(url=server.base_url, client=client))
        done = await asyncio.to_thread(project.call, "run", "task.yaml", REWARD_KIT_RUN_SANDBOX="in_process")
        assert len(server.bodies) <= 6, "no request is repeated"
    assert done.returncode == 3
    assert "total_timeout_s=0.5; raise total_timeout_s" in done.stderr
    assert "idle_timeout_s" not in done.stderr


async def test_cached_run_calls_neither_model_nor_judge_and_reports_its_hits(tmp_path: Path) -> None:
    project = Project(tmp_path, reward_function_path="judge.py:judge", num_rollouts_per_sample=2)

    def script(body):
        return fair(grades(4))(body) if body["model"] == "judge" else answer("done")

    async with ChatServer(script) as server:
        (tmp_path / "judge.py").write_text(REWARD.format(url=server.base_url))
        options = ["--cache", "answers.db", "--model", "openai/m", "--base-url", server.base_url]
        environment = {"OPENAI_API_KEY": "key-1", "REWARD_KIT_RUN_SANDBOX": "in_process"}

        async def call(*arguments: str) -> str:
            done = await asyncio.to_thread(project.call, *arguments, **environment)
            assert done.returncode == 0, done.stderr
            return done.stderr

        await call("run", "task.yaml", *options, "--log-dir", "one")
        asked = len(server.requests)
        assert asked >= 6 + 3
        shown = await call("run", "task.yaml", *options, "--log-dir", "two")
        assert len(server.requests) == asked
        (two,) = (tmp_path / "two").iterdir()
        cache = json.loads((two / "summary.json").read_text())["cache"]
        assert (cache["hits"], cache["misses"], cache["path"]) == (asked, 0, "answers.db")
        assert f"{asked} of {asked} model calls answered from the cache answers.db" in shown
        assert scores(tmp_path / "two") and {score["score"] for score in scores(tmp_path / "two")} == {0.75}
        shown = await call(
            "score", str(two), "--reward", "judge.py:judge", "--cache", "answers.db", "--sandbox", "in_process"
        )
        assert len(server.requests) == asked and "model calls answered from the cache" in shown
        clash = await asyncio.to_thread(project.call, "run", "task.yaml", *options, "--record", "tape.jsonl")
        assert clash.returncode == 2 and "use either --record or --cache" in clash.stderr
