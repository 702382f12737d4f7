"""Two programs that solve the tasks by their rules, without a model: what a full score takes, as a policy."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from reward_kit import AgentPolicy, EpisodeContext, Message, PolicyOutput

Work = Generator[list[tuple[str, dict[str, str]]], list[str], None]
"""Yields the calls of a step and is sent what they answered."""


class Program(AgentPolicy):
    """Makes the calls that `work` yields, and ends where it does."""

    is_free = True

    def __init__(self) -> None:
        self._work: Work = self.work()
        self._answers = 0

    def work(self) -> Work:
        """The calls of each step."""
        raise NotImplementedError

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session that begins at the beginning."""
        return type(self)()

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> PolicyOutput:
        """The next calls."""
        told = [message.text for message in observation[len(observation) - self._answers :]]
        try:
            calls = self._work.send(told) if self._answers else next(self._work)
        except StopIteration:
            return PolicyOutput({"type": "terminate"})
        self._answers = len(calls)
        named = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return PolicyOutput({"type": "tool_calls", "calls": named})


class Clerk(Program):
    """Reads every file, decides where it belongs, deletes what is there twice and moves the rest."""

    def work(self) -> Work:
        """List, read, delete, make folders, move."""
        folders, paths = ["."], list[str]()
        while folders:
            answers = yield [("list_directory", {"path": folder}) for folder in folders]
            listed = [(folder, json.loads(text)) for folder, text in zip(folders, answers, strict=True)]
            entries = [(f"{folder}/{entry['name']}", entry["type"]) for folder, found in listed for entry in found]
            folders = [path for path, kind in entries if kind == "directory"]
            paths += [path for path, kind in entries if kind == "file"]
        texts = yield [("read_file", {"path": path}) for path in paths]
        kept: dict[str, str] = {}
        for path, text in sorted(zip(paths, texts, strict=True), key=lambda pair: "copy" in pair[0]):
            kept.setdefault(text, path)
        moves = {path: place_of(path.rpartition("/")[2], text) for text, path in kept.items()}
        yield [("delete_path", {"path": path}) for path in paths if path not in moves]
        yield [
            ("make_directory", {"path": folder}) for folder in sorted({p.rpartition("/")[0] for p in moves.values()})
        ]
        yield [("move_path", {"source": path, "target": place}) for path, place in moves.items()]


def place_of(name: str, text: str) -> str:
    """Where a file belongs by the task's rules."""
    if photo := re.fullmatch(r"IMG_(\d{4})(\d\d)\d\d_\d{4}\.jpg", name):
        return f"photos/{photo[1]}-{photo[2]}/{name}"
    if note := re.fullmatch(r"# (.+)\n\nWritten on ([\d-]+)\.\n", text):
        return f"notes/{note[2]}_{slug(note[1])}.md"
    invoice = re.match(r"INVOICE\nFrom: (.+)\nDate: (.+)\n", text)
    if invoice is None:
        raise ValueError(f"{name} is no invoice, photo or note")
    day = datetime.datetime.strptime(invoice[2], "%d %B %Y").date()
    return f"invoices/{day.year}/{day}_{slug(invoice[1])}.txt"


def slug(text: str) -> str:
    """Lower case, one hyphen between words, no other signs."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


class Bookkeeper(Program):
    """Asks the database for the totals and writes them into the report."""

    def work(self) -> Work:
        """Query, make the folder, write."""
        query = "SELECT region, sum(amount) FROM sales WHERE status = 'paid' GROUP BY region ORDER BY region"
        (answer,) = yield [("execute_sql", {"query": query})]
        lines = ["region,total", *(f"{region},{total}" for region, total in json.loads(answer)["rows"])]
        yield [("make_directory", {"path": "reports"})]
        yield [("write_file", {"path": "reports/totals.csv", "content": "\n".join(lines) + "\n"})]
