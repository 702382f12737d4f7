"""A server of FastMCP whose tools are tasks, by its implementation of the tasks extension."""

import asyncio
import sys
from datetime import timedelta

from fastmcp import FastMCP
from fastmcp.utilities.tasks import TaskConfig
from fastmcp_tasks import TasksExtension

server = FastMCP("tasks")
server.add_extension(TasksExtension())
ended: list[str] = []
often = TaskConfig(poll_interval=timedelta(seconds=0.2))  # by default, every 5 s


@server.tool(task=often)
async def add(x: int, y: int) -> int:
    await asyncio.sleep(0.2)
    return x + y


@server.tool(task=TaskConfig(mode="required", poll_interval=timedelta(seconds=0.2)))
async def fail() -> str:
    raise ValueError("no paper left")


@server.tool(task=often)
async def forever() -> str:
    try:
        await asyncio.sleep(600)
    finally:
        ended.append("forever")
    return ""


@server.tool()
def what_ended() -> str:
    return " ".join(ended)


if len(sys.argv) > 1:
    server.run(transport="http", port=int(sys.argv[1]), show_banner=False)
else:
    server.run(show_banner=False)
