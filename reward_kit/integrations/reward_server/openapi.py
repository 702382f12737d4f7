"""What a reward server answers to, as an OpenAPI document made from the models that check it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from reward_kit.integrations.reward_server.options import ServerOptions
from reward_kit.integrations.reward_server.wire import MOST_PARTS, BatchAnswerBody, BatchBody, ListBody, ScoreBody
from reward_kit.reward_agent.remote import AboutBody, AnswerBody

_ERRORS = {
    400: "The body is no JSON as RFC 8259 has it.",
    401: "There is no key, or it is none of this server's.",
    404: "There is no such reward.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is no JSON in UTF-8, or compressed.",
    422: "The body is no such request; the message names the field.",
    429: "Too much is asked for at the moment; Retry-After says when to ask again.",
    500: "A fault of the server.",
    503: "The server is ending.",
}
_OF_BODIES = (400, 408, 413, 415, 422, 429)


class ErrorDetail(pydantic.BaseModel):
    """What went wrong: a code for programs and a message for people."""

    code: str
    message: str


class ErrorBody(pydantic.BaseModel):
    """A request that was not answered with what it asked for."""

    model_config = pydantic.ConfigDict(title="Error")

    error: ErrorDetail


class HealthBody(pydantic.BaseModel):
    """Whether the server takes requests."""

    model_config = pydantic.ConfigDict(title="Health")

    status: str


def openapi_of(names: Iterable[str], options: ServerOptions) -> bytes:
    """The document of a server, in JSON.

    Args:
        names: of its rewards.
        options: its limits stand in the schemas.
    """
    incoming, outgoing = (
        (ScoreBody, BatchBody),
        (AnswerBody, BatchAnswerBody, AboutBody, ListBody, ErrorBody, HealthBody),
    )
    modes: list[Any] = [
        *((model, "validation") for model in incoming),
        *((model, "serialization") for model in outgoing),
    ]
    keys, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    definitions = _limited(schemas["$defs"], options)
    refs = {model.__name__: ref for (model, _), ref in keys.items()}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "reward-kit: rewards over HTTP",
            "version": version("reward-kit"),
            "description": "Unscored is null, with the reason in error; it is never 0.",
        },
        "paths": _paths(refs, sorted(names)),
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
    return json.dumps(document, separators=(",", ":")).encode("utf-8")


def _paths(refs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    where = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": names}}
    scored = "Scores, also where a reward failed: score is then null, and error says why."
    return {
        "/health": {
            "get": {**_operation("health", "Whether it runs", refs["HealthBody"], refs, (503,)), "security": []}
        },
        "/metrics": {"get": _operation("metrics", "Figures for Prometheus", None, refs)},
        "/openapi.json": {"get": _operation("openapi", "This document", {"type": "object"}, refs)},
        "/v1/rewards": {"get": _operation("list", "All rewards", refs["ListBody"], refs)},
        "/v1/rewards/{name}": {
            "parameters": [where],
            "get": _operation("about", "What a reward is", refs["AboutBody"], refs, (404,)),
        },
        **{
            f"/v1/rewards/{{name}}/{action}": {
                "parameters": [where],
                "post": {
                    **_operation(action, scored, refs[answer], refs, (404, *_OF_BODIES)),
                    "requestBody": {"required": True, "content": {"application/json": {"schema": refs[body]}}},
                },
            }
            for action, body, answer in (
                ("score", "ScoreBody", "AnswerBody"),
                ("score_batch", "BatchBody", "BatchAnswerBody"),
            )
        },
    }


def _operation(
    name: str, summary: str, schema: Any, refs: dict[str, Any], errors: tuple[int, ...] = ()
) -> dict[str, Any]:
    kind, told = ("application/json", schema) if schema else ("text/plain", {"type": "string"})
    responses = {"200": {"description": summary, "content": {kind: {"schema": told}}}}
    for status in sorted({*errors, *(() if name == "health" else (401, 500, 503))}):
        told = refs["HealthBody"] if name == "health" else refs["ErrorBody"]
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": told}},
            **({"headers": {"Retry-After": _RETRY_AFTER}} if status in (429, 503) and name != "health" else {}),
        }
    return {"operationId": name, "summary": summary, "responses": responses}


_RETRY_AFTER = {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}


def _limited(definitions: dict[str, Any], options: ServerOptions) -> dict[str, Any]:
    """The schemas with the limits that are the server's own."""
    definitions["BatchBody"]["properties"]["rollouts"]["maxItems"] = options.max_batch
    for name in ("ScoreBody", "RolloutBody"):
        definitions[name]["properties"]["messages"]["maxItems"] = options.max_messages
    for name in ("content", "tool_calls"):
        for kind in definitions["Message"]["properties"][name]["anyOf"]:
            if kind.get("type") == "array":
                kind["maxItems"] = MOST_PARTS
    return definitions
