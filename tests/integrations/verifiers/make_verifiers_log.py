"""Make the fixture `tests/runs/logs/verifiers_traces.jsonl` with `vf-eval` of verifiers itself and a local endpoint.

Run it in verifiers' Python from the root of the repository:

    PYTHONPATH=$PWD:$PWD/tests/integrations/verifiers .integrations/verifiers/bin/python \
        tests/integrations/verifiers/make_verifiers_log.py tests/runs/logs/verifiers_traces.jsonl

The log has tool calls, two rollouts of each task, weighted rewards, a metric, a stop condition, a cut answer, and
errors of the endpoint and of a reward.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.cli.eval.main import main as vf_eval

from tests.chat_server import Behavior, ChatServer, answer, status, tool_calls

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str
    level: int


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, x: int, y: int) -> str:
        """Add two numbers."""
        return str(x + y)


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, task: SumData, trace: vf.Trace) -> float:
        if "broken" in str(task.name):
            raise ValueError("the answer cannot be judged")
        return float(task.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))

    @vf.stop
    async def turn_limit(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 4)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for index, name in enumerate(("sum", "endless", "cut", "fail", "broken")):
            prompt = [vf.SystemMessage(content="Use add."), vf.UserMessage(content=f"{name}: {index} + 3?")]
            data = SumData(idx=index, name=name, prompt=prompt, answer=str(index + 3), level=index)
            yield SumTask(data, self.config.task)


def reply(body: dict[str, Any]) -> Behavior:
    """Return the answer of the endpoint, which depends on the task and on the number of messages."""
    top, messages = {"created": 0}, body["messages"]
    name, number = next(m["content"] for m in messages if m["role"] == "user").partition(":")[0], len(messages)
    if name == "fail":
        return status(400, text="this prompt is not allowed")
    if name == "cut":
        return answer("The sum of the two numbers", finish_reason="length", top=top)
    if name == "endless" or number == 2:
        thought = {"reasoning_content": "add helps"}
        return tool_calls(
            [("add", {"x": 0, "y": 3}), ("add", {"x": number, "y": 1})], "I add.", message=thought, top=top
        )
    return answer(f"It is {messages[-2]['content']}.", top=top)


def main(target: Path) -> None:
    """Write the log."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    server = ChatServer(reply)

    async def serve() -> None:
        async with server:
            started.set()
            await asyncio.Event().wait()

    threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True).start()
    started.wait(30)
    os.environ["NO_KEY"] = "none"
    with tempfile.TemporaryDirectory() as folder:
        options = [
            Path(__file__).stem,
            "--env.agent.harness.id",
            "chat_harness",
            "--env.agent.runtime.type",
            "subprocess",
        ]
        options += ["--client.base-url", server.base_url, "--client.api-key-var", "NO_KEY", "--model", "tiny"]
        options += ["--num-rollouts", "2", "--max-concurrent", "1", "--no-push", "--no-rich"]
        vf_eval([*options, "--output-dir", folder, "--run.name", "sums"])
        text = (Path(folder) / "sums" / "traces.jsonl").read_text()
    text = text.replace(server.base_url, "http://127.0.0.1:8000/v1").replace(str(Path.home()), "/home/user")
    target.write_text(text.replace(str(Path(__file__).parents[3]), "/home/user/reward-kit"))


if __name__ == "__main__":
    if "VF_CONFIG" in os.environ:  # started by verifiers to serve the tools
        Adder.run()
    else:
        main(Path(sys.argv[1]))
