"""Runs of random walks through named states, with scores and credit, of any size."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reward_kit.report.run_page import write_report
from reward_kit.runs.credit import assign_credit, write_section
from reward_kit.runs.run_folder import RunFolder, RunHeader
from reward_kit.task_parts import CreditModel

GROUP = 4
WAYS = {"left": -1, "stay": 0, "right": 1}


def walk(number: int, draw: random.Random, *, steps: int = 5, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the lines of `episodes.jsonl` and `scores.jsonl` of a walk along a street; right is good."""
    name, sample, at = f"r{number:05d}", f"s{number // GROUP:04d}", 0
    messages = [{"role": "system", "content": "You walk along a street."}, {"role": "user", "content": "You are at 0."}]
    taken: list[dict[str, Any]] = []
    for step in range(steps):
        way = draw.choice(sorted(WAYS))
        call = {"id": f"c{step}", "type": "function", "function": {"name": "go", "arguments": json.dumps({"way": way})}}
        action = {"type": "tool_call", "name": "go", "arguments": {"way": way}, "id": f"c{step}"}
        taken.append({"state_key": f"at {at}", "assistant_turn": len(messages), "action": action, "reward": 0.0})
        at += WAYS[way]
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{step}", "name": "go", "content": f"You are at {at}."})
    line = {"schema_version": 1, "rollout_id": name, "sample_id": sample, "group_id": f"{sample}/walker"}
    line |= {"rollout_index": number % GROUP, "attempt": 0, "policy": "walker", "stop_reason": "max_steps"}
    line |= {"failure": None, "terminated": False, "truncated": True, "environment_return": 0.0, "num_steps": steps}
    line |= {"usage": {"prompt_tokens": 40, "completion_tokens": 9}, "messages": messages, "steps": taken}
    line |= {"final": {"observation": f"You are at {at}."}}
    line |= {"timing": {"started_at": f"2026-01-02T03:04:{5 + number % 50:02d}+00:00", "duration_s": 0.5 + number % 7}}
    value = round(max(0.0, at / steps), 3)
    result = {"score": value, "is_score_valid": True, "reason": f"it ended at {at}"}
    score = {"schema_version": 1, "rollout_id": name, "attempt": 0, "score": value, "result": result, "failure": None}
    score["timing"] = {"submitted_s": 1.0, "attempts": [[1.0, 2.0]], "done_s": 2.0, "duration_s": 1.0}
    return line | changes, score


def walks(count: int, **options: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return this many walks, equal at every call."""
    draw = random.Random(count)
    return (walk(number, draw, **options) for number in range(count))


def compared_walks(
    samples: int, policies: tuple[str, ...] = ("runner", "walker"), *, rollouts: int = 1, steps: int = 3
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return walks of several policies on equal samples; one in 17 episodes has an error and no score."""
    draw, number = random.Random(samples), 0
    for sample in range(samples):
        for policy in policies:
            for index in range(rollouts):
                group = {"sample_id": f"s{sample:05d}", "group_id": f"s{sample:05d}/{policy}", "rollout_index": index}
                line, score = walk(number, draw, steps=steps, policy=policy, **group)
                if number % 17 == 16:
                    failure = {"class": "timeout", "where": "ToolError", "message": "too slow"}
                    line, score = line | {"failure": failure, "stop_reason": "error"}, score | {"score": None}
                number += 1
                yield line, score


def write_walks(
    folder: Path, walks: Iterable[tuple[dict[str, Any], dict[str, Any]]], *, is_credited: bool = True, **header: Any
) -> Path:
    """Write the folder `walks` with these lines, without a page."""
    given = {"task_name": "walk", "status": "complete", "task": {"pass_threshold": 0.4}, **header}
    path = RunFolder.create(folder / "walks", RunHeader(**given)).path
    count = 0
    with (path / "episodes.jsonl").open("w") as episodes, (path / "scores.jsonl").open("w") as scores:
        for episode, score in walks:
            episodes.write(json.dumps(episode, separators=(",", ":")) + "\n")
            scores.write(json.dumps(score, separators=(",", ":")) + "\n")
            count += 1
    (path / "run.json").write_bytes(RunHeader.read(path).replace(total=given.get("total", count)).to_bytes())
    if is_credited:
        (path / "summary.json").write_text('{"schema_version": 1, "policies": []}')
        write_section(path, assign_credit(path, CreditModel()))
    return path


def walks_page(folder: Path, count: int, **options: Any) -> Path:
    """Write the page of a run of this many walks."""
    return write_report(write_walks(folder, walks(count, **options)))
