"""Runs of models through every API: presets, keys, recordings and records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.providers.keys import PRESETS, PROVIDERS, url_origin
from tests.chat_server import USAGE, ChatServer, answer, status, tool_calls
from tests.cli.project import Project
from tests.providers.test_dialects import REASONING
from tests.rewards.judges import fair, grades

KEY = "sk-of-the-user-0123456789"
APIS = {"openai": None, "responses": "responses", "anthropic": "messages"}
FILES = ("episodes.jsonl", "scores.jsonl")
ONE = ["--limit", "1", "-n", "1"]
TOOLS = """
from reward_kit import ToolRegistry

tools = ToolRegistry("shop")


@tools.tool(description="Return a price.")
def price_of(item: str) -> float:
    return 2.5
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "work").mkdir()
    project = Project(tmp_path / "work", rows=1, num_rollouts_per_sample=1)
    (project.folder / "tools.py").write_text(TOOLS)
    project.write_task(policy=None, tools_module_path="tools.py", on_text="end", max_episode_steps=4)
    return project


async def call(project: Project, *arguments: str, **variables: str) -> Any:
    return await asyncio.to_thread(project.call, "run", *arguments, **variables)


@pytest.mark.parametrize(
    ("provider", "path"), [("openai", None), ("responses", "responses"), ("anthropic", "messages")]
)
async def test_run_is_recorded_and_replayed(project: Project, provider: str, path: str | None) -> None:
    """The reasoning items are in the record, reach the server again, and a replay without a server gives the same."""
    items = {"items": REASONING[path]} if path else {}
    script = [tool_calls([("price_of", {"item": "tea"})], message=items), answer("2.5")]
    arguments = ["task.yaml", "--model", f"{provider}/m", *ONE]
    async with ChatServer(script) as server:
        endpoint = ["--base-url", server.base_url]
        done = await call(project, *arguments, *endpoint, "--record", "answers.jsonl", ANTHROPIC_API_KEY=KEY)
        assert done.returncode == 0, done.stderr
        assert len(server.requests) == 2
        sent = json.dumps(server.bodies[1])
    if path:
        assert json.dumps(REASONING[path])[1:-1] in sent
    (run,) = project.runs()
    first = json.loads((run / "episodes.jsonl").read_text())
    assert first["policy"] == f"{provider}/m" and first["stop_reason"] == "answered"
    assert KEY not in (run / "run.json").read_text() + (project.folder / "answers.jsonl").read_text()
    again = await call(project, *arguments, *endpoint, "--replay", "answers.jsonl")
    assert again.returncode == 0, again.stderr
    second = json.loads((next(other for other in project.runs() if other != run) / "episodes.jsonl").read_text())
    assert (first["messages"], first["usage"]) == (second["messages"], second["usage"])


def play_all_parts(body: dict[str, Any]) -> Any:
    """Answer the judge in Responses, the user in Messages, and the agent in chat completions. The user's key leaks."""
    if "input" in body:
        return fair(grades(4))(body)
    return answer(f"Thanks, {KEY}. ###STOP###" if "system" in body else "It costs 2.5.", usage=USAGE)


async def test_policy_user_and_judge_use_different_apis_in_a_recorded_run(project: Project) -> None:
    prices = str(project.folder / "p.yaml")
    judge = {"model": "responses/judge", "rubric": {"manners": "It is polite."}, "client": {"price_file": prices}}
    (project.folder / "p.yaml").write_text("judge: {input: 1000000, output: 0}\n")
    async with ChatServer(play_all_parts) as server:
        user = {"type": "anthropic", "model": "u", "base_url": server.base_url, "instructions": "You buy tea."}
        reward = {"reward_function_path": "reward_kit.rewards:llm_judge", "reward_options": judge}
        project.write_task(policy=None, on_text=None, user=user, **reward)
        keys = {"OPENAI_API_KEY": "sk-openai-0123456789", "ANTHROPIC_API_KEY": KEY, "OPENAI_BASE_URL": server.base_url}
        keys["REWARD_KIT_KEY_ORIGINS"] = f"ANTHROPIC_API_KEY={url_origin(server.base_url)}"
        arguments = ["task.yaml", "--model", "openai/m", *ONE]
        done = await call(project, *arguments, "--record", "answers.jsonl", **keys)
        assert done.returncode == 0, done.stderr
        sent = [{name.lower(): value for name, value in request.headers.items()} for request in server.requests]
        assert [headers.get("x-api-key", headers.get("authorization")) for headers in sent] == [
            "Bearer sk-openai-0123456789",
            KEY,
            "Bearer sk-openai-0123456789",
        ]
    first = project.run_path()
    again = await call(project, *arguments, "--replay", "answers.jsonl", OPENAI_BASE_URL=server.base_url)
    assert again.returncode == 0, again.stderr
    second = next(other for other in project.runs() if other != first)
    found = [[json.loads((run / name).read_text()) for run in (first, second)] for name in FILES]
    for (one, other), key in zip(found, ("messages", "score"), strict=True):
        assert one[key] == other[key]
    assert found[1][0]["score"] == 0.75
    assert found[1][0]["result"]["metrics"]["judge_usage"]["reason"].endswith("cost_usd=11.000000")
    written = "".join(path.read_text() for path in (*first.rglob("*.json*"), project.folder / "answers.jsonl"))
    assert KEY not in written and "sk-openai" not in written and "Thanks, " in written


