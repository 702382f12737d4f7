"""Test MCP servers that ask for input or answer with tasks, over both transports and in three protocol versions."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.simulated_user import ScriptedUser, SimulatedUser
from reward_kit.environments.elicitation import CURRENT_USER, UserAnswer, fill_form
from reward_kit.environments.mcp import McpResource, tool_table
from reward_kit.environments.schema_check import schema_violation
from reward_kit.errors import EnvironmentFailure, ToolError
from reward_kit.run_warnings import CURRENT_RUN_WARNINGS, RunWarnings
from reward_kit.safe_input import TooLargeError
from tests.agent.resources import call, failure, reason, task_of, text, tool_answers
from tests.endless_server import peak
from tests.environments.mcp_resources import FORMS, HERE, STATELESS, TINY, ask, opened, served

SMALL = '{"size": "small"}'


@pytest.fixture(scope="module")
def forms_url():
    with served(FORMS) as url:
        yield url


@pytest.fixture(params=["stdio", "http"])
def config(request) -> dict[str, Any]:
    return {"command": FORMS} if request.param == "stdio" else {"url": request.getfixturevalue("forms_url")}


@asynccontextmanager
async def with_user(*answers: str | Exception, **config: Any) -> AsyncIterator[tuple[McpResource, list[str]]]:
    """Yield a resource whose user gives these answers, the last one again and again, and the forms that it saw."""
    seen: list[str] = []

    async def answer(form: str) -> UserAnswer:
        seen.append(form)
        given = answers[min(len(seen), len(answers)) - 1]
        if isinstance(given, Exception):
            raise given
        return UserAnswer(given)

    token = CURRENT_USER.set(answer)
    try:
        async with opened(**config) as resource:
            yield resource, seen
    finally:
        CURRENT_USER.reset(token)


# Requests for input


async def test_user_answers_a_form_between_two_rounds(config) -> None:
    async with with_user(SMALL, **config) as (resource, seen):
        outcome = await resource.step("order", {"item": "tea"})
    assert outcome.observation == "1 small tea over 2026-07-28"
    assert outcome.info["forms"] == [
        {"message": "Which tea?", "action": "accept", "content": {"size": "small", "copies": 1}}
    ]
    (form,) = seen
    assert form.startswith("Which tea?\n") and '"enum":["small","large"]' in form and "Required: size." in form


async def test_rounds_pass_the_state_of_the_server_on(config) -> None:
    async with with_user(SMALL, '{"size": "large"}', **config) as (resource, seen):
        assert await ask(resource, "two") == "then small large large"
    assert [form.splitlines()[0] for form in seen] == ["A?", "B?", "C?"]


@pytest.mark.parametrize("version", ["2025-06-18", "2025-11-25"])
async def test_user_answers_a_form_in_earlier_versions(version) -> None:
    async with with_user(SMALL, command=TINY, env={"MCP_VERSION": version}) as (resource, _):
        outcome = await resource.step("ask", {"method": "elicitation/create"})
    assert json.loads(outcome.observation) == {"action": "accept", "content": {"size": "small"}}
    assert outcome.info["forms"] == [{"message": "?", "action": "accept", "content": {"size": "small"}}]


async def test_server_asks_during_a_call_with_the_legacy_protocol() -> None:
    async with with_user(SMALL, command=FORMS, protocol="legacy") as (resource, _):
        assert await ask(resource, "direct") == "accept"
        assert await ask(resource, "order", item="tea") == "1 small tea over 2025-11-25"
    with served([*FORMS, "sessions"]) as url:
        async with with_user(SMALL, url=url, protocol="legacy") as (resource, seen):
            outcome = await resource.step("direct", {})
    assert (outcome.observation, len(seen)) == ("accept", 1)
    assert outcome.info["forms"][0]["content"] == {"size": "small", "copies": 1}


async def test_form_that_the_protocol_cannot_carry_names_the_option(config, caplog) -> None:
    warnings = RunWarnings()
    token = CURRENT_RUN_WARNINGS.set(warnings)
    async with with_user(SMALL, **config) as (resource, seen):
        for _ in range(2):
            with pytest.raises(ToolError, match=r"set protocol: legacy in the mcp resource, or .* Resolve and Elicit"):
                await ask(resource, "direct")
    CURRENT_RUN_WARNINGS.reset(token)
    assert seen == []
    assert len(warnings.lines()) == 1
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "could not ask the simulated user" in warning and "set protocol: legacy" in warning
    async with opened(**config) as resource:
        with pytest.raises(ToolError) as raised:
            await ask(resource, "direct")
    assert "protocol: legacy" not in str(raised.value)


async def test_legacy_server_without_sessions_cannot_ask(forms_url) -> None:
    async with with_user(SMALL, url=forms_url, protocol="legacy") as (resource, _):
        with pytest.raises(ToolError, match="the server has no session; start the server without stateless_http"):
            await ask(resource, "direct")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("Decline.", "the simulated user declined"),
        ("small", "does not match the form: not a JSON object: 'small'"),
        ('{"size": "huge"}', "does not match the form: $.size: 'huge' is not one of"),
        ('{"size": "small", "colour": "red"}', "does not match the form: $: Additional properties"),
        ('{"size": "small", "copies": NaN}', "does not match the form: NaN is not JSON"),
    ],
)
async def test_refusal_is_explained_to_the_agent(answer, why) -> None:
    async with with_user(answer, command=FORMS) as (resource, _):
        start = await resource.state_key()
        with pytest.raises(ToolError) as raised:
            await ask(resource, "order", item="tea")
        assert "elicitation was decline (the server asked for input, but the simulated user" in str(raised.value)
        assert why in str(raised.value)
        assert await resource.state_key() == start


async def test_user_cannot_open_a_url() -> None:
    async with with_user(SMALL, command=FORMS) as (resource, seen):
        outcome = await resource.step("link", {})
    assert (outcome.observation, seen) == ("decline", [])
    assert outcome.info["forms"][0]["reason"] == "a simulated user cannot open a URL"


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("order", "did not declare the form elicitation capability"),
        ("two", "two: Elicitation not supported"),
        ("slow_ask", "slow_ask: Elicitation not supported"),
        ("sample", "did not declare the sampling capability"),
        ("roots", "did not declare the roots capability"),
    ],
)
async def test_requests_that_no_party_can_answer_are_refused_with_a_reason(tool, why, config) -> None:
    async with opened(**config) as resource:
        with pytest.raises(ToolError, match=why):
            await ask(resource, tool, **({"item": "tea"} if tool == "order" else {}))


async def test_number_of_rounds_and_forms_is_limited() -> None:
    async with with_user(SMALL, command=FORMS) as (resource, seen):
        with pytest.raises(ToolError, match="endless: the server asked for input more than 10 times"):
            await ask(resource, "endless")
        assert len(seen) == 10
        seen.clear()
        with pytest.raises(ToolError, match="many: There were more than 20 requests for input in one call"):
            await ask(resource, "many")
        assert len(seen) == 20


async def test_large_form_is_not_shown_to_the_user() -> None:
    asked: list[str] = []

    async def answer(form: str) -> UserAnswer:
        asked.append(form)
        return UserAnswer("{}")

    fields = {f"field{number}": {"type": "string"} for number in range(1_000)}
    answered = await fill_form(answer, "?", {"type": "object", "properties": fields})
    assert (answered.action, answered.reason, asked) == ("decline", "the form has more than 16,384 characters", [])


async def test_time_of_the_user_does_not_count() -> None:
    async def answer(form: str) -> UserAnswer:
        await asyncio.sleep(2.2)
        return UserAnswer(SMALL)

    token = CURRENT_USER.set(answer)
    async with opened(FORMS, call_timeout_s=2) as resource:
        assert await ask(resource, "order", item="tea") == "1 small tea over 2026-07-28"
    CURRENT_USER.reset(token)


async def test_fork_repeats_the_answers_without_the_user() -> None:
    async with with_user(SMALL, '{"size": "large"}', command=FORMS, fork="replay") as (resource, seen):
        await ask(resource, "order", item="tea")
        small = await resource.state_key()
        twin = await resource.fork()
        assert len(seen) == 1 and await twin.state_key() == small
        await twin.reset(0)
        await ask(twin, "order", item="tea")
        assert len(seen) == 2 and await twin.state_key() != small
        await twin.close()


# Episodes


async def episode_of(user: SimulatedUser, *actions: dict[str, Any], **limits: Any) -> Any:
    task = task_of(
        resource_type="mcp", base_resource_config={"command": FORMS}, initial_user_prompt="Order tea.", limits=limits
    )
    return await RLRolloutWorker(task, ScriptedPolicy(list(actions)), user=user).collect_episode()


async def test_simulated_user_of_the_episode_fills_in_the_form() -> None:
    seen: list[list[str]] = []

    def reply(conversation: Any, row: Any) -> str:
        seen.append([message.text.splitlines()[0] for message in conversation])
        return SMALL if len(seen) == 1 else "Thanks! ###STOP###"

    actions = (call("order", item="tea"), text("It is ordered."))
    episode = await episode_of(ScriptedUser(reply), *actions)
    assert (reason(episode), tool_answers(episode)) == ("user_stopped", ["1 small tea over 2026-07-28"])
    # The form follows the conversation and does not become part of it.
    assert seen == [["Order tea.", "Which tea?"], ["Order tea.", "It is ordered."]]
    (tool,) = episode.get_infos(1)["tools"]
    assert tool["forms"][0]["user"] == {"raw": SMALL}


async def test_user_who_leaves_cancels_the_form() -> None:
    episode = await episode_of(ScriptedUser(["###STOP###"]), call("order", item="tea"))
    (answer,) = tool_answers(episode)
    assert answer.endswith("(the server asked for input, but the simulated user ended the conversation)")


async def test_stop_phrase_after_a_valid_answer_does_not_cancel_the_form() -> None:
    episode = await episode_of(ScriptedUser([f"{SMALL} ###STOP###"]), call("order", item="tea"))
    assert tool_answers(episode) == ["1 small tea over 2026-07-28"]
    for reply, why in [
        ('{"size": "huge"} ###STOP###', "the simulated user ended the conversation"),
        ("decline ###STOP###", "the simulated user declined"),
    ]:
        (answer,) = tool_answers(await episode_of(ScriptedUser([reply]), call("order", item="tea")))
        assert answer.endswith(f"(the server asked for input, but {why})")


async def test_failure_of_the_user_ends_the_episode() -> None:
    def reply(conversation: Any, row: Any) -> str:
        raise ZeroDivisionError("no user")

    for action in (call("order", item="tea"), call("slow_ask")):
        episode = await episode_of(ScriptedUser(reply), action)
        assert (reason(episode), failure(episode)["where"]) == ("error", "PolicyError")
        assert "the simulated user" in failure(episode)["message"] and "no user" in failure(episode)["message"]


# Tasks


async def test_task_is_polled_until_it_ends(config) -> None:
    header = "Mcp-Name True" if "url" in config else "Mcp-Name None"
    async with opened(**config) as resource:
        assert await ask(resource, "slow_count") == f"3 polls, {header}"
        # The server asks for 30 ms.
        assert float(await ask(resource, "shortest_poll")) >= 0.03


@pytest.mark.parametrize(
    ("tool", "why", "is_known"),
    [
        ("slow_fail", "slow_fail: no paper left", True),
        ("slow_reject", "slow_reject failed without a message", True),
        ("slow_cancel", "slow_cancel: the server cancelled the task: the printer is off", False),
        ("slow_lose", "slow_lose: tasks/get failed: Failed to retrieve task: Task not found", False),
    ],
)
async def test_task_without_result_is_an_error_of_the_call(tool, why, is_known) -> None:
    async with opened(FORMS) as resource:
        start = await resource.state_key()
        with pytest.raises(ToolError, match=why):
            await ask(resource, tool)
        assert (await resource.state_key() == start) == is_known
    if not is_known:
        async with opened(FORMS, fork="replay") as resource:
            with pytest.raises(EnvironmentFailure, match=why):
                await ask(resource, tool)


async def test_user_answers_a_form_of_a_task(config) -> None:
    async with with_user(SMALL, **config) as (resource, seen):
        assert "'small'" in await ask(resource, "slow_ask")
    assert len(seen) == 1


async def test_task_is_cancelled_with_its_call(config) -> None:
    async with opened(**config, call_timeout_s=0.3) as resource:
        before = (await ask(resource, "cancelled")).split()
        with pytest.raises(ToolError, match=r"did not respond within 0.3 s and was cancelled \(call_timeout_s\)"):
            await ask(resource, "slow_wait")
        with anyio.move_on_after(0.1):
            await ask(resource, "slow_wait")
        assert (await ask(resource, "cancelled")).split() == [*before, "wait", "wait"]


# A server with faults


async def test_mismatch_with_the_output_schema_is_a_failure_of_the_server() -> None:
    async with opened(STATELESS) as resource:
        outcome = await resource.step("good", {})
        assert (outcome.observation, outcome.info) == ('{"count":1}', {"structured_content": {"count": 1}})
        for tool, why in [
            ("wrong", "a result of 'wrong' violates its output schema: $.count: 'one' is not of type 'integer'"),
            ("missing", "violates its output schema: the result has no structured content"),
            ("invalid", "the output schema of 'invalid' is invalid"),
        ]:
            with pytest.raises(EnvironmentFailure) as raised:
                await resource.step(tool, {})
            assert why in str(raised.value)
        assert await ask(resource, "doubling") == "{}"


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (1, json.loads(json.dumps({"$ref": "#"}))),
        ([[]] * 1_000_000, {"items": {}}),
        ({}, {"enum": list(range(200_000))}),
        ({}, {"description": "x" * 300_000}),
    ],
    ids=["endless", "items", "enum", "schema"],
)
def test_check_of_a_schema_is_bounded(value, schema) -> None:
    with pytest.raises(TooLargeError):
        schema_violation(value, schema)


def test_check_of_a_schema_does_not_match_patterns() -> None:
    slow = "a" * 60 + "!"
    assert schema_violation(slow, {"type": "string", "pattern": "(a+)+$"}) == ""
    assert schema_violation({slow: 1}, {"patternProperties": {"(a+)+$": False}, "additionalProperties": False}) == ""
    assert schema_violation({"a": 1}, {"additionalProperties": False}) != ""
    assert schema_violation([1, 1], {"uniqueItems": True}) == "$: two items are the same"


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("busy", "busy did not respond within 0.3 s and was cancelled"),
        ("backwards", "backwards did not respond within 0.3 s and was cancelled"),
        ("patient", "patient did not respond within 0.3 s and was cancelled"),
        ("odd", "odd: the server's response is not a valid result: Input should be 'working'"),
        ("empty", "empty: the task ended without a result"),
    ],
)
async def test_endless_and_invalid_tasks_are_cancelled(tool, why) -> None:
    async with opened(STATELESS, call_timeout_s=0.3) as resource:
        with pytest.raises(ToolError, match=why):
            await ask(resource, tool)
        assert json.loads(await ask(resource, "seen")) == ([] if tool == "empty" else ["tasks/cancel"])


async def test_number_of_forms_of_a_task_is_limited() -> None:
    async with with_user("{}", command=STATELESS) as (resource, seen):
        with pytest.raises(ToolError, match="curious: There were more than 20 requests for input in one call"):
            await ask(resource, "curious")
        assert len(seen) == 20
        assert await ask(resource, "seen") == '["tasks/cancel"]'


@pytest.mark.parametrize(
    ("mode", "why"),
    [("many", "larger than the limit of 10,000 tools"), ("endless", "lists its tools on more than 1,000 pages")],
)
async def test_endless_list_of_tools_is_a_failure(mode, why) -> None:
    with pytest.raises(EnvironmentFailure, match=why):
        await McpResource().setup({"command": [*STATELESS, mode]})


async def test_lost_subscription_is_renewed_and_the_tools_listed_again() -> None:
    async with opened([*STATELESS, "changes"]) as resource:
        with anyio.fail_after(10):
            while "late" not in [spec["function"]["name"] for spec in await resource.get_tools_spec()]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_requests_name_the_client() -> None:
    async with opened(STATELESS) as resource:
        assert await ask(resource, "name") == "reward-kit"


def test_thousands_of_tools_with_one_name_get_unique_names() -> None:
    from mcp_types import Tool

    table = tool_table([Tool(name="é" * number, input_schema={}) for number in range(1, 5_000)], None)
    assert len(table) == 4_999 and max(map(len, table)) == 64


@pytest.mark.parametrize(
    ("mode", "tool", "why"),
    [
        ("flood", "flood", "a message larger than the limit of 64 MiB"),
        ("million", "", "a message larger than the limit of 64 MiB"),
    ],
)
def test_endless_messages_of_the_stateless_version_are_cut(mode, tool, why) -> None:
    config = {"command": [sys.executable, str(HERE / "mcp_stateless_server.py"), mode]}
    step = f"await world.step({tool!r}, {{}})" if tool else ""
    code = (
        f"world = McpResource()\ntry:\n    await world.setup({config})\n    {step}\nfinally:\n    await world.close()"
    )
    cost = peak("from reward_kit.environments.mcp import McpResource\nimport reward_kit.environments.mcp_session", code)
    assert (cost.kind, cost.mb < 200) == ("EnvironmentFailure", True), cost
    assert why in cost.message
