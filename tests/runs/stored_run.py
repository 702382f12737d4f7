"""Small handwritten runs on disk: episodes through named states, and scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward_kit.episodes import SingleAgentEpisode
from reward_kit.models import Message
from reward_kit.runs.run_folder import RunFolder, RunHeader


def episode(rollout_id: str, states: Sequence[str | None], group: str = "g", index: int = 0) -> SingleAgentEpisode:
    """Return an episode through these states; each observation is "at STATE", with a long conversation."""
    made = SingleAgentEpisode(rollout_id)
    shown = [f"at {state}" for state in states]
    made.messages.append(Message(role="user", content=shown[0]))
    made.add_env_reset(shown[0], {"state_key": states[0]} if states[0] else {})
    for t, state in enumerate([*states[1:], "end"]):
        made.assistant_turns.extend([len(made.messages)])
        made.messages.append(Message(role="assistant", content="word " * 50))
        seen = shown[t + 1] if t + 1 < len(shown) else "the end"
        made.messages.append(Message(role="user", content=seen))
        info: dict[str, Any] = {"tools": [{"name": "go"}], "is_action_valid": t > 0}
        info |= {"state_key": state} if state else {}
        is_last = t == len(states) - 1
        made.add_env_step(seen, {"type": "text", "content": f"{rollout_id}.{t}"}, 0.0, info, terminated=is_last)
    made.custom_data.update(sample_id="x", group_id=group, rollout_index=index, attempt=0, policy="p", failure=None)
    made.custom_data["stop_reason"] = "answered"
    return made


def score(rollout_id: str, value: float | None, attempt: int = 0, **rewards: float) -> dict[str, Any]:
    """`score("a", 1.0, s0=0.5)`: a line of `scores.jsonl` that gives step 0 the reward 0.5."""
    outputs = [{"step_index": int(name[1:]), "base_reward": reward} for name, reward in rewards.items()]
    failure = None if value is not None else {"class": "crash", "where": "RewardError", "message": "it broke"}
    result = {"score": value, "step_outputs": outputs or None} if value is not None else None
    return {"rollout_id": rollout_id, "attempt": attempt, "score": value, "result": result, "failure": failure}


def make_run(
    folder: Path, episodes: Sequence[SingleAgentEpisode], scores: Sequence[dict[str, Any]], **task: Any
) -> Path:
    """Write the folder `run` with these lines, of a task with these keys."""
    store = RunFolder.create(folder / "run", RunHeader(task_name="t", total=len(episodes), task=task))
    with store:
        for one in episodes:
            store.append_episode(one)
        for record in scores:
            store.append_score(record)
    store.write_summary({"schema_version": 1, "policies": []})
    return store.path
