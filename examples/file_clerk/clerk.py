"""Two scripted policies that solve the tasks by their rules, without a model."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from reward_kit import AgentPolicy, EpisodeContext, Message, PolicyOutput

Work = Generator[list[tuple[str, dict[str, str]]], list[str], None]
"""Yields the calls of a step and receives their results."""


class Program(AgentPolicy):
    """A policy that makes the calls that `work` yields."""

    is_free = True

    def __init__(self) -> None:
        self._work: Work = self.work()
        self._answers = 0

    def work(self) -> Work:
        """Yield the calls of each step."""
        raise NotImplementedError

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a new session."""
        return type(self)()

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> PolicyOutput:
        """Return the next calls."""
        results = [message.text for message in observation[len(observation) - self._answers :]]
        try:
            calls = self._work.send(results) if self._answers else next(self._work)
        except StopIteration:
            return PolicyOutput({"type": "terminate"})
        self._answers = len(calls)
        tool_calls = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return PolicyOutput({"type": "tool_calls", "calls": tool_calls})


class Clerk(Program):
    """Reads every file, deletes duplicates and moves the rest to their paths."""

    def work(self) -> Work:
        """List, read, delete, make folders, move."""
        folders, paths = ["."], list[str]()
        while folders:
            answers = yield [("list_directory", {"path": folder}) for folder in folders]
            listed = [(folder, json.loads(text)) for folder, text in zip(folders, answers, strict=True)]
            entries = [(f"{folder}/{entry['name']}", entry["type"]) for folder, items in listed for entry in items]
            folders = [path for path, kind in entries if kind == "directory"]
            paths += [path for path, kind in entries if kind == "file"]
        texts = yield [("read_file", {"path": path}) for path in paths]
        kept: dict[str, str] = {}
        for path, text in sorted(zip(paths, texts, strict=True), key=lambda pair: "copy" in pair[0]):
            kept.setdefault(text, path)
        moves = {path: target_path(path.rpartition("/")[2], text) for text, path in kept.items()}
        yield [("delete_path", {"path": path}) for path in paths if path not in moves]
        yield [
            ("make_directory", {"path": folder}) for folder in sorted({p.rpartition("/")[0] for p in moves.values()})
        ]
        yield [("move_path", {"source": path, "target": target}) for path, target in moves.items()]


def target_path(name: str, text: str) -> str:
    """Return the path of a file by the task's rules."""
    if photo := re.fullmatch(r"IMG_(\d{4})(\d\d)\d\d_\d{4}\.jpg", name):
        return f"photos/{photo[1]}-{photo[2]}/{name}"
    if note := re.fullmatch(r"# (.+)\n\nWritten on ([\d-]+)\.\n", text):
        return f"notes/{note[2]}_{slug(note[1])}.md"
    invoice = re.match(r"INVOICE\nFrom: (.+)\nDate: (.+)\n", text)
    if invoice is None:
        raise ValueError(f"{name} is not an invoice, photo or note")
    day = datetime.datetime.strptime(invoice[2], "%d %B %Y").date()
    return f"invoices/{day.year}/{day}_{slug(invoice[1])}.txt"


def slug(text: str) -> str:
    """Return lower-case words joined by hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


class Bookkeeper(Program):
    """Queries the totals and writes the report."""

    def work(self) -> Work:
        """Query, create the folder, write."""
        query = "SELECT region, sum(amount) FROM sales WHERE status = 'paid' GROUP BY region ORDER BY region"
        (answer,) = yield [("execute_sql", {"query": query})]
        lines = ["region,total", *(f"{region},{total}" for region, total in json.loads(answer)["rows"])]
        yield [("make_directory", {"path": "reports"})]
        yield [("write_file", {"path": "reports/totals.csv", "content": "\n".join(lines) + "\n"})]
