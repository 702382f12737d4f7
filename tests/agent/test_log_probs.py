"""Test that steps return the policy's log-probabilities, from memory and from a file."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from reward_kit.agent.models import episode_steps
from reward_kit.agent.policy_interface import PolicyOutput
from reward_kit.episodes.record import episode_from_record, episode_to_record
from tests.agent.resources import COUNTER, call, collected, text

USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
WHOLE = {"prompt_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}
SAID: dict[str, list[dict[str, Any] | None]] = {
    "nothing": [None, None],
    "everything": [
        {**WHOLE, "policy_version": 0, "usage": USAGE, "finish_reason": "stop"},
        {"prompt_ids": [1, 2, 3, 4], "token_ids": [5, 6], "logprobs": [-1.0, -2.0], "policy_version": 1},
    ],
    "no log-probabilities": [{"prompt_ids": [1], "token_ids": [2]}, None],
    "only what an endpoint reports": [{"usage": USAGE, "finish_reason": "length"}, {"usage": USAGE}],
    "a part of the tokens": [{"token_ids": [3], "logprobs": [-0.5]}, {"prompt_ids": [1, 2]}],
    "a rewritten context": [WHOLE, {**WHOLE, "prompt_ids": [9], "segment_reason": "reasoning stripped"}],
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_step_has_the_log_probs_of_the_policy(said: list[dict[str, Any] | None]) -> None:
    actions = [call(), text("done")]

    def act(*_: object) -> PolicyOutput:
        step = 2 - len(actions)
        return PolicyOutput(actions.pop(0), None, said[step])

    episode = await collected(act, resource_type=COUNTER, on_text="end")
    record = json.loads(json.dumps(episode_to_record(episode)))
    for one in (episode, episode_from_record(record)):
        assert [plain(step.policy_logprobs) for step in episode_steps(one)] == said


def plain(facts: dict[str, Any] | None) -> dict[str, Any] | None:
    return facts and {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in facts.items()}
