"""Test the rollout card of a run: the file, the page, and the warnings of `reward-kit compare`."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

from reward_kit.report.run_page import write_report
from reward_kit.rewards.judge_prompts import prompt_hash
from tests.chat_server import Behavior, ChatServer, answer, status
from tests.cli.project import Project, lines
from tests.rewards.judges import fair, grades

JUDGE = """
from reward_kit import with_options
from reward_kit.rewards import llm_judge

judge = with_options(llm_judge, model="{model}", base_url="{url}")
"""


async def run(project: Project, name: str, *options: str, reported: str = "agent-1", **task: Any) -> dict[str, Any]:
    """Run the task with a model and a judge at a local endpoint whose first answer is an error, and return the card."""
    number, judge = count(), fair(grades(4))

    def script(body: dict[str, Any]) -> Behavior:
        if body["model"] != "agent":
            return judge(body)
        return answer("done", top={"model": reported}) if next(number) else status(503)

    async with ChatServer(script) as server:
        url = server.base_url
        (project.folder / "judge.py").write_text(JUDGE.format(model=task.pop("judge", "judge"), url=url))
        policy = {"type": "vllm", "model": "agent", "base_url": url, "retry_base_s": 0.01, **task.pop("policy", {})}
        project.write_task(policy=policy, tools_module_path=None, reward_function_path="judge.py:judge", **task)
        options = ("run", "task.yaml", "--log-dir", name, "--max-concurrency", "1", *options)
        done = await asyncio.to_thread(project.call, *options, REWARD_KIT_RUN_SANDBOX="in_process")
        assert done.returncode == 0, done.stderr
        system = next(body["messages"][0]["content"] for body in server.bodies if body["model"] != "agent")
    (path,) = (project.folder / name).iterdir()
    card: dict[str, Any] = json.loads((path / "card.json").read_text())
    assert card["judge"]["prompt_hashes"] == [prompt_hash(system)]
    path.rename(project.folder / f"{name}-run")
    return card


def rubric(text: str) -> dict[str, Any]:
    return {"evaluation_criteria": {"rubric": {"manners": text}}}


async def test_card_declares_the_rules_and_compare_warns_about_each_that_differs(tmp_path: Path) -> None:
    project = Project(tmp_path)
    one = await run(project, "one", policy={"temperature": 0.0}, **rubric("It is polite."))
    assert one["attempts"] == {
        "samples": 3,
        "rollouts_per_sample": 2,
        "episodes": 6,
        "missing": 0,
        "replaced": 0,
    }
    (policy,) = one["policies"].values()
    assert (policy["models"], policy["reported_models"], policy["retries"]) == (["agent"], ["agent-1"], 1)
    assert (policy["sampling"]["temperature"], policy["sampling"]["top_p"]) == (0.0, None)
    assert (policy["scored"], policy["unscored"], policy["errors"]) == (6, 0, {})
    assert one["judge"]["models"] == ["judge"]
    assert one["limits"]["max_episode_steps"] == 10 and one["limits"]["reward_time_s"] == 600.0
    assert one["versions"]["dataset"] and one["versions"]["reward"]
    page = write_report(tmp_path / "one-run").read_text()
    assert "Rollout card" in page and "agent-1" in page and one["judge"]["prompt_hashes"][0] in page

    limits = {"limits": {"total_tokens": 5000}}
    changes = {"policy": {"temperature": 0.7}, "judge": "strict-judge", "reported": "agent-2", **limits}
    await run(project, "two", "-n", "3", **changes, **rubric("It is rude."))
    done = project.call("compare", "one-run", "two-run", "--json")
    mismatches = json.loads(done.stdout)["comparisons"][0]["mismatches"]
    values = {mismatch["what"]: (mismatch["baseline"], mismatch["run"]) for mismatch in mismatches}
    assert values["rollouts"] == (2, 3)
    assert values["sampling"] == (0.0, 0.7)
    assert values["reported_model"] == (["agent-1"], ["agent-2"])
    text = done.stderr
    assert "the number of rollouts per sample differs (2 and 3)" in text
    assert "the option temperature of the policy differs (0 and 0.7)" in text
    assert "the model that the endpoint reports differs (agent-1 and agent-2)" in text
    assert "the judge differs (judge and strict-judge): scores may not be comparable" in text
    assert f"the prompt hash of the judge differs ({one['judge']['prompt_hashes'][0]} and " in text
    assert "limits.total_tokens (not set and 5000)" in text
    assert "the reward differs (llm_judge " in text


async def test_equal_rules_give_no_warning(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for name in ("one", "two"):
        await run(project, name, **rubric("It is polite."))
    done = project.call("compare", "one-run", "two-run")
    warnings = [line for line in done.stderr.splitlines() if "reward differs" not in line]  # its file names the port
    assert warnings == []


async def test_cached_verdicts_declare_their_judge(tmp_path: Path) -> None:
    policy = {"type": "scripted", "actions": [{"type": "text", "content": "done"}]}
    project = Project(tmp_path, reward_function_path="judge.py:judge", policy=policy, **rubric("It is polite."))
    async with ChatServer(fair(grades(4))) as server:
        text = JUDGE.format(model="judge", url=server.base_url)
        (tmp_path / "judge.py").write_text(text.replace("base_url=", 'cache="judge.jsonl", base_url='))
        for name in ("one", "two"):
            options = ("run", "task.yaml", "--log-dir", name)
            done = await asyncio.to_thread(project.call, *options, REWARD_KIT_RUN_SANDBOX="in_process")
            assert done.returncode == 0, done.stderr
        prompt = prompt_hash(server.bodies[0]["messages"][0]["content"])
        assert len(server.bodies) == 3, "the second run calls no model"
    cards = [json.loads(next((tmp_path / name).iterdir()).joinpath("card.json").read_text()) for name in ("one", "two")]
    judges = [(card["judge"]["models"], card["judge"]["prompt_hashes"]) for card in cards]
    assert judges == [(["judge"], [prompt])] * 2


def test_card_counts_unscored_episodes_and_repeated_attempts(tmp_path: Path) -> None:
    project = Project(tmp_path, reward_function_path="reward.py:broken", policy={"type": "scripted", "actions": []})
    project.call("run", "task.yaml", "--log-dir", "runs")
    (path,) = (tmp_path / "runs").iterdir()
    card = json.loads((path / "card.json").read_text())
    (policy,) = card["policies"].values()
    assert (policy["episodes"], policy["unscored"]) == (6, 6)
    assert sum(policy["errors"].values()) == 6
    assert card["judge"] is None
    assert len(lines(path / "episodes.jsonl")) == 6
    assert policy["sampling"] == {}, "a scripted policy has no temperature"


def test_run_of_an_earlier_release_has_a_card(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.call("run", "task.yaml", "--log-dir", "runs")
    (path,) = (tmp_path / "runs").iterdir()
    header = json.loads((path / "run.json").read_text())
    del header["policy_settings"]
    (path / "run.json").write_text(json.dumps(header))
    page = write_report(path).read_text()
    assert "Rollout card" in page and "not recorded" in page
