"""The tasks extension of the Model Context Protocol, in which the client polls for the result of a tool call.

A server with protocol version 2026-07-28 may respond to a call with a task. The client polls the task at the interval
set by the server, answers its requests for input, and cancels the task if the call ends first. The SDK does not
implement this extension. Specification: https://modelcontextprotocol.io/extensions/tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import anyio
import mcp_types
import pydantic
from mcp import MCPError
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.session import ClientRequestContext

from reward_kit.errors import ToolError

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.05, 2.0
"""The polling interval in seconds if the server sets none. It doubles from the first value up to the second."""
_MIN_POLL_S = 0.01
_CANCEL_S = 2.0
_SHOWN_CHARS = 2_000


class UnknownEffectError(Exception):
    """Raised if a call was sent but the response does not show whether the call took effect."""


class CreatedTask(mcp_types.Result):
    """The response to a call that continues as a task."""

    result_type: Literal["task"]
    task_id: str
    poll_interval_ms: float | None = None


class ToolTask(mcp_types.Result):
    """The state of a task."""

    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    status_message: str | None = None
    poll_interval_ms: float | None = None
    input_requests: mcp_types.InputRequests | None = None
    result: dict[str, Any] | None = None
    error: mcp_types.ErrorData | None = None


class _TaskParams(mcp_types.RequestParams):
    task_id: str


class _UpdateParams(_TaskParams):
    input_responses: mcp_types.InputResponses


class _GetTask(mcp_types.Request[_TaskParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    params: _TaskParams
    name_param = "taskId"


class _UpdateTask(mcp_types.Request[_UpdateParams, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    params: _UpdateParams
    name_param = "taskId"


class _CancelTask(mcp_types.Request[_TaskParams, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    params: _TaskParams
    name_param = "taskId"


class TasksExtension(ClientExtension):
    """The client's side of the tasks extension."""

    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=_finish)]


async def _finish(created: CreatedTask, context: ClaimContext) -> mcp_types.CallToolResult:
    """Poll a task until it ends, and return the result. If polling fails or is cancelled, cancel the task.

    Raises:
        ToolError: the task failed.
        UnknownEffectError: the task was cancelled by the server, or its state cannot be read.
    """
    session, params = context.session, _TaskParams(task_id=created.task_id)
    is_over = False
    answered: set[str] = set()
    interval, fallback = created.poll_interval_ms, _SHORTEST_POLL_S
    try:
        while True:
            await anyio.sleep(fallback if interval is None else max(interval / 1000, _MIN_POLL_S))
            fallback = min(2 * fallback, _LONGEST_POLL_S)
            task = await _send(context, _GetTask(params=params), ToolTask)
            interval = task.poll_interval_ms
            is_over = task.status in ("completed", "failed", "cancelled")
            if is_over:
                return _result(task, context.tool_name)
            requests = {key: request for key, request in (task.input_requests or {}).items() if key not in answered}
            responses: mcp_types.InputResponses = {}
            for key, request in requests.items():
                meta = request.params.meta if request.params else None
                request_context = ClientRequestContext(session=session, request_id=key, meta=meta)
                response = await session.dispatch_input_request(request_context, request)
                if isinstance(response, mcp_types.ErrorData):
                    raise ToolError(f"{context.tool_name}: {response.message}")
                responses[key] = response
            if responses:
                answered |= responses.keys()
                update = _UpdateParams(task_id=created.task_id, input_responses=responses)
                await _send(context, _UpdateTask(params=update), mcp_types.EmptyResult)
                fallback = _SHORTEST_POLL_S
    finally:
        if not is_over:
            with anyio.move_on_after(_CANCEL_S, shield=True), suppress(MCPError, pydantic.ValidationError):
                await session.send_request(_CancelTask(params=params), mcp_types.EmptyResult)


async def _send(context: ClaimContext, request: Any, result_type: type[Any]) -> Any:
    try:
        return await context.session.send_request(request, result_type)
    except MCPError as error:
        if error.code == mcp_types.CONNECTION_CLOSED:
            raise
        raise UnknownEffectError(f"{context.tool_name}: {request.method} failed: {error.message}") from error


def _result(task: ToolTask, tool: str) -> mcp_types.CallToolResult:
    message = f": {task.status_message[:_SHOWN_CHARS]}" if task.status_message else ""
    if task.status == "cancelled":
        raise UnknownEffectError(f"{tool}: the server cancelled the task{message}")
    if task.status == "failed":
        raise ToolError(f"{tool}: {task.error.message[:_SHOWN_CHARS] if task.error else f'the task failed{message}'}")
    if task.result is None:
        raise UnknownEffectError(f"{tool}: the task ended without a result")
    return mcp_types.CallToolResult.model_validate(task.result, by_name=False)
