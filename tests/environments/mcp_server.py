"""An MCP server of the SDK's class, over stdio or streamable HTTP on loopback."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import AudioContent, CallToolResult, ImageContent, TextContent

server = MCPServer("a test server", instructions="Call add to add.")


@server.tool()
def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


@server.tool()
def echo(text: str) -> CallToolResult:
    """The text."""
    return CallToolResult(content=[TextContent(text=text)])


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
async def sleep() -> str:
    """Never return."""
    await asyncio.sleep(3_600)
    return ""


@server.tool()
def media() -> CallToolResult:
    """A picture and a sound."""
    return CallToolResult(
        content=[
            ImageContent(data="QUJDRA==", mime_type="image/png"),
            TextContent(text="between"),
            AudioContent(data="QUJD", mime_type="audio/wav"),
        ]
    )


@server.tool()
def structured() -> CallToolResult:
    """A value and no text."""
    return CallToolResult(content=[], structured_content={"town": "Łódź", "size": 3})


@server.tool(name="files.read all/now")
def odd_name() -> str:
    """A name that models cannot call."""
    return "odd"


@server.tool(name="files_read_all_now")
def even_name() -> str:
    """The name that the odd one becomes."""
    return "even"


@server.tool()
async def learn(context: Context[Any]) -> str:
    """Bring a new tool."""

    def learnt() -> str:
        return "new"

    server.add_tool(learnt, description="What was learnt.")
    await context.notify_tools_changed()
    return "learnt"


@server.tool()
def header(name: str, context: Context[Any]) -> str:
    """A header of the request."""
    return str((context.headers or {}).get(name))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
