"""Test that agents of other frameworks and command-line agents run unchanged and yield complete episodes.

`make test-integrations` installs the frameworks into `.integrations/agents`, and the command-line agents with npm.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from reward_kit import RLRolloutWorker, TaskDefinitionModel
from reward_kit.agent.policies.own_agent_policy import AgentTask, OwnAgentPolicy
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from tests.agent.resources import failure, reason
from tests.chat_server import Behavior, ChatServer, Script, answer, tool_calls

pytestmark = pytest.mark.campaign

PYTHON = Path(__file__).parents[2] / ".integrations/agents/bin/python"
PROGRAMS = Path(__file__).parents[2] / ".integrations/agents_npm/node_modules/.bin"
SCRIPTS = Path(__file__).parent / "agents"
TASK = TaskDefinitionModel(name="shop", initial_user_prompt="What do bread and milk cost?")


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    if not PYTHON.exists():
        pytest.skip("the agent frameworks are not installed; run `make test-integrations`")


def foreign(script: str, api: str, mode: str) -> Any:
    """Adapter: start the program with the address and wait for its output."""

    async def agent(task: AgentTask, base_url: str) -> str:
        return await output_of([PYTHON, SCRIPTS / script, task.prompt, base_url, api, mode])

    return agent


async def output_of(command: list[Any], **options: Any) -> str:
    program = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, **options
    )
    try:
        output, _ = await program.communicate()
    finally:
        if program.returncode is None:  # the episode is over before the program is
            program.kill()
            await program.wait()
    assert program.returncode == 0
    return output.decode()


def made(**calls: str) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": "price_of", "arguments": f'{{"article":"{article}"}}'}}
        for call_id, article in calls.items()
    ]


def reply(prompt: list[int], sampled: list[int], text: str | None = None, **calls: str) -> Behavior:
    """Return an answer with token ids that calls `price_of`; `calls` are ids and articles."""
    entries = [{"token": f"t{token}", "logprob": -0.25, "top_logprobs": []} for token in sampled]
    choice = {"token_ids": sampled, "logprobs": {"content": entries}}
    message = {"tool_calls": made(**calls)} if calls else {}
    reason = "tool_calls" if calls else "stop"
    return answer(text, message=message, choice=choice, top={"prompt_token_ids": prompt}, finish_reason=reason)


SCRIPT = [
    reply([1, 2], [10, 11], a1="bread", a2="milk"),
    reply([1, 2, 10, 11, 5, 6], [12], a3="caviar"),
    reply([1, 2, 10, 11, 5, 6, 12, 7], [13, 14], "Bread 2.50, milk 1.20."),
]


TOKENS = {"logprobs": True, "extra_body": {"return_token_ids": True}}


async def collect(
    agent: Any, script: Script = SCRIPT, *, options: dict[str, Any] = TOKENS, **fields: Any
) -> tuple[SingleAgentEpisode, ChatServer]:
    async with ChatServer(script) as server:
        policy = OwnAgentPolicy(agent, "real", base_url=server.base_url, api_key="k", **options)
        try:
            worker = RLRolloutWorker(TASK.model_copy(update=fields), policy)
            return await worker.collect_episode(seed=1), server
        finally:
            await policy.close()


AGENTS = [
    ("openai_agents_clerk.py", "chat"),
    ("openai_agents_clerk.py", "responses"),
    ("openai_agents_clerk.py", "responses_by_id"),
    ("pydantic_ai_clerk.py", "chat"),
    ("pydantic_ai_clerk.py", "responses"),
    ("pydantic_ai_clerk.py", "messages"),
    ("langgraph_clerk.py", "chat"),
    ("langgraph_clerk.py", "responses"),
    ("langgraph_clerk.py", "messages"),
    ("anthropic_clerk.py", "messages"),
]


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize(("script", "api"), AGENTS)
async def test_framework_agent_yields_a_complete_episode(script: str, api: str, mode: str) -> None:
    episode, server = await collect(foreign(script, api, mode))
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


@pytest.mark.parametrize("behind", ["responses", "messages"])
@pytest.mark.parametrize(("script", "api"), AGENTS)
async def test_reasoning_returns_to_the_model_through_a_framework(script: str, api: str, behind: str) -> None:
    """Also if the agent has another API than the model, which cannot express the signed or encrypted reasoning."""

    def thought(number: int) -> dict[str, Any]:
        text = f"Look {number}: \u00fc."
        if behind == "messages":
            return {"type": "thinking", "thinking": text, "signature": f"EqoB+{number}/=="}
        summary = [{"type": "summary_text", "text": text}]
        return {"id": f"rs_{number}", "type": "reasoning", "summary": summary, "encrypted_content": f"gAAA+{number}/=="}

    steps = [
        answer(
            None, message={"items": [thought(1)], "tool_calls": made(a1="bread", a2="milk")}, finish_reason="tool_calls"
        ),
        answer(None, message={"items": [thought(2)], "tool_calls": made(a3="caviar")}, finish_reason="tool_calls"),
        answer("Bread 2.50, milk 1.20.", message={"items": [thought(3)]}),
    ]
    episode, server = await collect(foreign(script, api, "streamed"), steps, options={"api": behind})
    assert (failure(episode), reason(episode), len(episode)) == (None, "answered", 3)
    assert "prompt_messages" not in episode.extra_model_outputs
    sent = server.bodies[-1]["input" if behind == "responses" else "messages"]
    if behind == "messages":
        sent = [block for message in sent for block in message["content"]]
    found = [item for item in sent if item.get("type") in ("thinking", "reasoning")]
    assert [{key: item[key] for key in thought(1)} for item in found] == [thought(1), thought(2)]


@pytest.mark.parametrize(("script", "api"), AGENTS[::3])
async def test_step_limit_applies_to_a_framework_agent(script: str, api: str) -> None:
    episode, server = await collect(foreign(script, api, "whole"), max_episode_steps=2)
    assert (reason(episode), failure(episode), len(episode), len(server.requests)) == ("max_steps", None, 2, 2)
    assert episode.messages[-1].text == "unknown"


def command_of(name: str, prompt: str, base_url: str, home: Path) -> list[Any]:
    """Return the command that runs an agent without asking, and write its settings."""
    if name == "claude":
        return [PROGRAMS / name, "-p", prompt, "--model", "claude-any", "--allowedTools", "Bash"]
    (home / ".codex").mkdir()
    settings = f"""
        model = "gpt-any"
        model_provider = "recorded"
        web_search = "disabled"
        [model_providers.recorded]
        name = "recorded"
        base_url = "{base_url}"
        wire_api = "responses"
        env_key = "ANTHROPIC_API_KEY"
        [features]
        multi_agent = false
    """
    (home / ".codex/config.toml").write_text(settings)
    return [PROGRAMS / name, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]


@pytest.mark.parametrize("behind", ["chat", "responses", "messages"])
@pytest.mark.parametrize("name", ["claude", "codex"])
async def test_command_line_agent_runs_unchanged(name: str, behind: str, tmp_path: Path) -> None:
    if not (PROGRAMS / name).exists():
        pytest.skip("the command-line agents are not installed; run `make test-integrations`")
    (home := tmp_path / "home").mkdir()
    (work := tmp_path / "work").mkdir()
    (work / "prices.txt").write_text("bread 2.50\n")

    async def agent(task: AgentTask, base_url: str) -> str:
        settings = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        return await output_of(command_of(name, task.prompt, base_url, home), cwd=work, env=settings)

    def script(body: dict[str, Any]) -> Behavior:
        if "bread 2.50" in json.dumps(body):
            return answer("Bread costs 2.50.")
        command = (
            {"command": "cat prices.txt", "description": "Show"} if name == "claude" else {"cmd": "cat prices.txt"}
        )
        tool = {"claude": "Bash", "codex": "exec_command"}[name]
        return tool_calls([(tool, command), (tool, command)], "Let me look.")

    episode, _ = await collect(agent, script, options={"api": behind}, initial_user_prompt="What does bread cost?")
    assert (failure(episode), reason(episode), len(episode)) == (None, "answered", 2)
    *_, said, first, second, last = episode.messages
    assert (said.text, last.text) == ("Let me look.", "Bread costs 2.50.")
    assert all(result.role == "tool" and "bread 2.50" in result.text for result in (first, second))
    assert {first.tool_call_id, second.tool_call_id} == {call.id for call in said.tool_calls or ()}
    assert [message.text for message in episode.messages if message.role == "user"][-1].endswith(
        "What does bread cost?"
    )
