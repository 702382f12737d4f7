"""Seeded random episodes as a worker collects them: token segments, states, rewards and a chat with tools."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from reward_kit.agent.models import StepData, episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.models import Message

GROUP_SIZE = 4


class Collected(NamedTuple):
    episodes: list[SingleAgentEpisode]
    steps: list[list[StepData]]
    scores: list[float | None]

    @property
    def group_ids(self) -> list[str]:
        return [episode.custom_data["group_id"] for episode in self.episodes]


def collected(seed: int, *, groups: int = 2, unscored: bool = True) -> Collected:
    """Return groups of episodes with few states; some steps have no known reward, and some episodes no score."""
    draw = random.Random(seed)
    episodes = [_episode(draw, f"r{number}", f"g{number // GROUP_SIZE}") for number in range(groups * GROUP_SIZE)]
    steps = [[step.model_copy(update=_earned(draw)) for step in episode_steps(episode)] for episode in episodes]
    scores = [None if unscored and draw.random() < 0.2 else draw.random() for _ in episodes]
    return Collected(episodes, steps, scores)


def _earned(draw: random.Random) -> dict[str, Any]:
    return {"base_reward": None if draw.random() < 0.2 else draw.random()}


def _episode(draw: random.Random, rollout_id: str, group_id: str) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(rollout_id)
    sample = {"data_source": "rooms", "extra_info": {"split": "train"}}
    episode.custom_data.update(group_id=group_id, ground_truth=["egg", 2], sample=sample, stop_reason="answered")
    episode.add_env_reset("You stand in a room.", {"state_key": "s0"})
    episode.add_messages([Message(role="user", content="Find the egg. \ud83d")])
    context: list[int] = []
    for step in range(draw.randint(1, 5)):
        context = [] if draw.random() < 0.25 else context
        context = context + [draw.randint(2, 9) for _ in range(draw.randint(0 if context else 1, 3))]
        sampled = [draw.randint(2, 9) for _ in range(draw.randint(1, 4))]
        episode.tokens.add_turn(step, context, sampled, [-draw.random() for _ in sampled], policy_version=step)
        context = context + sampled
        call = {"id": f"c{step}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        episode.add_assistant_message(Message(role="assistant", content=f"step {step}", tool_calls=[call]))
        episode.add_messages([Message(role="tool", content="a door", tool_call_id=f"c{step}")])
        infos = {"state_key": f"s{draw.randint(0, 2)}", "is_action_valid": draw.random() < 0.8}
        seen = {"text": "a door", "picture": np.arange(3, dtype=np.float32)}
        action = {"type": "tool_call", "name": "look", "arguments": {}}
        episode.add_env_step(seen, action, draw.choice([None, 0.5, float("inf")]), infos)
    episode.is_terminated = True
    return episode


def equal(a: StepData, b: StepData) -> bool:
    """Return whether two values are equal, field by field and array item by item."""
    return all(_same(getattr(a, name), getattr(b, name)) for name in StepData.model_fields)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b or (a != a and b != b))
