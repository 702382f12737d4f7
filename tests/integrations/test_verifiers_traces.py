"""Test episodes as verifiers traces and back, without the package; tests with it are in `verifiers/`."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from reward_kit.agent.models import StopReason
from reward_kit.checks.rows import check_verifiers_trace
from reward_kit.episodes.record import get_facts
from reward_kit.episodes.segments import TokenRow
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, Failure
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_agent.scoring import Scored
from reward_kit.runs.logs.verifiers_traces import episode_to_trace, trace_advantages, trace_score, trace_to_episode
from tests.integrations.verifiers.episodes import random_episode

SEEDS = range(300)


def path_to(nodes: list[dict[str, Any]], leaf: int) -> list[dict[str, Any]]:
    path, place = [], leaf
    while place is not None:
        path.append(nodes[place])
        place = nodes[place]["parent"]
    return path[::-1]


def branches(nodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the paths from the root to each leaf."""
    parents = {node["parent"] for node in nodes}
    return [path_to(nodes, leaf) for leaf in range(len(nodes)) if leaf not in parents]


def test_episode_trace_round_trip_is_exact() -> None:
    rewritten = with_odd = 0
    for seed in SEEDS:
        episode = random_episode(seed)
        trace = json.loads(json.dumps(episode_to_trace(episode), allow_nan=False))
        back = trace_to_episode(trace)
        assert back == episode, f"seed {seed}"
        assert back.get_state()["tokens"] == episode.tokens.get_state()
        rewritten += len(episode.tokens.segments) > 1
        with_odd += bool(trace["info"]["reward_kit"]["messages"])
    assert rewritten > 50 and with_odd > 50, "the cases show what they are for"


def test_each_branch_is_a_training_row() -> None:
    for seed in SEEDS:
        episode = random_episode(seed)
        rows = list(episode.tokens.rows())
        paths = [
            path for path in branches(episode_to_trace(episode)["nodes"]) if any(node.get("token_ids") for node in path)
        ]
        assert len(paths) == len(rows)
        for path, row in zip(paths, rows, strict=True):
            _same_row(path, row)
        assert len({id(path[0]) for path in paths}) <= 1, "what stands before all tokens is shared"


def _same_row(path: list[dict[str, Any]], row: TokenRow) -> None:
    ids = [token for node in path for token in node.get("token_ids", ())]
    mask = [int(flag) for node in path for flag in node.get("mask", ())]
    assert ids == [*row.prompt_ids, *row.completion_ids]
    assert mask == [0] * len(row.prompt_ids) + row.action_mask.tolist()
    known = [value for node in path for value in node.get("logprobs", ())]
    sampled = row.logprobs[row.action_mask == 1]
    assert known == sampled[~np.isnan(sampled)].tolist()


def test_trace_checker_finds_no_errors() -> None:
    for seed in SEEDS:
        findings = check_verifiers_trace(episode_to_trace(random_episode(seed, is_sound=True)))
        assert [finding for finding in findings if finding.level == "error"] == []


def test_every_action_is_sampled_once_and_keeps_its_advantage() -> None:
    for seed in SEEDS:
        rng, episode = random.Random(seed), random_episode(seed)
        given = [rng.choice([None, rng.uniform(-1, 1)]) for _ in range(len(episode))]
        trace = episode_to_trace(episode, advantages=given)
        found = trace_advantages(trace)
        assert len(found) == len(episode) == sum(node["sampled"] for node in trace["nodes"])
        turns = episode.tokens.turns()
        for step, (value, tokens) in enumerate(zip(given, found, strict=True)):
            size = len(turns[step].token_ids) if step in turns else None
            assert tokens == (None if value is None or size is None else [value] * size)


def spoken(*roles: str) -> SingleAgentEpisode:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset("")
    for role in roles:
        message = Message(role=role, content=role)  # type: ignore[arg-type]
        if role == "assistant":
            episode.add_assistant_message(message)
            episode.add_env_step("", {"type": "text", "content": ""}, None)
        else:
            episode.add_messages([message])
    return episode


def test_token_advantages_are_placed_at_their_tokens() -> None:
    episode = spoken("user", "assistant")
    episode.tokens.add_turn(0, [1, 2], [3, 4, 5])
    trace = episode_to_trace(episode, advantages=[[0.1, 0.2, 0.3]])
    assert trace_advantages(trace) == [[0.1, 0.2, 0.3]]
    for wrong in ([0.1, 0.2], float("nan")):
        with pytest.raises(EpisodeError, match="step 0: 3 tokens require one finite advantage, or 3 of them, got"):
            episode_to_trace(episode, advantages=[wrong])
    with pytest.raises(EpisodeError, match="got 2 advantages for 1 steps"):
        episode_to_trace(episode, advantages=[0.0, 0.0])


