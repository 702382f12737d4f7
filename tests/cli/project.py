"""A small user project on disk, and the command line run on it in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests import command_line

TOOLS = """
import asyncio
from reward_kit import ToolRegistry

registry = ToolRegistry("clock")

@registry.tool
async def wait(milliseconds: int = 0) -> str:
    "Wait a while."
    await asyncio.sleep(milliseconds / 1000)
    return f"waited {milliseconds}"
"""

REWARD = """
from reward_kit import EvaluateResult, Message, StepOutput, reward_function

@reward_function
def right(messages: list[Message], ground_truth: str, assistant_turns: list[int]) -> EvaluateResult:
    steps = [StepOutput(step_index=i, base_reward=0.5) for i in range(len(assistant_turns))]
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="compared", step_outputs=steps)

@reward_function
def broken(messages, ground_truth):
    return 1 / 0
"""

TASK: dict[str, Any] = {
    "name": "clock",
    "tools_module_path": "tools.py",
    "dataset_path": "rows.jsonl",
    "num_rollouts_per_sample": 2,
    "on_text": "end",
    "reward_function_path": "reward.py:right",
    "messages": [{"role": "user", "content": "Question {{ number }}"}],
    "policy": {
        "type": "scripted",
        "actions": [{"type": "tool_call", "name": "wait", "arguments": {}}, {"type": "text", "content": "done"}],
    },
}


class Project:
    """A folder with task.yaml, rows.jsonl, tools.py and reward.py."""

    def __init__(self, folder: Path, rows: int = 3, **task: Any) -> None:
        self.folder = folder
        (folder / "tools.py").write_text(TOOLS)
        (folder / "reward.py").write_text(REWARD)
        self.write_rows([{"id": f"q{n}", "number": n, "ground_truth": "done" if n % 2 else "no"} for n in range(rows)])
        self.write_task(**task)

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_task(self, **changes: Any) -> None:
        task = {key: value for key, value in {**TASK, **changes}.items() if value is not None}
        (self.folder / "task.yaml").write_text(yaml.safe_dump(task, sort_keys=False))

    def command(self, *arguments: str) -> list[str]:
        return command_line.command(*arguments)

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "REWARD_KIT_"))}
        return {**kept, "NO_COLOR": "1", "REWARD_KIT_TRUST": "1", **variables}

    def call(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return command_line.call(*arguments, cwd=self.folder, env=self.environment(**variables))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob("*")) if (self.folder / "runs").exists() else []

    def run_path(self) -> Path:
        (path,) = self.runs()
        return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file by id, without times."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record.pop("timing")
    return sorted(records, key=lambda record: record["rollout_id"])
