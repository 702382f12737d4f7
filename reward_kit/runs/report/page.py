"""The page as a file: its template, its own style and script, and the episodes that it opens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.errors import ConfigError
from reward_kit.runs.files import write_atomically
from reward_kit.runs.report.bundling import SCRIPTS, STYLES, bundle, digest
from reward_kit.runs.report.chunks import ChunkReader
from reward_kit.runs.report.contents import Page, page_of
from reward_kit.runs.report.data import as_script_data
from reward_kit.runs.report.episodes_data import MOST_INLINE, EpisodeData, beside, forget_others, served, within
from reward_kit.runs.report.reading import read_run
from reward_kit.runs.report.wording import href, number, seconds, share
from reward_kit.runs.run_folder import RunHeader

if TYPE_CHECKING:
    from jinja2 import Template

FILE = "report.html"
_PARTS = files("reward_kit.runs.report")
# What a page may load besides its own script: the files beside it, from disk or from a server, or what the server says.
_SOURCES = {"inline": "", "files": " 'self' file:", "server": ""}
_CONNECTIONS = {"inline": "", "files": "", "server": "connect-src 'self'; "}


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the page of a run, and beside it its episodes where they are too many for one file.

    Args:
        run: its folder.
        target: the file; `report.html` in the folder by default.

    Returns:
        The file.

    Raises:
        ConfigError: the folder is not that of a run, or the file's folder is missing.
        StoreError: a file of the run is damaged, or the page cannot be written.
    """
    is_private, target = target is None, page_file(run, target)
    facts = read_run(run)
    with ChunkReader(facts) as reader:
        is_small = reader.stored_bytes <= MOST_INLINE
        data = within(run, reader) if is_small else beside(run, reader, target, is_private=is_private)
    write_atomically(target, rendered(page_of(facts), data).encode("utf-8"), is_private=is_private)
    forget_others(target, data)
    return target


def page_file(run: Path, target: Path | None) -> Path:
    """The file that the page of a run becomes: `target`, or `report.html` in its folder.

    Raises:
        ConfigError: the folder is not that of a run, or the file's folder is missing.
    """
    RunHeader.of_folder(run)
    target = target or run / FILE
    if not target.parent.is_dir():
        raise ConfigError(f"-o {target}: there is no folder {target.parent}; make it first")
    return target


def served_page(run: Path, page: Page, extra_scripts: Sequence[str] = ()) -> str:
    """The page of a run for a server that answers `group/ID` and `episode/ID` with the text of a group.

    Args:
        run: its folder.
        page: what it says.
        extra_scripts: put behind its own script.
    """
    return rendered(page, served(run), extra_scripts)


def rendered(page: Page, data: EpisodeData, extra_scripts: Sequence[str] = ()) -> str:
    """The page as HTML.

    Args:
        page: what it says.
        data: where its episodes are.
        extra_scripts: put behind its own script.
    """
    return _template().render(page=page, **_own_parts(page, data, extra_scripts))


@functools.cache
def _template() -> Template:
    """Kept, since a viewer makes pages all the time and to compile it takes as long as to fill it in."""
    import jinja2

    loader = jinja2.FunctionLoader(_part)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.globals.update(number=number, share=share, seconds=seconds, href=href)
    return environment.get_template("report.html.j2")


def _own_parts(page: Page, data: EpisodeData, extra_scripts: Sequence[str]) -> dict[str, Any]:
    style, script = bundle(STYLES), bundle(SCRIPTS) + "".join(extra_scripts)
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'{_SOURCES[data.mode]}; "
        f"{_CONNECTIONS[data.mode]}img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {
        "mode": data.mode,
        "policy": _as_is(policy),
        "style": _as_is(style),
        "script": _as_is(script),
        "data": _as_is(as_script_data(page.tables)),
        "index": _as_is(data.index),
        "chunks": [_as_is(text) for text in data.texts],
    }


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _as_is(text: str) -> str:
    """Text that is put into the page without being escaped: our own, or made for it."""
    import markupsafe

    return markupsafe.Markup(text)