def test_unscored_episode_is_not_rewarded_zero() -> None:
    episode = spoken("user", "assistant")
    metric = MetricResult(score=0.5, reason="half")
    metrics = {"good": metric, "bad": metric.model_copy(update={"is_score_valid": False})}
    trace = episode_to_trace(episode, scored=Scored("e", EvaluateResult(score=0.25, metrics=metrics)))
    assert (trace["ok"], trace["rewards"]) == (True, {"reward": {"score": 0.25, "weight": 1.0}})
    assert trace["metrics"] == {"good": 0.5, "bad": None}
    assert trace_score(trace) == 0.25
    trace = episode_to_trace(episode, scored=Scored("e", None, Failure("timeout", "DeadlineError", "too late")))
    assert (trace["ok"], trace["rewards"]) == (False, {"reward": None})
    assert trace["errors"] == [{"type": "DeadlineError", "message": "timeout: too late"}]
    assert trace_score(trace) is None
    assert trace_score(episode_to_trace(episode)) is None, "the episode is unscored"
    assert trace_to_episode(trace) == episode, "a score is joined to an episode, and no part of it"


@pytest.mark.parametrize(
    ("stop", "told"), [("max_steps", "max_turns"), ("wall_time_limit", "agent_timeout"), ("answered", "answered")]
)
def test_trace_stop_condition_matches_verifiers(stop: str, told: str) -> None:
    episode = spoken("user", "assistant")
    episode.custom_data["stop_reason"] = stop
    trace = episode_to_trace(episode)
    assert (trace["stop_condition"], trace["is_timeout"]) == (told, told == "agent_timeout")


def test_trace_is_marked_truncated_at_every_limit() -> None:
    episode = spoken("user", "assistant")
    for reason in StopReason:
        episode.custom_data["stop_reason"] = reason.value
        condition = episode_to_trace(episode)["stop_condition"]
        cut_off = ("max_turns", "max_total_tokens", "max_output_tokens", "agent_timeout")
        assert (condition in cut_off) == reason.is_limit


def test_episode_without_a_valid_trace_is_rejected() -> None:
    episode = spoken("user", "assistant")
    episode.tokens.add_turn(0, [1], [2], [float("-inf")])
    with pytest.raises(
        EpisodeError, match="step 0: a trace must have a finite log-probability for every sampled token"
    ):
        episode_to_trace(episode)
    with pytest.raises(EpisodeError, match="a chunk cannot be converted to a trace; join the chunks"):
        episode_to_trace(random_episode(3)[1:])
    episode = spoken("user", "assistant")
    episode.tokens.add_turn(1, [1], [2])
    with pytest.raises(EpisodeError, match="step 1 has tokens but no message"):
        episode_to_trace(episode)
    episode = spoken("user", "assistant")
    episode.tokens.add_turn(0, [1], [2])
    episode.tokens.ids.append(3)
    episode.tokens.logprobs.append(0.0)
    with pytest.raises(EpisodeError, match="there are tokens after the last action of a segment"):
        episode_to_trace(episode)
    for wrong in ({}, 3, {"trajectory": []}):
        with pytest.raises(EpisodeError, match="a verifiers v1 trace must have nodes"):
            trace_to_episode(wrong)


def test_modified_trace_is_rejected() -> None:
    trace = episode_to_trace(spoken("user", "assistant", "user"))
    trace["nodes"][2]["sampled"] = True
    with pytest.raises(EpisodeError, match=r"of its model messages are \[1, 2\], but they were \[1\]"):
        trace_to_episode(trace)


def node(parent: int | None, role: str, text: str, *, sampled: bool = False, **more: Any) -> dict[str, Any]:
    message = {"role": role, "content": text, **({"tool_call_id": "c"} if role == "tool" else {})}
    return {"parent": parent, "message": message, "sampled": sampled, **more}


