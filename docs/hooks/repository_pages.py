"""Pages from repository files outside `docs/`: release notes, and development notes, which the search skips.

Links between repository files become links between pages; a link to a file without a page becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")


def sources() -> dict[str, Path]:
    """Return the source file of each page."""
    notes = sorted((ROOT / "development").rglob("*.md"))
    return {"releases.md": ROOT / "CHANGELOG.md", **{path.relative_to(ROOT).as_posix(): path for path in notes}}


def page(uri: str) -> str:
    """Return the page at this address in the docs.

    Args:
        uri: such as `development/sandbox.md`.
    """
    source = sources()[uri]
    parts = _FENCED.split(source.read_text(encoding="utf-8"))
    front = "---\nsearch:\n  exclude: true\n---\n" if uri.startswith("development/") else ""
    return front + "".join(part if part.startswith("```") else _rewritten(part, source, uri) for part in parts)


def _rewritten(text: str, source: Path, uri: str) -> str:
    here = source.parent.relative_to(ROOT).as_posix()

    def led(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        if _ELSEWHERE.match(target):
            return found[0]
        path, hash_, anchor = target.partition("#")
        to = address(posixpath.normpath(posixpath.join(here, path)))
        if to is None:
            return words
        return f"{mark}[{words}]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{hash_}{anchor})"

    return _LINK.sub(led, text)


def address(path: str) -> str | None:
    """Return the page of a repository file relative to the docs, or None without one.

    Args:
        path: of the file, from the top of the repository.
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return next((uri for uri, source in sources().items() if source == ROOT / path), None)