@pytest.mark.parametrize("has_key", [True, False])
async def test_provider_at_another_url_gets_the_key_only_if_it_is_set(project: Project, has_key: bool) -> None:
    async with ChatServer(lambda _: answer("2.5")) as server:
        variables = {"ANTHROPIC_API_KEY": KEY} if has_key else {}
        arguments = ["task.yaml", "--model", "anthropic/m", "--base-url", server.base_url, *ONE]
        done = await call(project, *arguments, OPENAI_API_KEY="sk-other", **variables)
        assert done.returncode == 0, done.stderr
        (request,) = server.requests
    assert request.headers.get("x-api-key") == (KEY if has_key else None)
    assert "sk-other" not in str(request.headers)


async def test_task_file_cannot_send_the_key_of_a_provider_elsewhere(project: Project) -> None:
    async with ChatServer(lambda _: answer("2.5")) as server:
        policy = {"type": "anthropic", "model": "m", "base_url": server.base_url}
        project.write_task(policy=policy)
        planned = await call(project, "task.yaml", "--dry-run", ANTHROPIC_API_KEY=KEY)
        assert planned.returncode == 0 and "not configured" not in planned.stdout + planned.stderr
        done = await call(project, "task.yaml", *ONE, ANTHROPIC_API_KEY=KEY)
        assert done.returncode == 0, done.stderr
        (request,) = server.requests
        assert "x-api-key" not in request.headers and request.headers["anthropic-version"] == "2023-06-01"
        project.write_task(policy={**policy, "api_key_env": "ANTHROPIC_API_KEY"})
        done = await call(project, "task.yaml", *ONE, ANTHROPIC_API_KEY=KEY)
        assert len(server.requests) == 1
    assert done.returncode == 2 and "ANTHROPIC_API_KEY is not configured for" in done.stderr


@pytest.mark.parametrize("variables", [{}, {"OPENAI_API_KEY": "sk-other"}])
async def test_rejected_request_without_a_key_names_the_variable_of_the_provider(
    project: Project, variables: dict[str, str]
) -> None:
    async with ChatServer(lambda _: status(401)) as server:
        arguments = ["task.yaml", "--model", "anthropic/m", "--base-url", server.base_url, *ONE]
        done = await call(project, *arguments, **variables)
    assert "ANTHROPIC_API_KEY" in done.stderr and "OPENAI_API_KEY" not in done.stderr


async def test_path_of_an_api_in_the_url_is_named(project: Project) -> None:
    async with ChatServer(lambda _: answer("2.5")) as server:
        arguments = ["task.yaml", "--model", "anthropic/m", "--base-url", f"{server.base_url}/messages", *ONE]
        done = await call(project, *arguments)
    assert done.returncode != 0 and "remove /messages from the end of base_url" in done.stderr


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("antropic/x", "unknown provider 'antropic'; did you mean 'anthropic/x'?"),
        ("anthropic", "write anthropic/NAME"),
        ("some-model", "write openai/some-model"),
    ],
)
def test_misspelt_model_is_suggested(project: Project, model: str, advice: str) -> None:
    done = project.call("run", "task.yaml", "--model", model)
    assert done.returncode == 2 and advice in done.stderr


def test_missing_key_and_unknown_provider_have_clear_errors(project: Project) -> None:
    done = project.call("run", "task.yaml", "--model", "anthropic/m")
    assert done.returncode == 2
    assert "no API key for https://api.anthropic.com/v1: set ANTHROPIC_API_KEY in the environment" in done.stderr
    done = project.call("run", "task.yaml", "--model", "antropic/m")
    assert done.returncode == 2 and "did you mean 'anthropic/m'?" in done.stderr


@pytest.mark.parametrize("name", PRESETS)
def test_key_of_a_preset_is_configured_for_its_origin(name: str) -> None:
    preset = PRESETS[name]
    if preset.api_key_env:
        assert preset.base_url is not None
        assert PROVIDERS[preset.api_key_env] == url_origin(preset.base_url)
    from reward_kit.agent.policies import make_policy

    make_policy(name, {"model": "m", "api_key": "k", "base_url": "http://127.0.0.1:9/v1"})
    with pytest.raises(ConfigError, match=r"policy\.temprature: unknown key"):
        make_policy(name, {"model": "m", "temprature": 1})


@pytest.mark.parametrize("policy", [[{"type": "openai", "api_key": KEY}], {"type": 3, "api_key": KEY, "model": ["m"]}])
def test_error_about_a_task_file_does_not_show_its_key(project: Project, policy: Any) -> None:
    project.write_task(policy=policy, user={"type": "openai", "api_key": KEY, "model": "m"})
    done = project.call("run", "task.yaml")
    assert done.returncode == 2 and KEY not in done.stdout + done.stderr
