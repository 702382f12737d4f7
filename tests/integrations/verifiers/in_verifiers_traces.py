"""Test traces in verifiers' own classes; run in verifiers' Python by `test_verifiers.py`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.types import TurnTokens
from verifiers.v1.utils.trace_store import read_episodes

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.scoring import Scored
from reward_kit.runs.export import Selection, selected
from reward_kit.runs.logs.exporting import export_logs
from reward_kit.runs.logs.importing import import_logs
from reward_kit.runs.logs.verifiers_traces import episode_to_trace, trace_advantages, trace_score, trace_to_episode
from reward_kit.runs.run_folder import RunHeader
from tests.integrations.verifiers.episodes import random_episode
from tests.integrations.verifiers.make_verifiers_log import main as make_log
from tests.runs.stored_run import make_run, score

SEEDS = range(150)


def on_disk(trace: vf.Trace) -> vf.Trace:
    return vf.WireTrace.model_validate(trace.to_record(float_decimals=None))


def on_the_wire(trace: vf.Trace) -> vf.Trace:
    return vf.WireTrace.model_validate(msgpack.unpackb(msgpack.packb(trace.model_dump(mode="python"))))


@pytest.mark.parametrize("way", [lambda trace: trace, on_disk, on_the_wire], ids=["as it is", "on disk", "on the wire"])
def test_episode_round_trip_through_verifiers_is_exact(way) -> None:
    for seed in SEEDS:
        episode = random_episode(seed)
        assert trace_to_episode(way(vf.WireTrace.model_validate(episode_to_trace(episode)))) == episode, f"seed {seed}"


def test_trace_branches_equal_training_rows() -> None:
    for seed in SEEDS:
        rng, episode = random.Random(seed), random_episode(seed)
        given = [rng.uniform(-1, 1) for _ in range(len(episode))]
        trace = vf.WireTrace.model_validate(episode_to_trace(episode, advantages=given))
        rows = list(episode.tokens.rows())
        branches = [branch for branch in trace.branches if branch.token_ids]
        assert len(branches) == len(rows)
        for branch, row in zip(branches, rows, strict=True):
            size = len(row.prompt_ids)
            assert branch.trainable
            assert branch.token_ids == [*row.prompt_ids, *row.completion_ids]
            assert branch.sampled_mask == [False] * size + (row.action_mask == 1).tolist()
            assert branch.logprobs == [0.0] * size + np.nan_to_num(row.logprobs).tolist()
            per_token = [given[step] if step >= 0 else 0.0 for step in row.steps]
            assert (branch.advantages or [0.0] * len(branch.token_ids)) == [0.0] * size + per_token
        assert trace.num_turns == len(episode)


def test_default_record_rounds_floats_and_exact_record_does_not() -> None:
    episode = random_episode(1, is_sound=True)
    trace = vf.WireTrace.model_validate(episode_to_trace(episode))
    rounded = trace_to_episode(vf.WireTrace.model_validate(trace.to_record()))
    assert rounded != episode
    assert rounded.tokens.ids == episode.tokens.ids


def test_score_becomes_the_reward_and_missing_score_none() -> None:
    episode = random_episode(4)
    episode.custom_data["failure"] = None
    trace = vf.WireTrace.model_validate(episode_to_trace(episode, scored=Scored("x", EvaluateResult(score=0.5))))
    assert (trace.ok, trace.reward, trace_score(trace)) == (True, 0.5, 0.5)
    trace.rewards["late"] = None
    assert (trace.reward, trace_score(trace)) == (0.5, None), "verifiers leaves out what was not given"


def committed(trace: vf.Trace, prompt: list, spans: list, prompt_ids: list[int], text: str, ids: list[int]) -> None:
    """Return one turn as verifiers' training client commits it."""
    tokens = TurnTokens(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        completion_logprobs=[-0.1 * token for token in ids],
        message_spans=spans,
    )
    response = vf.Response(
        id="r", created=0, model="m", message=vf.AssistantMessage(content=text), finish_reason="stop", tokens=tokens
    )
    graph.prepare_turn(trace, prompt).commit(response)


