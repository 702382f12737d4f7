"""Pages that are generated from the program and the repository during the build."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import command_line_page
import errors_page
import python_pages
import repository_pages
import schema_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from python_groups import GROUPS

MAKERS: dict[str, Callable[[], str]] = {
    "reference/command_line.md": command_line_page.page,
    "reference/task_file.md": schema_pages.task_page,
    "reference/train_file.md": schema_pages.train_page,
    "reference/sweep_file.md": schema_pages.sweep_page,
    "reference/errors.md": errors_page.page,
    "reference/api.md": python_pages.index_page,
    **{python_pages.uri_of(one): partial(python_pages.group_page, one) for one in GROUPS},
    **{uri: partial(repository_pages.page, uri) for uri in repository_pages.sources()},
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the docs."""
    for uri, make in MAKERS.items():
        files.append(File.generated(config, uri, content=make()))
    return files
