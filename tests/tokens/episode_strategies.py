"""Hypothesis strategies for episodes with tokens, and a reference loop that builds their rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from reward_kit.agent.models import StepData, episode_steps
from reward_kit.episodes import SingleAgentEpisode

PAD = 99


@dataclass
class PlayedEpisode:
    """An episode, its credited steps, and its turns: (what the model saw, what it sampled)."""

    episode: SingleAgentEpisode
    turns: list[tuple[list[int], list[int]]]
    steps: list[StepData] = field(default_factory=list)

    def logprob(self, t: int, n: int) -> float:
        return -(100 * t + n + 1) / 7

    def value(self, t: int, name: str) -> float:
        """Return a value of step t as stored in an array, 0 if missing."""
        return getattr(self.steps[t], name) or 0.0


def play(
    rollout_id: str, turns: list[tuple[list[int], list[int]]], values: list[dict[str, Any]] | None = None
) -> PlayedEpisode:
    """Record these turns; step t has version t. `values` are the steps' advantage, return_to_go and base_reward."""
    made = PlayedEpisode(SingleAgentEpisode(rollout_id), turns)
    made.episode.add_env_reset("o")
    for t, (prompt, sampled) in enumerate(turns):
        logprobs = [made.logprob(t, n) for n in range(len(sampled))]
        made.episode.tokens.add_turn(t, prompt, sampled, logprobs, policy_version=t)
        made.episode.add_env_step("o", {"type": "text", "content": ""}, 0.0)
    steps = episode_steps(made.episode)
    made.steps = [step.model_copy(update=new) for step, new in zip(steps, values or [{}] * len(steps), strict=True)]
    return made


TOKENS = st.lists(st.integers(0, 9), max_size=4)
NUMBERS = st.none() | st.floats(-5, 5)


@st.composite
def played(draw: st.DrawFn, rollout_id: str = "r", *, rewritten: bool = True) -> PlayedEpisode:
    """Return an episode of up to four turns; some have empty parts, or a restarted context."""
    turns: list[tuple[list[int], list[int]]] = []
    context: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        context = [] if rewritten and draw(st.booleans()) else context
        prompt, sampled = context + draw(TOKENS), draw(TOKENS)
        turns.append((prompt, sampled))
        context = prompt + sampled
    names = ("advantage", "return_to_go", "base_reward")
    return play(rollout_id, turns, [{name: draw(NUMBERS) for name in names} for _ in turns])


def batches(size: int = 4) -> st.SearchStrategy[list[PlayedEpisode]]:
    return st.integers(0, size).flatmap(lambda n: st.tuples(*(played(f"r{i}") for i in range(n)))).map(list)


KEYS = (
    *("input_ids", "completion_mask", "action_mask", "loss_mask", "logprobs", "policy_versions"),
    *("position_ids", "advantages", "returns", "step_rewards"),
)


def _observed(token: int, in_completion: bool) -> dict[str, Any]:
    zeros = dict.fromkeys(("action_mask", "loss_mask", "logprobs", "advantages", "returns", "step_rewards"), 0)
    return {**zeros, "input_ids": token, "completion_mask": int(in_completion), "policy_versions": -1}


def _sampled(made: PlayedEpisode, t: int) -> list[dict[str, Any]]:
    sampled = made.turns[t][1]
    return [
        {
            "input_ids": token,
            "completion_mask": 1,
            "action_mask": 1,
            "loss_mask": int(made.steps[t].advantage is not None),
            "logprobs": made.logprob(t, n),
            "policy_versions": t,
            "advantages": made.value(t, "advantage"),
            "returns": made.value(t, "return_to_go"),
            "step_rewards": made.value(t, "base_reward") if n == len(sampled) - 1 else 0.0,
        }
        for n, token in enumerate(sampled)
    ]


def _numbered(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**token, "position_ids": position} for position, token in enumerate(tokens)]


def looped_segments(made: PlayedEpisode) -> list[list[dict[str, Any]]]:
    """Return the rows per segment as lists of tokens, each a dict of its values."""
    rows: list[list[dict[str, Any]]] = []
    for t, (prompt, _) in enumerate(made.turns):
        stored = [token["input_ids"] for token in rows[-1]] if rows else None
        if stored is None or prompt[: len(stored)] != stored:
            rows.append([_observed(token, False) for token in prompt])
        else:
            rows[-1] += [_observed(token, True) for token in prompt[len(stored) :]]
        rows[-1] += _sampled(made, t)
    return [_numbered(row) for row in rows]


def looped_actions(made: PlayedEpisode) -> list[list[dict[str, Any]]]:
    """Return the rows per action."""
    return [
        _numbered([_observed(token, False) for token in prompt] + _sampled(made, t))
        for t, (prompt, sampled) in enumerate(made.turns)
        if sampled
    ]
