"""An MCP server of the SDK's class whose tools ask for input, and whose `slow_` tools are tasks.

python mcp_forms_server.py              # stdio
python mcp_forms_server.py 8000         # streamable HTTP; its first protocol version with tasks is 2026-07-28
python mcp_forms_server.py sessions 8000  # streamable HTTP with sessions in earlier versions
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context, Elicit, ListRoots, MCPServer, Resolve, Sample
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    InputRequiredResult,
    RequestParams,
    SamplingMessage,
    TextContent,
)
from pydantic import BaseModel, Field

FORM = {
    "type": "object",
    "properties": {"size": {"type": "string", "enum": ["small", "large"]}, "copies": {"type": "integer", "default": 1}},
    "required": ["size"],
}


class Order(BaseModel):
    size: Literal["small", "large"]
    copies: int = Field(default=1, ge=1)


def ask_order(item: str) -> Elicit[Order]:
    return Elicit(f"Which {item}?", Order)


def ask_model() -> Sample:
    message = SamplingMessage(role="user", content=TextContent(text="?"))
    return Sample([message], max_tokens=10)


class Tasks(Extension):
    """The tasks extension for tools whose name begins with `slow_`."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.polls: list[float] = []
        self.cancelled: list[str] = []

    def methods(self) -> list[MethodBinding]:
        return [
            MethodBinding("tasks/get", TaskParams, self.get),
            MethodBinding("tasks/update", UpdateParams, self.update),
            MethodBinding("tasks/cancel", TaskParams, self.cancel),
        ]

    async def intercept_tool_call(self, params: CallToolRequestParams, ctx: Any, call_next: Any) -> Any:
        if not params.name.startswith("slow_"):
            return await call_next(ctx)
        name, key = params.name.removeprefix("slow_"), f"task-{len(self.states)}"
        self.states[key] = {"name": name, "polls": 0, "answer": None}
        self.polls = [asyncio.get_running_loop().time()]
        return {"resultType": "task", "status": "working", "taskId": key, "pollIntervalMs": 30, **STAMPS}

    def state(self, params: TaskParams) -> dict[str, Any]:
        if params.task_id not in self.states:
            raise MCPError(-32602, "Failed to retrieve task: Task not found")
        return self.states[params.task_id]

    async def get(self, ctx: Any, params: TaskParams) -> dict[str, Any]:
        state = self.state(params)
        state["polls"] += 1
        self.polls.append(asyncio.get_running_loop().time())
        key, header = params.task_id, (ctx.request.headers.get("mcp-name") if ctx.request is not None else None)
        seen = f"{state['polls']} polls, Mcp-Name {header == key if ctx.request is not None else None}"
        more: dict[str, Any] = {"status": "working"}
        match state["name"]:
            case "count" if state["polls"] == 3:
                more = {"status": "completed", "result": {"content": [{"type": "text", "text": seen}]}}
            case "fail":
                more = {"status": "failed", "error": {"code": -32603, "message": "no paper left"}}
            case "cancel":
                more = {"status": "cancelled", "statusMessage": "the printer is off"}
            case "reject":
                more = {"status": "completed", "result": {"content": [], "isError": True}}
            case "ask" if state["answer"] is None:
                request = {"method": "elicitation/create", "params": {"message": "Which one?", "requestedSchema": FORM}}
                more = {"status": "input_required", "inputRequests": {"which": request}}
            case "ask":
                text = str(state["answer"])
                more = {"status": "completed", "result": {"content": [{"type": "text", "text": text}]}}
            case "lose":
                self.states.clear()
        return {"resultType": "complete", "taskId": key, "pollIntervalMs": 30, **STAMPS, **more}

    async def update(self, ctx: Any, params: UpdateParams) -> dict[str, Any]:
        assert self.state(params)["answer"] is None, "a key is answered twice"
        self.state(params)["answer"] = params.input_responses["which"]
        return {"resultType": "complete"}

    async def cancel(self, ctx: Any, params: TaskParams) -> dict[str, Any]:
        self.cancelled.append(self.state(params)["name"])
        return {"resultType": "complete"}


STAMPS = {"createdAt": "2026-07-28T10:00:00Z", "lastUpdatedAt": "2026-07-28T10:00:00Z", "ttlMs": 60_000}


class TaskParams(RequestParams):
    task_id: str


class UpdateParams(TaskParams):
    input_responses: dict[str, Any]


tasks = Tasks()
server = MCPServer("a server that asks", extensions=[tasks])
for name in ("count", "fail", "cancel", "reject", "ask", "lose", "wait"):

    def slow() -> CallToolResult:
        """Run as a task."""
        raise AssertionError("this is a task")

    server.add_tool(slow, name=f"slow_{name}")


@server.tool()
def cancelled() -> str:
    """List the cancelled tasks."""
    return " ".join(tasks.cancelled)


@server.tool()
def shortest_poll() -> float:
    """Return the shortest time between two requests for the last task, in seconds."""
    return min(later - earlier for earlier, later in zip(tasks.polls, tasks.polls[1:], strict=False))


@server.tool()
def order(item: str, chosen: Annotated[Order, Resolve(ask_order)], context: Context[Any]) -> CallToolResult:
    """Order an item."""
    text = f"{chosen.copies} {chosen.size} {item} over {context.protocol_version}"
    return CallToolResult(content=[TextContent(text=text)])


@server.tool()
async def direct(context: Context[Any]) -> CallToolResult:
    """Ask during the call, as earlier versions do."""
    answer = await context.elicit("Which one?", Order)
    return CallToolResult(content=[TextContent(text=answer.action)])


@server.tool()
async def two(context: Context[Any]) -> InputRequiredResult | CallToolResult:
    """Ask two questions at once, then one that depends on the state."""
    answers, state = context.input_responses or {}, context.request_state
    if state is None:
        return InputRequiredResult(input_requests={"a": form("A?"), "b": form("B?")}, request_state="first")
    if state == "first":
        seen = " ".join(answers[key].content["size"] for key in ("a", "b"))
        return InputRequiredResult(input_requests={"c": form("C?")}, request_state=f"then {seen}")
    return CallToolResult(content=[TextContent(text=f"{state} {answers['c'].content['size']}")])


def form(message: str) -> ElicitRequest:
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=FORM))


@server.tool()
async def endless(context: Context[Any]) -> InputRequiredResult:
    """Ask again and again."""
    return InputRequiredResult(input_requests={"again": form("Again?")}, request_state="x")


@server.tool()
async def many(context: Context[Any]) -> InputRequiredResult | CallToolResult:
    """Ask many questions at once."""
    return InputRequiredResult(input_requests={str(number): form(f"{number}?") for number in range(1_000)})


@server.tool()
async def link(context: Context[Any]) -> InputRequiredResult | CallToolResult:
    """Ask the user to open a URL."""
    if context.input_responses:
        return CallToolResult(content=[TextContent(text=context.input_responses["a"].action)])
    params = ElicitRequestURLParams(message="Sign in", url="https://example.com/sign-in")
    return InputRequiredResult(input_requests={"a": ElicitRequest(params=params)})


@server.tool()
def sample(answer: Annotated[Any, Resolve(ask_model)]) -> str:
    """Ask the model of the client."""
    return "answered"


@server.tool()
def roots(folders: Annotated[Any, Resolve(lambda: ListRoots())]) -> str:
    """List the roots."""
    return str([str(root.uri) for root in folders.roots])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(
            "streamable-http", host="127.0.0.1", port=int(sys.argv[-1]), stateless_http=sys.argv[1] != "sessions"
        )
    else:
        server.run("stdio")