def foreign(nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    task = {"type": "Task", "data": {"idx": 3, "answer": "4"}, "key": "k"}
    return {"id": "t", "task": task, "agent": {"config": {"model": "m"}}, "nodes": nodes, "ok": True, **more}


def sampled(parent: int, text: str, ids: list[int], mask: list[bool], logprobs: list[float]) -> dict[str, Any]:
    return node(parent, "assistant", text, sampled=True, token_ids=ids, mask=mask, logprobs=logprobs)


def test_foreign_trace_becomes_an_episode_of_the_sampled_turns() -> None:
    nodes = [
        node(None, "user", "2+2?", token_ids=[1, 2], mask=[False, False]),
        node(0, "assistant", "an example"),
        sampled(1, "let me see", [3, 4, 5], [False, True, True], [-0.1, -0.2]),
        node(2, "tool", "four", token_ids=[6], mask=[False]),
        sampled(3, "4", [7, 8], [False, True], [-0.3]),
    ]
    episode = trace_to_episode(foreign(nodes))
    assert [message.text for message in episode.messages] == ["2+2?", "an example", "let me see", "four", "4"]
    assert list(episode.assistant_turns) == [2, 4]
    assert episode.get_observations() == ["2+2?\nan example", "four", ""]
    assert episode.environment_rewards() == [None, None]
    (row,) = episode.tokens.rows()
    assert row.prompt_ids.tolist() == [1, 2, 3]
    assert row.completion_ids.tolist() == [4, 5, 6, 7, 8]
    assert row.action_mask.tolist() == [1, 1, 0, 0, 1]
    assert row.logprobs.tolist() == [-0.1, -0.2, 0.0, 0.0, -0.3]
    facts = get_facts(episode)
    assert (facts["sample_id"], facts["ground_truth"], facts["policy"], facts["stop_reason"]) == (
        "3",
        "4",
        "m",
        "recorded",
    )
    assert episode.is_terminated


def test_rewritten_context_repeats_only_new_messages() -> None:
    first = [node(None, "system", "s"), node(0, "user", "u"), sampled(1, "a", [1, 2], [False, True], [-0.5])]
    second = [
        node(1, "assistant", "a"),  # without its reasoning
        node(3, "user", "go on"),
        sampled(4, "b", [1, 9], [False, True], [-0.6]),
    ]
    compacted = [node(0, "user", "a summary"), sampled(6, "c", [5], [True], [-0.7])]
    episode = trace_to_episode(foreign([*first, *second, *compacted]))
    assert [message.text for message in episode.messages] == ["s", "u", "a", "go on", "b", "a summary", "c"]
    assert list(episode.assistant_turns) == [2, 4, 6]
    assert [segment.start for segment in episode.tokens.segments] == [0, 2, 4]


ENDS = {
    "max_turns": ({"stop_condition": "max_turns"}, StopReason.MAX_STEPS, None),
    "length": ({"calls": [{"finish_reason": "length"}]}, StopReason.OUTPUT_LIMIT, None),
    "provider": (
        {"ok": False, "errors": [{"type": "ProviderError", "message": "503"}]},
        StopReason.ERROR,
        ("provider_error", "ProviderError", "verifiers: 503"),
    ),
    "scoring": (
        {"ok": False, "errors": [{"type": "TaskError", "message": "boom"}], "rewards": {"r": None}},
        StopReason.RECORDED,
        None,
    ),
}


@pytest.mark.parametrize(("more", "stop", "failure"), ENDS.values(), ids=ENDS)
def test_foreign_stop_condition_is_mapped(more: dict[str, Any], stop: StopReason, failure: Any) -> None:
    nodes = [node(None, "user", "u"), sampled(0, "a", [1], [True], [-0.1])]
    episode = trace_to_episode(foreign(nodes, **more))
    facts = get_facts(episode)
    assert facts["stop_reason"] == stop
    assert (episode.is_terminated, episode.is_truncated) == (stop.is_terminal, not stop.is_terminal)
    recorded = facts["failure"]
    assert (recorded and (recorded["class"], recorded["where"], recorded["message"])) == failure


def test_multi_agent_trace_is_rejected() -> None:
    link = {"node": 0, "type": "subagent_return"}
    nodes = [node(None, "user", "u"), {**node(0, "user", "found"), "semantic_parents": [link]}]
    with pytest.raises(EpisodeError, match="node 1 of the trace belongs to a different agent"):
        trace_to_episode(foreign(nodes))
    holes = [node(None, "user", "u"), sampled(0, "a", [1, 2, 3], [True, False, True], [-0.1, -0.2])]
    with pytest.raises(EpisodeError, match="node 1 of the trace: its sampled tokens are not contiguous"):
        trace_to_episode(foreign(holes))
