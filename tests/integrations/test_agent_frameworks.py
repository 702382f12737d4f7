"""Test that agents written with other frameworks run unchanged in their own Python and yield complete episodes.

`make integrations` installs the frameworks into `.integrations/agents`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reward_kit import RLRolloutWorker, TaskDefinitionModel
from reward_kit.agent.policies.own_agent_policy import AgentTask, OwnAgentPolicy
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from tests.agent.resources import failure, reason
from tests.chat_server import Behavior, ChatServer, answer

pytestmark = pytest.mark.campaign

PYTHON = Path(__file__).parents[2] / ".integrations/agents/bin/python"
SCRIPTS = Path(__file__).parent / "agents"
TASK = TaskDefinitionModel(name="shop", initial_user_prompt="What do bread and milk cost?")


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    if not PYTHON.exists():
        pytest.skip("the agent frameworks are not installed; run `make integrations`")


def foreign(script: str, mode: str) -> Any:
    """Adapter: start the program with the address and wait for its output."""

    async def agent(task: AgentTask, base_url: str) -> str:
        program = await asyncio.create_subprocess_exec(
            PYTHON, SCRIPTS / script, task.prompt, base_url, mode, stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await program.communicate()
        finally:
            if program.returncode is None:  # the episode is over before the program is
                program.kill()
                await program.wait()
        assert program.returncode == 0
        return output.decode()

    return agent


def reply(prompt: list[int], sampled: list[int], text: str | None = None, **calls: str) -> Behavior:
    """Return an answer with token ids that calls `price_of`; `calls` are ids and articles."""
    entries = [{"token": f"t{token}", "logprob": -0.25, "top_logprobs": []} for token in sampled]
    choice = {"token_ids": sampled, "logprobs": {"content": entries}}
    made = [
        {"id": call_id, "type": "function", "function": {"name": "price_of", "arguments": f'{{"article":"{article}"}}'}}
        for call_id, article in calls.items()
    ]
    reason = "tool_calls" if calls else "stop"
    message = {"tool_calls": made} if calls else {}
    return answer(text, message=message, choice=choice, top={"prompt_token_ids": prompt}, finish_reason=reason)


SCRIPT = [
    reply([1, 2], [10, 11], a1="bread", a2="milk"),
    reply([1, 2, 10, 11, 5, 6], [12], a3="caviar"),
    reply([1, 2, 10, 11, 5, 6, 12, 7], [13, 14], "Bread 2.50, milk 1.20."),
]


async def collect(agent: Any, **fields: Any) -> tuple[SingleAgentEpisode, ChatServer]:
    async with ChatServer(SCRIPT) as server:
        policy = OwnAgentPolicy(
            agent, "real", base_url=server.base_url, api_key="k", logprobs=True, extra_body={"return_token_ids": True}
        )
        try:
            worker = RLRolloutWorker(TASK.model_copy(update=fields), policy)
            return await worker.collect_episode(seed=1), server
        finally:
            await policy.close()


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("script", ["openai_agents_clerk.py", "pydantic_ai_clerk.py"])
async def test_framework_agent_yields_a_complete_episode(script: str, mode: str) -> None:
    episode, server = await collect(foreign(script, mode))
    assert failure(episode) is None and reason(episode) == "answered"
    assert [(message.role, message.text) for message in episode.messages] == [
        ("system", "You sell things."),
        ("user", "What do bread and milk cost?"),
        ("assistant", ""),
        ("tool", "2.50 EUR"),
        ("tool", "1.20 EUR"),
        ("assistant", ""),
        ("tool", "unknown"),
        ("assistant", "Bread 2.50, milk 1.20."),
    ]
    assert [message.tool_call_id for message in episode.messages[3:7]] == ["a1", "a2", None, "a3"]
    assert [action["type"] for action in episode.get_actions()] == ["tool_calls", "tool_call", "text"]
    (row,) = episode.tokens.rows()
    assert row.completion_ids.tolist() == [10, 11, 5, 6, 12, 7, 13, 14]
    assert row.action_mask.tolist() == [1, 1, 0, 0, 1, 0, 1, 1]
    assert row.logprobs.tolist() == [-0.25, -0.25, 0.0, 0.0, -0.25, 0.0, -0.25, -0.25]
    assert "prompt_messages" not in episode.extra_model_outputs
    for body in server.bodies:
        assert body["model"] == "real" and body["tools"][0]["function"]["name"] == "price_of"


@pytest.mark.parametrize("script", ["openai_agents_clerk.py", "pydantic_ai_clerk.py"])
async def test_step_limit_applies_to_a_framework_agent(script: str) -> None:
    episode, server = await collect(foreign(script, "whole"), max_episode_steps=2)
    assert (reason(episode), failure(episode), len(episode), len(server.requests)) == ("max_steps", None, 2, 2)
    assert episode.messages[-1].text == "unknown"
