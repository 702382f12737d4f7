"""Test a run with an LLM judge as its reward, recorded and replayed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.chat_server import ChatServer
from tests.cli.project import Project, lines
from tests.rewards.judges import data_block, fair, grades

REWARD = """
from reward_kit import with_options
from reward_kit.rewards import llm_judge

judge = with_options(llm_judge, model="judge", base_url="{url}")
"""


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
