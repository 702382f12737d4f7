"""A server on the first major version of the SDK (protocol 2025-11-25) that asks for input during a call."""

import sys

from mcp.server.fastmcp import Context, FastMCP
from mcp.types import SamplingMessage, TextContent
from pydantic import BaseModel

server = FastMCP("forms", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)


class Order(BaseModel):
    size: str
    copies: int = 1


@server.tool()
async def order(item: str, context: Context) -> str:
    answer = await context.elicit(f"Which {item}?", Order)
    return f"{answer.action} {getattr(answer, 'data', None)}"


@server.tool()
async def sample(context: Context) -> str:
    message = SamplingMessage(role="user", content=TextContent(type="text", text="?"))
    return str(await context.session.create_message([message], max_tokens=3))


@server.tool()
def stock() -> dict[str, int]:
    return {"tea": 2, "coffee": 1}


server.run("streamable-http" if len(sys.argv) > 1 else "stdio")
