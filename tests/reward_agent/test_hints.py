"""Hints in error messages of sandboxed rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import Scored, check_parameters

CHAT = [Message(role="user", content="2+2?"), Message(role="assistant", content="4")]
REWARDS = """
import os, socket, subprocess
from pathlib import Path
from reward_kit import EvaluateResult, Message, reward_function
from reward_kit.rewards import exact_answer, gate, llm_judge, python_code, weighted

def network():
    socket.create_connection(("127.0.0.1", 9), 1)

def process():
    subprocess.run(["ls"])

def variable():
    os.environ["TOKEN_OF_MINE"]

def relative():
    open("words.txt")

def beside():
    assert (Path(__file__).parent / "words.txt").read_text() == "some"

@reward_function
def tries(messages: list[Message], ground_truth: str) -> EvaluateResult:
    globals()[ground_truth]()
    return EvaluateResult(score=1.0, reason="went")

@reward_function
def compares(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="compared")

@reward_function
def does_without(messages: list[Message], ground_truth: str | None) -> EvaluateResult:
    return EvaluateResult(score=0.5, reason=f"{ground_truth}")

@reward_function(mode="batch")
def ranks(rollouts_messages: list[list[Message]], ground_truths: list[str]) -> list[EvaluateResult]:
    return [EvaluateResult(score=1.0, reason=truth.upper()) for truth in ground_truths]

@reward_function
def optioned(messages: list[Message], *, model: str) -> EvaluateResult:
    return EvaluateResult(score=1.0, reason=model)

judged = weighted(judge=gate(exact_answer, llm_judge))
coded = weighted(code=(python_code, 0.5), answer=(exact_answer, 0.5))
"""


def load(folder: Path, name: str, level: str = "warm", **choice: object):
    (folder / "reward.py").write_text(REWARDS)
    return load_reward(f"reward.py:{name}", folder, SandboxChoice(level=level, **choice)).reward


def scores(reward, *truths: str | None) -> list[Scored]:
    requests = [ScoringRequest(f"r{n}", CHAT, truth) for n, truth in enumerate(truths)]

    async def run() -> list[Scored]:
        async with make_scorer(reward) as scorer:
            return await scorer.score_group(requests)

    return asyncio.run(run())


def test_sandbox_errors_hint_at_the_missing_permission(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_MINE", "x")
    (tmp_path / "words.txt").write_text("some")
    reward = load(tmp_path, "tries", read_paths=("words.txt",))
    network, process, variable, relative, beside = scores(
        reward, "network", "process", "variable", "relative", "beside"
    )
    for scored in (network, process):
        assert "the sandbox has no network and starts no processes" in scored.failure.message
        assert "--sandbox in_process" in scored.failure.message
    assert "your environment variables are not set" in variable.failure.message
    assert "Path(__file__).parent / 'words.txt'" in relative.failure.message
    assert beside.score == 1.0, beside.failure  # what the hint says to do works


@pytest.mark.parametrize("level", ["warm", "isolated"])
@pytest.mark.parametrize("name", ["judged", "coded"])
def test_combination_with_network_access_is_rejected_at_loading(tmp_path, name, level):
    with pytest.raises(ConfigError, match=rf"at the level {level}; run it with --sandbox in_process"):
        load(tmp_path, name, level)


@pytest.mark.parametrize("level", ["in_process", "warm"])
def test_missing_ground_truth_is_reported(tmp_path, level):
    lacks, right = scores(load(tmp_path, "compares", level), None, "4")
    assert right.score == 1.0
    assert lacks.score is None
    assert "'compares' requires a ground_truth, but the sample has none" in lacks.failure.message
    assert scores(load(tmp_path, "does_without", level), None)[0].score == 0.5
    lacks, right = scores(load(tmp_path, "ranks", level), None, "x")
    assert lacks.score is None and "requires a ground_truth" in lacks.failure.message
    assert right.result.reason == "X"


@pytest.mark.parametrize("level", ["in_process", "warm"])
def test_unknown_parameter_error_suggests_an_option(tmp_path, level):
    with pytest.raises(ConfigError, match=r"-O model=…, or reward_options: \{model: …\}"):
        check_parameters(load(tmp_path, "optioned", level))
