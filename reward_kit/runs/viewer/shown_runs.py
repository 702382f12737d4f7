"""The runs whose pages are open: their pages, what is new to a page, and the lines of episodes that somebody opens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.runs.report.chunks import group_text
from reward_kit.runs.report.fitting import LineFitter
from reward_kit.runs.report.training.reading import is_training
from reward_kit.runs.viewer import pages
from reward_kit.runs.viewer.catalogue import Catalogue
from reward_kit.runs.viewer.shown_training import ShownTraining, mark_of
from reward_kit.runs.viewer.watched_run import GroupLines, WatchedRun

_MOST_IN_MEMORY = 8
_MARKED = "json:"
Event = tuple[str, Mapping[str, Any]]


@dataclass(slots=True)
class _Shown:
    """A run in memory, and its figures as they were made last."""

    watch: WatchedRun
    fitter: LineFitter
    lock: threading.Lock = field(default_factory=threading.Lock)
    figures: str = ""
    figures_are_of: str = ""


class ShownRuns:
    """The runs that are in memory, the ones used last.

    Args:
        catalogue: says where a run is, and which may be shown.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._runs: OrderedDict[str, _Shown] = OrderedDict()
        self._training = ShownTraining()
        self._lock = threading.Lock()

    def page(self, name: str) -> str:
        """The page of a run as it is now.

        Raises:
            ConfigError: there is no such run.
            StoreError: a file of it is damaged.
        """
        path = self._path_of(name)
        if is_training(path):
            return self._training.page(path)
        shown = self._shown(name, path)
        with shown.lock:
            shown.watch.look_at_all()
            mark = _mark(shown.watch)
            return pages.run_page(shown.watch.facts(), mark)

    def figures(self, name: str) -> str:
        """The page without the rows of its tables, of which a page that is open takes its figures.

        Raises:
            ConfigError: there is no such run.
            StoreError: a file of it is damaged.
        """
        path = self._path_of(name)
        if is_training(path):
            return self._training.page(path)
        shown = self._shown(name, path)
        with shown.lock:
            shown.watch.look_at_all()
            mark = _mark(shown.watch)
            if mark != shown.figures_are_of:
                shown.figures, shown.figures_are_of = pages.figures_page(shown.watch.facts()), mark
            return shown.figures

    def news(self, name: str, mark: str) -> tuple[str, list[Event]]:
        """What came after a mark that a page has.

        Returns:
            The mark of now, and the events: `rows` with those of the tables that changed, `figures` where those did,
            `reload` where nothing of what the page knows holds.

        Raises:
            ConfigError: there is no such run.
            StoreError: a file of it is damaged.
        """
        path = self._path_of(name)
        if is_training(path):
            return (now := mark_of(path)), [("figures", {})] if now != mark else []
        shown = self._shown(name, path)
        with shown.lock:
            shown.watch.look()
            now, (epoch, _, change) = _mark(shown.watch), mark.partition("-")
            if epoch != shown.watch.epoch or not change.isdecimal():
                return now, [("reload", {})]
            if now == mark:
                return now, []
            changed = shown.watch.changed_since(int(change))
            rows = [("rows", pages.rows_of(changed, shown.watch.beside(changed), shown.watch.pass_threshold))]
            return now, [*(rows if changed else []), ("figures", {})]

    def episode(self, name: str, rollout_id: str) -> bytes:
        """The stored lines of an episode and of its group, as the page's script reads them.

        Raises:
            ConfigError: there is no such run or no such episode.
            StoreError: a file is damaged.
        """
        shown = self._ready(name)
        return _text_of(shown.watch.lines_of_episode(_decoded(rollout_id)), shown.fitter)

    def group(self, name: str, group_id: str, around: str | None) -> bytes:
        """The same of a group, of a large one the part around an episode.

        Raises:
            ConfigError: there is no such run or no such group.
            StoreError: a file is damaged.
        """
        shown = self._ready(name)
        place = _decoded(around) if around is not None else None
        return _text_of(shown.watch.lines_of_group(_decoded(group_id), place), shown.fitter)

    def _ready(self, name: str) -> _Shown:
        shown = self._shown(name, self._path_of(name))
        with shown.lock:
            shown.watch.look_at_all()
        return shown

    def _path_of(self, name: str) -> Path:
        path = self._catalogue.path_of(name)
        if path is None:
            raise ConfigError("There is no such run here. It may have been removed.")
        return path

    def _shown(self, name: str, path: Path) -> _Shown:
        """The run in memory; what was there of one that was removed and made again does not count."""
        with self._lock:
            known = self._runs.get(name)
            if known is None:
                watch = WatchedRun(path)
                known = self._runs[name] = _Shown(watch, LineFitter(watch.header))
            self._runs.move_to_end(name)
            while len(self._runs) > _MOST_IN_MEMORY:
                self._runs.popitem(last=False)
            return known


def _text_of(group: GroupLines, fitter: LineFitter) -> bytes:
    """Before the episodes a line on the group that they are of."""
    return b'G{"size":%d,"first":%d}\n' % (group.size, group.first) + group_text(group.lines, fitter)


def _mark(watch: WatchedRun) -> str:
    return f"{watch.epoch}-{watch.change}"


def _decoded(name: str) -> str:
    """A name as the page's script writes it into an address: as it is, or as JSON where no address can hold it."""
    if not name.startswith(_MARKED):
        return name
    try:
        return str(json.loads(name.removeprefix(_MARKED)))
    except ValueError:
        raise ConfigError(f"{name!r} names nothing") from None
