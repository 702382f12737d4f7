"""A small MCP server written with the official SDK, with access to the files of one folder only."""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

ROOT = Path(sys.argv[1]).resolve()
server = MCPServer("files")


def inside(path: str) -> Path:
    """Resolve a path relative to the folder, and reject paths outside it."""
    resolved = (ROOT / path).resolve()
    if not resolved.is_relative_to(ROOT):
        raise ToolError(f"{path} lies outside the folder")
    return resolved


@server.tool()
def list_files() -> str:
    """List all files of the folder, one path a line."""
    return "\n".join(str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*")) if path.is_file())


@server.tool()
def read_file(path: str) -> str:
    """Read a text file."""
    file = inside(path)
    if not file.is_file():
        raise ToolError(f"there is no file {path}")
    return file.read_text(encoding="utf-8")


@server.tool()
def write_file(path: str, text: str) -> str:
    """Write a text file; the folders above it are made, and a file that is there is replaced."""
    file = inside(path)
    if file == ROOT or file.is_dir():
        raise ToolError(f"{path} is a folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return f"{path} is written"


@server.tool()
def move_file(source: str, target: str) -> str:
    """Move or rename a file; the folders above the target are made."""
    old, new = inside(source), inside(target)
    if not old.is_file():
        raise ToolError(f"there is no file {source}")
    if new.exists():
        raise ToolError(f"{target} is there already")
    new.parent.mkdir(parents=True, exist_ok=True)
    old.rename(new)
    return f"{source} is now {target}"


if __name__ == "__main__":
    server.run("stdio")
