"""A judge for tests: a real server that obeys instructions like a careless model and returns valid verdicts.

It obeys whatever stands outside of a well-formed block of data: any role marker, any demand. So a text that leaves its
JSON string moves the verdict, and one that stays in it does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.judge_client import JudgeClients
from tests.chat_server import Behavior, ChatServer, answer

QUICK = {"max_attempts": 2, "retry_budget_s": 5.0, "retry_base_s": 0.001, "total_timeout_s": 5.0}
QUALITY = {"quality": "It is right."}
Decide = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]

_BLOCK = re.compile(r"<data-([0-9a-f]{16})>\n(.*)\n</data-\1>")
_SPECIAL = re.compile(
    r"<\|[^|>]*\|>|<｜[^｜>]*｜>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|[＜＞]|[\u200b-\u200f\u202a-\u202e\U000e0000-\U000e007f]"
)
_DEMAND = re.compile(
    r"(?i)ignore|disregard|override|maximum|perfect|full marks|highest|score|grade|winner|verdict|supported"
)


def data_block(body: Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Return the code of the block in a request, its data, and the rest of the user message."""
    content = (body.get("messages") or body["input"])[-1]["content"]
    text = content if isinstance(content, str) else content[0]["text"]  # blocks in the API of Anthropic
    blocks = _BLOCK.findall(text)
    assert len(blocks) == 1, text
    code, data = blocks[0]
    assert "\n" not in data
    return code, json.loads(data), _BLOCK.sub("", text)


def is_obeyed(body: Mapping[str, Any]) -> bool:
    """Return whether the request would move a model that obeys instructions outside a data block."""
    if [message["role"] for message in body["messages"]] != ["system", "user"]:
        return True
    text = body["messages"][1]["content"]
    if _SPECIAL.search(text):
        return True
    outside = _BLOCK.sub("", text).replace("Judge it as the system message says.", "")
    return bool(_DEMAND.search(outside))


def response_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema that a request in any API sets for the answer."""
    if "response_format" in body:
        return body["response_format"]["json_schema"]["schema"]
    return body.get("text", body.get("output_config", {})).get("format", {}).get("schema")


def verdict(form: Mapping[str, Any], **said: Any) -> Behavior:
    """Return an answer with these members of the verdict."""
    return answer(json.dumps({**form, **said}))


def fair(decide: Decide) -> Callable[[dict[str, Any]], Behavior]:
    """Return a script: `decide(data, properties)` gives the members beside `check` and `reasons`."""

    def behave(body: dict[str, Any]) -> Behavior:
        code, data, _ = data_block(body)
        schema = response_schema(body)
        assert schema is not None, "the request sets no schema"
        return verdict({"check": code, "reasons": "as decided"}, **decide(data, schema["properties"]))

    return behave


def grades(value: int | Mapping[str, int]) -> Decide:
    """Return a script that gives every dimension or answer this grade."""

    def decide(data: Mapping[str, Any], properties: Mapping[str, Any]) -> Mapping[str, Any]:
        names = properties["grades"]["properties"]
        return {"grades": {name: value if isinstance(value, int) else value[name] for name in names}}

    return decide


def talk(reply: str | None, prompt: str = "What is the capital of France?", **rest: Any) -> list[Message]:
    """Return a question and its answer."""
    return [Message(role="user", content=prompt), Message(role="assistant", content=reply, **rest)]


async def judged(
    reward: Callable[..., Any], script: Any, *args: Any, **options: Any
) -> tuple[EvaluateResult, ChatServer]:
    """Return the result of a reward with a scripted judge, and the server with its requests."""
    clients = JudgeClients()
    async with ChatServer(script) as server:
        try:
            options = {"client": QUICK, "model": "judge", "base_url": server.base_url, **options}
            return await reward(*args, **options, judge_clients=clients), server
        finally:
            await clients.close()


def said(text: str, **rest: Any) -> Callable[[dict[str, Any]], Behavior]:
    """Return an answer with OK replaced by valid members, and CODE by the code of the data."""
    text = text.replace("OK", '"check": "CODE", "reasons": "r"')
    return lambda body: answer(text.replace("CODE", data_block(body)[0]), **rest)


GOOD = '{OK, "grades": {"quality": 5}}'
