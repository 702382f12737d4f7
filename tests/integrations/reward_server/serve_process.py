"""`reward-kit serve` in a separate process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.command_line import command
from tests.integrations.reward_server.running_server import KEY, RawClient

REWARDS = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def exact(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="compared")

@reward_function(mode="batch")
def longest(rollouts_messages, ground_truths=None):
    lengths = [sum(len(message.text) for message in messages) for messages in rollouts_messages]
    return [{"score": length / max([1, *lengths])} for length in lengths]

@reward_function
def scaled(messages, factor: float = 1.0):
    return {"score": factor}

@reward_function
def sees_everything(messages, **given):
    return {"score": 0.5, "reason": repr(sorted(given))}
"""


class Command(NamedTuple):
    """A server in a separate process; `said` is its standard error."""

    process: subprocess.Popen[str]
    asker: RawClient
    said: Path


@contextmanager
def serve(folder: Path, *arguments: str, **variables: str) -> Iterator[Command]:
    """Start `reward-kit serve` with these arguments and wait for its address ("" if it prints none)."""
    (folder / "rewards.py").write_text(REWARDS)
    with (
        (folder / "said.txt").open("w") as said,
        subprocess.Popen(
            command("serve", *arguments),
            cwd=folder,
            env=environment({"REWARD_KIT_SERVE_API_KEY": KEY, "REWARD_KIT_SERVE_PORT": "0", **variables}),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield Command(process, RawClient(process.stdout.readline().strip()), folder / "said.txt")
        finally:
            process.kill()


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without reward-kit's variables, plus these; empty ones are unset."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REWARD_KIT_")}
    kept["REWARD_KIT_TRUST"] = "1"
    return {name: value for name, value in {**kept, "NO_COLOR": "1", **variables}.items() if value}
