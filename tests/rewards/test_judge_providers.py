"""Judges at endpoints of every API, and judges that name their provider."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.providers.chat import DIALECTS
from reward_kit.providers.keys import PRESETS
from reward_kit.rewards import llm_judge
from reward_kit.rewards.judge_client import JudgeClients
from reward_kit.runs.tasks import load_task
from tests.chat_server import USAGE, ChatServer, answer, status
from tests.rewards.judges import GOOD, QUALITY, QUICK, fair, grades, judged, response_schema, said, talk

APIS = [*DIALECTS]
SEEN = {"chat": "messages", "responses": "input", "messages": "system"}  # a key that only this API has, but for chat


def client_of(api: str, **options: Any) -> dict[str, Any]:
    return {**QUICK, "api": api, **options}


@pytest.mark.parametrize("api", APIS)
async def test_judge_scores_with_structured_output_and_usage(api: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("judge: {input: 1000000, output: 0}\n")
    client = client_of(api, price_file=str(tmp_path / "prices.yaml"), seed=3, max_tokens=100)
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 5}}
    result, server = await judged(llm_judge, said(GOOD, usage=usage), talk("Paris"), rubric=QUALITY, client=client)
    assert result.score == 1.0
    figures = "prompt_tokens=11 completion_tokens=7 reasoning_tokens=5 cost_usd=11.000000"
    assert result.metrics["judge_usage"].reason == f"calls=1 cached=0 {figures}"
    (body,) = server.bodies
    assert SEEN[api] in body and body["temperature"] == 0 and body.get("seed") == (3 if api == "chat" else None)
    assert 100 in (body.get("max_tokens"), body.get("max_output_tokens"))
    schema = response_schema(body)
    assert schema is not None and schema["properties"]["grades"]["required"] == ["quality"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("api", APIS)
async def test_rejected_defaults_are_left_out_and_remembered(api: str) -> None:
    def script(body: dict[str, Any]) -> Any:
        if "temperature" in body:
            return status(400, error={"message": "`temperature` is not supported by this model"})
        return status(400, text="no schemas here") if response_schema(body) else said(GOOD)(body)

    clients = JudgeClients()
    async with ChatServer(script) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "client": client_of(api)}
        for text in ("Paris", "Lyon"):
            assert (await llm_judge(talk(text), **options, judge_clients=clients)).score == 1.0
        await clients.close()
    sent = [("temperature" in body, response_schema(body) is not None) for body in server.bodies]
    assert sent == [(True, True), (False, True), (False, False), (False, False)]


async def test_temperature_that_the_user_sets_is_not_left_out() -> None:
    script = [status(400, error={"message": "`temperature` is not supported"})] * 2
    client = client_of("messages", temperature=0.5, answer_form="text")
    with pytest.raises(Exception, match="temperature"):
        await judged(llm_judge, script, talk("Paris"), rubric=QUALITY, client=client)


@pytest.mark.parametrize("api", APIS)
async def test_votes_are_separate_requests_and_unreadable_verdicts_are_asked_again(api: str) -> None:
    script = [answer("Five!"), *[fair(grades(n)) for n in (2, 4, 5)]]
    replies = iter(script)

    def behave(body: dict[str, Any]) -> Any:
        reply = next(replies)
        return reply if reply is script[0] else reply(body)  # type: ignore[operator]

    client = client_of(api, temperature=0.7)
    result, server = await judged(llm_judge, behave, talk("Paris"), rubric=QUALITY, client=client, votes=3)
    assert (result.score, len(server.requests)) == (0.75, 4)


@pytest.mark.parametrize("provider", ["responses", "anthropic", "gemini"])
async def test_provider_in_the_model_sets_endpoint_api_and_key(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ChatServer(said(GOOD)) as server:
        preset = PRESETS[provider]
        key = preset.api_key_env or "OPENAI_API_KEY"
        if preset.base_url is None:
            monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        else:
            monkeypatch.setitem(PRESETS, provider, replace(preset, base_url=server.base_url))  # type: ignore[arg-type]
        monkeypatch.setenv(key, "sk-own")
        clients = JudgeClients()
        for _ in range(2):
            result = await llm_judge(
                talk("Paris"), model=f"{provider}/org/name", rubric=QUALITY, client=QUICK, judge_clients=clients
            )
        await clients.close()
    assert result.score == 1.0
    (request,) = server.requests
    sent = {name.lower(): value for name, value in request.headers.items()}
    header = sent["x-api-key"] if provider == "anthropic" else sent["authorization"].removeprefix("Bearer ")
    assert (header, request.body["model"]) == ("sk-own", "org/name")
    assert "seed" not in request.body  # Gemini rejects it, and the other APIs do not have it
    assert SEEN[preset.options.get("api", "chat")] in request.body


async def test_name_with_a_slash_is_unchanged_with_a_base_url() -> None:
    _, server = await judged(llm_judge, said(GOOD), talk("Paris"), rubric=QUALITY, model="anthropic/claude")
    assert server.bodies[0]["model"] == "anthropic/claude" and "seed" in server.bodies[0]


def test_price_is_that_of_the_name_at_the_endpoint(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("claude: {input: 1, output: 1}\n")
    options = {"model": "anthropic/claude", "client": {"price_file": str(prices)}}
    assert JudgeClients.unpriced_model(options) is None
    assert JudgeClients.unpriced_model({**options, "model": "anthropic/other"}) == "other"


async def test_missing_key_of_the_provider_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    with pytest.raises(ConfigError, match=r"no API key for https://api.anthropic.com/v1: set ANTHROPIC_API_KEY"):
        await JudgeClients.check_options({"model": "anthropic/claude"})


TASK = """\
name: t
messages: [{role: user, content: hi}]
reward_function_path: reward_kit.rewards:llm_judge
reward_options: {model: %s, client: {api_key_env: %s}}
"""


def test_file_cannot_send_another_key_to_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant")
    path = tmp_path / "task.yaml"
    path.write_text(TASK % ("anthropic/claude", "ANTHROPIC_API_KEY"))
    load_task(path)
    path.write_text(TASK % ("anthropic/claude", "OPENAI_API_KEY"))
    with pytest.raises(ConfigError, match=r"OPENAI_API_KEY is not configured for https://api.anthropic.com"):
        load_task(path)