def recorded() -> vf.Trace:
    """Return two turns of a conversation, and a third after its reasoning was dropped from the context."""
    task = {"type": "Task", "data": {"idx": 0, "prompt": "2+2?", "answer": "4"}}
    trace = vf.WireTrace.model_validate({"task": task, "agent": {"config": {"model": "m"}}, "ok": True})
    user, said = vf.UserMessage(content="2+2?"), vf.AssistantMessage(content="hm")
    more = vf.UserMessage(content="and?")
    committed(trace, [user], [(0, 3)], [1, 2, 3, 4], "hm", [5, 6])
    committed(trace, [user, said, more], [(0, 3), None, (6, 9)], [1, 2, 3, 4, 5, 6, 7, 8, 9], "4", [10])
    thrice = [user, said, more, vf.AssistantMessage(content="4"), vf.UserMessage(content="sure?")]
    committed(
        trace, thrice, [(0, 3), (3, 5), (5, 7), (7, 9), (9, 10)], [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 4], "yes", [12]
    )
    return trace


def test_verifiers_trace_becomes_an_episode_with_equal_rows() -> None:
    trace = recorded()
    episode = trace_to_episode(trace)
    assert [message.text for message in episode.messages] == ["2+2?", "hm", "and?", "4", "sure?", "yes"]
    assert list(episode.assistant_turns) == [1, 3, 5]
    _same_rows(trace, episode)
    assert episode.custom_data["ground_truth"] == "4"


def _same_rows(trace: vf.Trace, episode: SingleAgentEpisode) -> None:
    rows = list(episode.tokens.rows())
    assert len(trace.branches) == len(rows) == 2
    for branch, row in zip(trace.branches, rows, strict=True):
        assert branch.token_ids == [*row.prompt_ids, *row.completion_ids]
        assert [int(flag) for flag in branch.sampled_mask][len(row.prompt_ids) :] == row.action_mask.tolist()
        assert branch.logprobs[len(row.prompt_ids) :] == row.logprobs.tolist()


def test_imported_trace_is_exported_with_equal_branches() -> None:
    first = recorded()
    episode = trace_to_episode(first)
    again = vf.WireTrace.model_validate(episode_to_trace(episode, advantages=[1.0, None, -1.0]))
    _same_rows(again, episode)
    assert trace_advantages(again) == [[1.0, 1.0], None, [-1.0]]
    assert trace_to_episode(again) == episode


def export(run: Path, target: Path) -> None:
    results = selected(run, Selection(1.0))
    export_logs(run, RunHeader.read(run), results, "verifiers", target, is_private=False)


def test_log_of_vf_eval_is_equal_after_import_and_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vf-eval"])
    make_log(tmp_path / "traces.jsonl")
    run = import_logs([tmp_path / "traces.jsonl"], tmp_path / "runs")
    [policy] = run.policies
    assert (policy.episodes, policy.scored, policy.errors) == (10, 6, {"provider_error": 2, "invalid_result": 2})
    (tmp_path / "out").mkdir()
    export(run.path, tmp_path / "out" / "traces.jsonl")
    texts = [(folder / "traces.jsonl").read_text() for folder in (tmp_path, tmp_path / "out")]
    lines, written = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert written == lines


def test_exported_run_is_read_by_verifiers(tmp_path: Path) -> None:
    made = [random_episode(seed) for seed in range(10)]
    for episode in made:
        episode.custom_data |= {"failure": None, "stop_reason": "answered"}
    run = make_run(tmp_path, made, [score(episode.id_, 0.25) for episode in made])
    export(run, tmp_path / "traces.jsonl")
    episodes = read_episodes(tmp_path, vf.WireTrace)
    assert [(one.ok, one.traces[0].reward, one.traces[0].num_turns) for one in episodes] == [
        (True, 0.25, len(episode)) for episode in made
    ]
