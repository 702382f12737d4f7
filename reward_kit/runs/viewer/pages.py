"""The pages that the viewer serves: the table of runs, the page of a run, and one that says why there is none."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reward_kit.display_text import shown
from reward_kit.errors import RewardKitError
from reward_kit.runs.report import figures
from reward_kit.runs.report.bundling import bundle, digest
from reward_kit.runs.report.contents import page_of
from reward_kit.runs.report.data import (
    Cell,
    Column,
    DataTable,
    as_script_data,
    episodes_table,
    groups_table,
    samples_table,
    with_choices,
)
from reward_kit.runs.report.page import served_page
from reward_kit.runs.report.reading import EpisodeOutline, RunFacts
from reward_kit.runs.report.training import page as training
from reward_kit.runs.report.training.reading import read_training
from reward_kit.runs.report.wording import href, number, seconds, share
from reward_kit.runs.viewer.catalogue import Catalogue, RunRow

_NAME_LENGTH = 120
_MESSAGE_LENGTH = 600
_ASSETS = files("reward_kit.runs.viewer") / "assets"
_TEMPLATES = ("reward_kit.runs.viewer", "reward_kit.runs.report")
_COLUMNS = (
    Column("run", "run", "link"),
    Column("policy", "policy", "id"),
    Column("task", "task", "id"),
    Column("status", "status", "word"),
    Column("episodes", "episodes", "count"),
    Column("mean", "mean score", "score"),
    Column("low", "95% from", "score"),
    Column("high", "to", "score"),
    Column("cost", "cost", "cost"),
    Column("began", "began (UTC)", "word"),
    Column("note", "note", "text"),
)
Rows = Mapping[str, Sequence[Sequence[Cell]]]


def index_page(catalogue: Catalogue) -> str:
    """The table of runs, as it was at the last look."""
    cells = [_cells(row) for row in catalogue.rows]
    table = with_choices(DataTable("runs", "Runs", _COLUMNS, cells, key=2), ("task", "policy", "status"))
    script = bundle(("base.js", "tables.js")) + _own("events.js") + _mark(str(catalogue.change)) + _own("index.js")
    return _rendered("index.html.j2", script, table=table, data=as_script_data([table]), folder=catalogue.title)


def index_rows(catalogue: Catalogue, change: int) -> Mapping[str, Any]:
    """What is new in the table of runs since a change: rows, and the names of all runs, of which some may have gone."""
    return {"changed": [_cells(row) for row in catalogue.changed_since(change)], "all": catalogue.names}


def run_page(run: RunFacts, mark: str) -> str:
    """The page of a run, which goes on by itself from a mark."""
    scripts = (_mark(mark), _own("events.js"), _own("live.js"))
    return served_page(run.path, page_of(run), scripts)


def figures_page(run: RunFacts) -> str:
    """The page without what is in its tables, of which a page that is open takes its figures."""
    return served_page(run.path, page_of(run, has_rows=False))


def rows_of(changed: Sequence[EpisodeOutline], beside: Sequence[EpisodeOutline], pass_threshold: float) -> Rows:
    """The rows of a page's tables for episodes that changed.

    Args:
        changed: the episodes.
        beside: all episodes of their samples and policies, these among them.
        pass_threshold: a score of at least this passes.
    """
    tables = (
        samples_table(figures.sample_rows(beside, pass_threshold)),
        groups_table(figures.group_rows(beside)),
        episodes_table(changed, pass_threshold),
    )
    return {table.name: table.rows for table in tables}


def problem_page(message: str) -> str:
    """A page that says why there is no other."""
    return _rendered("problem.html.j2", "", message=message)


def training_page(run: Path, mark: str) -> str:
    """The page of the training run in a folder, which goes on by itself from a mark.

    Raises:
        StoreError: a file of it is damaged.
    """
    scripts = (_mark(mark), _own("events.js"), _own("live.js"))
    return training.rendered_training(training.training_page(read_training(run)), scripts, is_served=True)


def in_words(error: RewardKitError) -> str:
    """What went wrong, as a page may show it."""
    return shown(str(error), _MESSAGE_LENGTH)


def quoted(name: str) -> str:
    """A name as a part of an address."""
    return quote(name, safe="", errors="surrogateescape")


def _cells(row: RunRow) -> list[Cell]:
    name = shown(row.run, _NAME_LENGTH)
    told = (row.episodes, row.mean, row.low, row.high, row.cost, row.began, row.note)
    return [[name, f"./{quoted(row.run)}/"], row.policy, row.task, row.status, *told]


@functools.cache
def _own(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _mark(mark: str) -> str:
    """What the page knows already: digits, letters and a dash."""
    return f'RK.mark = "{mark}";\n'


def _rendered(template: str, script: str, **said: Any) -> str:
    import jinja2
    import markupsafe

    style = bundle(("page.css",)) + _own("viewer.css")
    allowed = f"'{digest(script)}'" if script else "'none'"
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src {allowed}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    as_is = {"style": style, "script": script, "policy": policy, "data": said.pop("data", "")}
    loader = jinja2.ChoiceLoader([jinja2.FunctionLoader(functools.partial(_source, name)) for name in _TEMPLATES])
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.globals.update(number=number, share=share, seconds=seconds, href=href)
    given = {name: markupsafe.Markup(text) for name, text in as_is.items()}
    return environment.get_template(template).render(**said, **given)


def _source(package: str, name: str) -> str | None:
    """A template of a package, None where it has none of this name."""
    path = files(package) / name
    return path.read_text(encoding="utf-8") if path.is_file() else None
