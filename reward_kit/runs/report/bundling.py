"""The page's own style and script: files of this package, put together, and allowed on the page by their hashes."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable
from importlib.resources import files

_ASSETS = files("reward_kit.runs.report") / "assets"
STYLES = ("page.css", "episode.css", "tokens.css", "tree.css")
SCRIPTS = (
    "base.js",
    "tables.js",
    "objects.js",
    "data.js",
    "chat.js",
    "worth.js",
    "head.js",
    "episode.js",
    "group.js",
    "tokens.js",
    "tree_layout.js",
    "tree_panel.js",
    "tree.js",
)


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def bundle(names: Iterable[str]) -> str:
    """These files of `assets/` as one text, in this order."""
    return "".join(map(_asset, names))


def digest(text: str) -> str:
    """By which a Content-Security-Policy allows a script or a style with this text: `sha256-…` of its UTF-8.

    Source: https://www.w3.org/TR/CSP3/#grammardef-hash-source
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
