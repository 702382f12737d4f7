"""Test MCP servers as environments: one made with the SDK, over both transports, and one with faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from aiohttp import web

from reward_kit.environments.mcp import McpResource, result_text
from reward_kit.errors import DeadlineError, EnvironmentFailure, ToolError
from reward_kit.processes import LOG_FOLDER
from tests.agent.resources import call, calls, collected, failure, reason, tool_answers
from tests.environments.mcp_resources import AFTER, SDK, TINY, ask, opened, served


async def names(resource: McpResource) -> list[str]:
    return [spec["function"]["name"] for spec in await resource.get_tools_spec()]


# The SDK's server, over stdio and over HTTP


@pytest.fixture(scope="module")
def http_url():
    with served(SDK) as url:
        yield url


SCRIPT = [
    call("add", x=40, y=2),
    call("fail", reason="no milk"),
    call("add", x="many"),
    call("echo", txt="a"),
    call("structured"),
    call("media"),
    calls(("files_read_all_now", {}), ("files_read_all_now_2", {})),
    {"type": "terminate"},
]


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_server_tools_are_the_tools_of_an_episode(transport, request) -> None:
    config = {"command": SDK} if transport == "stdio" else {"url": request.getfixturevalue("http_url")}
    episode = await collected(SCRIPT, resource_type="mcp", base_resource_config=config, initial_user_prompt="x")
    assert reason(episode) == "terminate_action"
    summed, failed, refused, misspelt, structured, media, even, odd = tool_answers(episode)
    assert summed == "42"
    assert failed == "Error: Error executing tool fail: no milk"
    assert refused.startswith("Error: ") and "valid integer" in refused
    assert misspelt == "Error: echo: unknown argument 'txt'; did you mean 'text'?"
    assert json.loads(structured) == {"town": "Łódź", "size": 3}
    assert media == "[image image/png, 4 bytes]\nbetween\n[audio audio/wav, 3 bytes]"
    # The server calls the second one "files.read all/now", which no model can.
    assert (even, odd) == ("even", "odd")
    assert episode.messages[1].text == "Call add to add."


async def test_server_at_a_url_gets_headers_and_keeps_its_session(http_url, monkeypatch) -> None:
    monkeypatch.setenv("NOTE_TOKEN", "Bearer x")
    config = {"url": http_url, "headers": {"X-Team": "red"}, "headers_env": {"Authorization": "NOTE_TOKEN"}}
    monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", f"NOTE_TOKEN={http_url}")
    async with opened(**config, call_timeout_s=0.3) as resource:
        assert [await ask(resource, "header", name=name) for name in ("x-team", "authorization")] == ["red", "Bearer x"]
        with pytest.raises(ToolError, match=r"sleep did not respond within 0.3 s"):
            await ask(resource, "sleep")
        assert await ask(resource, "add", x=1) == "2"
        assert "learnt" not in await names(resource)
        await ask(resource, "learn")
        await until_listed(resource, "learnt")


async def test_headers_do_not_follow_a_redirect_to_another_origin(http_url) -> None:
    seen: list[dict[str, str]] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        return web.Response(status=404)

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(far)

    async with _served(elsewhere) as far, _served(moved) as near:
        with pytest.raises(EnvironmentFailure):
            async with opened(url=near, headers={"X-Api-Key": "secret"}):
                pass
    assert not seen


@asynccontextmanager
async def _served(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/mcp", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    finally:
        await runner.cleanup()


async def until_listed(resource: McpResource, name: str) -> None:
    with anyio.fail_after(5):
        while name not in await names(resource):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# The protocol, with a server that takes liberties


async def test_every_page_of_tools_is_listed_with_unchanged_schemas() -> None:
    async with opened() as resource:
        specs = {spec["function"]["name"]: spec["function"] for spec in await resource.get_tools_spec()}
        assert {"put", "get", "quit"} <= specs.keys() and len(specs) == 14
        assert specs["tree"]["parameters"]["properties"] == {"node": {"$ref": "#/$defs/node"}}
        assert await ask(resource, "tree", node={"next": {}}) == "tree"
        await ask(resource, "grow")
        assert "grown_0" in await names(resource)


async def test_only_configured_tools_are_offered() -> None:
    async with opened(tools=["get"]) as resource:
        assert await names(resource) == ["get"]
        with pytest.raises(ToolError, match="unknown tool 'put'"):
            await ask(resource, "put", word="a")


async def test_call_timeout_keeps_the_session_open() -> None:
    async with opened(call_timeout_s=0.1) as resource:
        before = await resource.state_key()
        with pytest.raises(ToolError, match=r"wait did not respond within 0.1 s and was cancelled \(call_timeout_s\)"):
            await ask(resource, "wait")
        assert await ask(resource, "cancelled") == "1"
        # What the server did in that time is not known, so this is no longer the state that it was.
        assert await resource.state_key() != before


async def test_cancelled_call_keeps_the_session_open() -> None:
    async with opened() as resource:
        with anyio.move_on_after(0.1):
            await ask(resource, "wait")
        task = asyncio.create_task(resource.step("wait", {}))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ask(resource, "cancelled") == "2"


async def test_protocol_error_changes_nothing_and_an_invalid_answer_may() -> None:
    async with opened() as resource:
        start = await resource.state_key()
        with pytest.raises(ToolError, match="refuse: not today"):
            await ask(resource, "refuse")
        assert await resource.state_key() == start
        with pytest.raises(ToolError, match="garbled: the server's response is not a valid result"):
            await ask(resource, "garbled")
        assert await resource.state_key() != start
    async with opened(fork="replay", call_timeout_s=0.1) as resource:
        # What happened cannot be taken again, so this world is given up.
        with pytest.raises(EnvironmentFailure, match="not a valid result"):
            await ask(resource, "garbled")
        with pytest.raises(DeadlineError, match="did not respond"):
            await ask(resource, "wait")


async def test_lone_surrogates_and_nul_are_handled_both_ways() -> None:
    async with opened() as resource:
        assert await ask(resource, "half") == "a\ufffdb\0"
        with pytest.raises(ToolError, match="not valid Unicode text"):
            await ask(resource, "put", word="\ud800")
        with pytest.raises(ToolError, match="not JSON"):
            await ask(resource, "put", word=float("nan"))
        assert await ask(resource, "put", word="\0") == "\0"


async def test_fifty_megabytes_reach_the_agent_cut() -> None:
    episode = await collected(
        [call("large", count=50_000_000), call("get")],
        resource_type="mcp",
        base_resource_config={"command": TINY},
        initial_user_prompt="x",
    )
    assert reason(episode) == "terminate_action"
    large, _ = tool_answers(episode)
    assert 16_000 <= len(large) < 17_000 and large.startswith("xxx")


async def test_server_requests_are_declined_and_roots_are_the_working_copy(tmp_path) -> None:
    (tmp_path / "seed").mkdir()
    config = {"working_copy": "seed", "task_folder": str(tmp_path)}
    async with opened([*TINY, "{working_copy}"], **config) as resource:
        (root,) = json.loads(await ask(resource, "ask", method="roots/list"))["roots"]
        assert root["uri"] == "file:///working_copy"
        for method in ("sampling/createMessage", "elicitation/create"):
            assert "not supported" in await ask(resource, "ask", method=method)
    async with opened() as resource:
        assert "not supported" in await ask(resource, "ask", method="roots/list")


def test_embedded_resources_are_shown_as_text_or_a_summary() -> None:
    from mcp_types import BlobResourceContents, CallToolResult, EmbeddedResource, ResourceLink, TextResourceContents

    blob = BlobResourceContents(uri="file:///b", blob="QUJDRA==", mime_type="image/gif")
    blocks = [
        EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="words")),
        EmbeddedResource(resource=blob),
        ResourceLink(uri="file:///c", name="c", mime_type="text/csv"),
    ]
    assert result_text(CallToolResult(content=blocks)).splitlines() == [
        "[resource file:///a]",
        "words",
        "[resource file:///b, image/gif, 4 bytes]",
        "[link to the resource file:///c, text/csv]",
    ]


# What can go wrong

NOISE = """
import sys
sys.stderr.write("warming up\\n" * 20_000)
print("Welcome!\\n{not json}\\n[1, 2]\\n" + "x" * 200_000, flush=True)
"""


async def test_noise_on_standard_output_is_tolerated_and_reported(tmp_path) -> None:
    token = LOG_FOLDER.set(tmp_path)
    async with opened(["{python}", "-S", "-c", NOISE + AFTER]) as resource:
        assert await ask(resource, "put", word="a") == "a"
        with pytest.raises(
            EnvironmentFailure, match=r"4 lines on its standard output are not messages; the first is 'Welcome!'"
        ):
            await ask(resource, "quit")
    LOG_FOLDER.reset(token)
    (log,) = tmp_path.iterdir()
    assert log.stat().st_size > 220_000


async def test_server_crash_in_a_call_fails_only_its_episode() -> None:
    config = {"resource_type": "mcp", "base_resource_config": {"command": TINY}, "initial_user_prompt": "x"}
    broken, other = await asyncio.gather(
        collected([call("put", word="a"), call("quit")], **config), collected([call("put", word="b")], **config)
    )
    assert (reason(broken), failure(broken)["where"]) == ("error", "EnvironmentFailure")
    assert (
        "ended during the call of 'quit'; exit code 5; its log ends with:\nI cannot go on" in failure(broken)["message"]
    )
    assert (reason(other), tool_answers(other)) == ("terminate_action", ["b"])
