"""Random complete episodes with every field that a trace can carry; needs neither torch nor verifiers."""

from __future__ import annotations

import random
from typing import Any

from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id
from reward_kit.episodes.record import EpisodeFacts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure
from reward_kit.models import FunctionCall, Message, ToolCall


def random_episode(seed: int, *, is_sound: bool = False) -> SingleAgentEpisode:
    """Text and tool calls, rewritten contexts, actions without tokens, log-probabilities or versions, odd messages.

    Args:
        seed: draws it.
        is_sound: something stands between two actions, and their log-probabilities are known.
    """
    rng = random.Random(seed)
    episode = SingleAgentEpisode(f"episode-{seed}")
    episode.add_messages([_message(rng, role) for role in _opening(rng)])
    episode.add_env_reset({"board": seed}, {"state_key": "k0"} if rng.random() < 0.5 else None)
    seen: list[int] = [rng.randrange(100) for _ in range(rng.randrange(1, 9))]
    for t in range(rng.randrange(0, 6)):
        if rng.random() < 0.3:  # the context is rewritten
            seen = [rng.randrange(100) for _ in range(rng.randrange(1, 9))]
        sampled = [rng.randrange(100) for _ in range(rng.randrange(0, 5))]
        if rng.random() < 0.85:
            known = [-rng.random() for _ in sampled] if is_sound or rng.random() < 0.8 else None
            allowed = [sorted({token, 7, 8}) if rng.random() < 0.5 else None for token in sampled]
            version, reason = rng.choice([-1, 0, 3]), rng.choice(["context rewritten", "reasoning stripped"])
            restricted = allowed if any(allowed) and rng.random() < 0.3 else None
            episode.tokens.add_turn(t, seen, sampled, known, version, reason, restricted)
            seen = [*seen, *sampled, *(rng.randrange(100) for _ in range(rng.randrange(is_sound, 4)))]
        episode.add_assistant_message(_assistant(rng, t))
        episode.add_messages([_message(rng, rng.choice(["tool", "user"])) for _ in range(rng.randrange(0, 3))])
        reward = rng.choice([None, 0.0, rng.random()])
        outputs = {"value": rng.random()} if rng.random() < 0.3 else None
        episode.add_env_step(f"seen {t}", {"type": "text", "content": str(t)}, reward, extra_model_outputs=outputs)
    _end(episode, rng)
    return episode


def _opening(rng: random.Random) -> list[str]:
    opening = ["system"] if rng.random() < 0.5 else []
    return [*opening, *(["user", "assistant"] if rng.random() < 0.2 else []), rng.choice(["user", "developer"])]


def _message(rng: random.Random, role: str) -> Message:
    fields: dict[str, Any] = {"role": role, "content": f"said {rng.randrange(4)}"}
    if rng.random() < 0.2:
        fields["content"] = [{"type": "text", "text": "look"}, {"type": "input_audio", "input_audio": {"data": "x"}}]
    if role == "tool":
        fields["tool_call_id"] = f"call-{rng.randrange(3)}"
    if rng.random() < 0.1:
        fields |= {"name": "ann", "provider_field": [1, None]}
    return Message(**fields)


def _assistant(rng: random.Random, t: int) -> Message:
    call = ToolCall(id=f"call-{t}", function=FunctionCall(name="move", arguments='{"to":  1}'))
    return Message(
        role="assistant",
        content=rng.choice([None, "", "yes"]),
        tool_calls=[call] if rng.random() < 0.5 else None,
        reasoning_content="hm" if rng.random() < 0.3 else None,
    )


def _end(episode: SingleAgentEpisode, rng: random.Random) -> None:
    stop = rng.choice(list(StopReason))
    episode.is_terminated, episode.is_truncated = stop.is_terminal, stop.is_limit
    failure = (
        Failure("timeout", "EnvironmentFailure", "it took too long").to_json() if stop is StopReason.ERROR else None
    )
    episode.custom_data.update(
        EpisodeFacts(
            sample_id="s",
            group_id=make_group_id(0, "s"),
            rollout_index=1,
            attempt=0,
            policy="tiny",
            stop_reason=stop.value,
            failure=failure,
            sample={"question": "?", "nested": {"deep": [1.5, None]}},
            ground_truth=("a", "tuple"),
        )
    )
