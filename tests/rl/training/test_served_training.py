"""Train a policy that a vLLM or SGLang server samples, and resume the run on a server with other weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.errors import PolicyError
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import load_plan
from reward_kit.runs.plan import Control
from tests.rl.model_server import Kind, ModelServer
from tests.rl.training.frozen_lake import interrupted_after, metrics_of, train, weights_of
from tests.rl.training.frozen_lake_text import language_lake

POLICY = "from reward_kit.rl import ServedPolicy\n\n\nclass Served(ServedPolicy):\n    pass\n"
REWARD = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def walked(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=float(sum(map(ord, messages[-1].text)) % 7))
"""


def served_lake(folder: Path, server: ModelServer, **changes: Any) -> Path:
    """Write a train file whose policy is sampled by the server."""
    policy = {"type": "policy.py:Served", "folder": "model", "published": "published", "max_tokens": 4}
    changes = {"updates": 3, "evaluation": None, "credit": {"estimator": "rloo"}, **changes}
    changes |= {"rollout": {"samples_per_update": 2, "group_size": 3}, "checkpoints": {"every": 1}}
    path = language_lake(folder, **changes)
    (folder / "policy.py").write_text(POLICY)
    (folder / "reward.py").write_text(REWARD)
    text = path.read_text()
    begin, end = text.index("policy:"), text.index("updates:")
    options = policy | {"server": server.kind, "base_url": server.base_url, "max_attempts": 1}
    path.write_text(text[:begin] + f"policy: {options}\n" + text[end:])
    return path


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_resumed_run_equals_an_uninterrupted_run(tmp_path: Path, kind: Kind) -> None:
    runs, labels = list[Path](), list[list[str]]()
    for name in ("straight", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        language_lake(folder)
        async with ModelServer(folder / "model", kind) as server:
            plan = load_plan(served_lake(folder, server))
            if name == "stopped":
                stopped = await train(plan, folder / "run", interrupted_after(1))
                assert (stopped.status, stopped.summary["updates"]) == ("interrupted", 1)
                await server.restart()
            assert (await train(plan, folder / "run")).status == "complete"
            runs.append(folder / "run")
            labels.append(server.sampled_by)
    assert labels[0] == labels[1] == sorted(labels[0])
    assert set(labels[0]) == {"0", "1", "2"}
    metrics = [metrics_of(run) for run in runs]
    assert len(metrics[0]) == len(metrics[1]) == 3
    for one, other in zip(*metrics, strict=True):
        # The trainer computes the same log-probabilities as the server, so the server has its weights.
        assert one["learner/logprob_gap"] < 1e-4 and one["learner/lag_mean"] == 0.0
        assert other["score/mean"] == pytest.approx(one["score/mean"])
    assert metrics[0][0]["learner/grad_norm"] > 0.0
    straight, resumed = map(weights_of, runs)
    for key, weight in straight.items():
        torch.testing.assert_close(resumed[key], weight)


async def test_recorded_versions_are_those_that_sampled_the_turns(tmp_path: Path) -> None:
    """While an update trains, the next episodes are sampled with the weights before it."""
    language_lake(tmp_path)
    async with ModelServer(tmp_path / "model", "sglang") as server:
        path = served_lake(tmp_path, server, pipeline="one_step_off", updates=4, logs={"episodes_every": 1})
        assert (await train(load_plan(path), tmp_path / "run")).status == "complete"
        recorded: Counter[int | None] = Counter()
        for file in sorted((tmp_path / "run" / "episodes").iterdir()):
            for line in file.read_text().splitlines():
                turns = EpisodeTokens.from_state(json.loads(line)["tokens"]).turns()
                recorded.update(turn.policy_version for turn in turns.values())
        assert recorded == Counter(map(int, server.sampled_by))
        assert len(recorded) > 1


async def test_failed_publication_ends_the_run_and_a_resumed_run_completes(tmp_path: Path) -> None:
    language_lake(tmp_path)
    async with ModelServer(tmp_path / "model", "vllm") as server:
        plan = load_plan(served_lake(tmp_path, server))

        @asynccontextmanager
        async def dies_in_second_update(control: Control, display: TrainingDisplay) -> AsyncIterator[None]:
            updated = display.updated

            def and_break(figures: Any, progress: Any) -> None:
                updated(figures, progress)
                server.dies_at = "/reset_prefix_cache"

            display.updated = and_break  # type: ignore[method-assign]
            yield

        with pytest.raises(PolicyError, match=r"version 2 was not published: .*; the server is paused"):
            await train(plan, tmp_path / "run", dies_in_second_update)
        assert server.label == "loading-2" and set(server.sampled_by) == {"0", "1"}
        server.dies_at = ""
        assert (await train(plan, tmp_path / "run")).status == "complete"
        assert server.sampled_by == sorted(server.sampled_by) and set(server.sampled_by) == {"0", "1", "2"}
