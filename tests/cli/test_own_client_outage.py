"""Test an outage of the endpoint that a custom policy asks with its own client, from the command line."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from tests.chat_server import Behavior, ChatServer, answer, status
from tests.cli.project import Project

POLICY = """
import os

import openai
from reward_kit import AgentPolicy, PolicyOutput
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION


class Asking(AgentPolicy):
    def __init__(self):
        self.client = openai.AsyncOpenAI(base_url=os.environ["MODEL_URL"], api_key="k", max_retries=0)

    async def get_action(self, observation, available_tools_specs=None):
        CURRENT_PROVIDER_SESSION.get().outage_time_s = 2.0  # instead of ten minutes
        messages = [message.to_chat() for message in observation]
        done = await self.client.chat.completions.create(model="m", messages=messages)
        return PolicyOutput.from_chat_completion(done)

    async def close(self):
        await self.client.close()
"""


async def test_run_stops_in_an_outage_and_resumes_finish_it(tmp_path: Path) -> None:
    project = Project(tmp_path, rows=8, num_rollouts_per_sample=1, policy="policy.py:Asking", tools_module_path=None)
    (tmp_path / "policy.py").write_text(POLICY)
    asked = 0

    def goes_down(_: dict[str, Any]) -> Behavior:
        nonlocal asked
        asked += 1
        return answer("done") if asked in (2, 3) else status(503)

    async with ChatServer(goes_down) as server:
        port, url = server.port, server.base_url
        first = await asyncio.to_thread(project.call, "run", "task.yaml", "--max-concurrency", "2", MODEL_URL=url)
    run = project.run_path()
    assert first.returncode == 3 and "HTTP 503" in first.stderr, first.stderr
    assert f"2 of 8 episodes are complete.\nWritten to runs/{run.name}" in first.stderr

    async with ChatServer([status(400), *[answer("done")] * 5], port):  # one request is refused for good
        rest = await asyncio.to_thread(project.call, "run", "--resume", MODEL_URL=url)
    assert rest.returncode == 0 and re.search(r"errors +provider_error 1", rest.stdout), rest.stdout

    async with ChatServer([answer("done")], port) as server:
        last = await asyncio.to_thread(project.call, "run", "--resume", "--only-failed", MODEL_URL=url)
    assert last.returncode == 0 and re.search(r"errors +0 ", last.stdout), last.stdout
    assert len(server.requests) == 1 and "8/8" in last.stderr
    assert not [file for file in run.rglob("*.jsonl") if '"crash"' in file.read_text()]
