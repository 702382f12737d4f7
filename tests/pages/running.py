"""Execution of a page from top to bottom in an empty folder, with reported differences."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import yaml

from reward_kit.models import TaskDefinitionModel
from reward_kit.rl.training.config import TrainModel
from tests.chat_server import Behavior, ChatServer, answer, tool_calls
from tests.pages.matching import difference
from tests.pages.parts import Block, Command, Page, commands_of
from tests.pages.sessions import Bash, Output, Python

ROOT = Path(__file__).parents[2]
MODEL = re.compile(r"(localhost|127\.0\.0\.1):8000/v1")
PORT = re.compile(r"((?:localhost|127\.0\.0\.1):|--port[ =])(\d{2,5})\b")
RUN = re.compile(r"\bruns/(RUN|BEFORE|AFTER)\b")
CALL = re.compile(r"(\w+)\((\{.*\})\)", re.DOTALL)
NOT_LINKED = {".git", "runs", "site"}
COMMAND_S, LONG_COMMAND_S = 60, 540


class PageError(AssertionError):
    """A statement of a page is wrong."""


class PageRunner:
    """The folder, processes and ports of one page.

    Args:
        page: the page.
        folder: an empty one; the page's files go to `page/` in it.
        programs: where `python` and `reward-kit` are.
        model_port: of the model that answers.
    """

    def __init__(self, page: Page, folder: Path, programs: Path, model_port: int) -> None:
        self.page, self.programs, self.model_port = page, programs, model_port
        self.folder, home, scratch = folder / "page", folder / "home", folder / "scratch"
        for path in (self.folder, home, scratch):
            path.mkdir()
        if page.is_("in a clone"):
            for entry in ROOT.iterdir():
                if entry.name not in NOT_LINKED:
                    (self.folder / entry.name).symlink_to(entry)
        self.ports: dict[str, int] = {}
        self.environment = self._environment(home)
        self.scratch = scratch
        self.bash: Bash | None = None
        self.python: Python | None = None

    def run(self) -> None:
        """Run every block.

        Raises:
            PageError: of the first that fails, with its line.
        """
        if self.page.before is not None:
            self._prepare(self.page.before)
        for block in self.page.blocks:
            try:
                self._run(block)
            except (PageError, TimeoutError, ValueError) as error:
                raise PageError(f"{self.page.path}:{block.line}: {error}") from error

    def close(self) -> None:
        """Stop everything that the page started."""
        for session in (self.bash, self.python):
            if session is not None:
                session.close()

    def _prepare(self, commands: str) -> None:
        line = ["bash", "-ec", self._placed(commands)]
        done = subprocess.run(line, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            reason = f"before this page: exits with {done.returncode}\n{done.stdout}{done.stderr}"
            raise PageError(f"{self.page.path}: {reason}")

    @property
    def _shell(self) -> Bash:
        if self.bash is None:
            self.bash = Bash(self.folder, self.environment, self.scratch)
        return self.bash

    def _environment(self, home: Path) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("REWARD_KIT_", "OPENAI_", "COV_", "PYTEST_"))}
        # Folders from `init` are trusted; for others a reader is asked, which is impossible here.
        has_init = any("reward-kit init" in block.body for block in self.page.blocks)
        return kept | {
            **({} if has_init else {"REWARD_KIT_TRUST": "1"}),
            "XDG_STATE_HOME": str(home / "state"),
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "CLONE": str(ROOT),
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{self.model_port}/v1",
            "OPENAI_API_KEY": "sk-of-the-page",
        }

    def _run(self, block: Block) -> None:
        if block.note("not run") is not None:
            return
        if block.title is not None:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._placed(block.body), encoding="utf-8")
        elif block.language == "python":
            self._execute(block)
        elif block.language == "console":
            self._type(block)
        elif block.language == "yaml":
            check_fragment(block)
        elif block.language == "json":
            json.loads(block.body)

    def _execute(self, block: Block) -> None:
        if self.python is None:
            self.python = Python(self.folder, self.environment, str(self.programs / "python"))
        printed, failure = self.python.run(self._placed(block.body), f"{self.page.path.name}:{block.line}")
        if failure is not None:
            raise PageError(f"the Python failed\n{printed}{failure}")
        if (differs := difference(self._placed(block.expected or ""), printed)) is not None:
            raise PageError(f"the Python prints something else\n{differs}")

    def _type(self, block: Block) -> None:
        commands = commands_of(block)
        for command in commands:
            is_last = command is commands[-1]
            status = int(block.note("exits with") or 0) if is_last else 0
            text = self._placed(command.text)
            until = block.note("waits for") if is_last else None
            done = self._shell.run(text, self._most_s, self._placed(until) if until else None)
            self._compare(command, done, status)

    def _compare(self, command: Command, done: Output, status: int) -> None:
        if done.status != status:
            raise PageError(f"`{command.text}` exits with {done.status}, not with {status}\n{done.stdout}{done.stderr}")
        if command.expected is None:
            return
        got = done.stdout if done.status == 0 else done.stdout + done.stderr
        if (differs := difference(self._placed(command.expected), got)) is not None:
            raise PageError(f"`{command.text}` prints something else\n{differs}\non standard error:\n{done.stderr}")

    @property
    def _most_s(self) -> float:
        return LONG_COMMAND_S if self.page.is_("long") or self.page.environment else COMMAND_S

    def _placed(self, text: str) -> str:
        """Return a text with the actual ports and runs of this page."""
        text = MODEL.sub(rf"\1:{self.model_port}/v1", text)
        text = PORT.sub(lambda match: f"{match[1]}{self._port(match[2])}", text)
        return RUN.sub(lambda match: f"runs/{self._run_folder(match[1])}", text)

    def _port(self, named: str) -> int:
        if int(named) == self.model_port:
            return self.model_port
        if named not in self.ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.ports[named] = free.getsockname()[1]
        return self.ports[named]

    def _run_folder(self, name: str) -> str:
        # Of runs begun in one second the ids do not tell which was first.
        runs = sorted(self.folder.rglob("runs/*/run.json"), key=lambda path: path.stat().st_ctime_ns)
        runs.sort(key=lambda path: json.loads(path.read_text(encoding="utf-8")).get("started", ""))
        if len(runs) < 1 + (name == "BEFORE"):
            raise PageError(f"runs/{name}: there is no such run")
        return runs[-2 if name == "BEFORE" else -1].parent.name


def check_fragment(block: Block) -> None:
    """Check the keys and values of a fragment of a task or train file.

    Raises:
        PageError: it is neither.
    """
    try:
        data = yaml.safe_load(block.body)
    except yaml.YAMLError as error:
        raise PageError(f"this is no YAML: {error}") from error
    if block.note("yaml: other") is not None:
        return
    faults = {model.__name__: _faults(model, data) for model in (TaskDefinitionModel, TrainModel)}
    if all(faults.values()):
        raise PageError(f"neither a part of a task file nor of a train file: {faults}")


def _faults(model: type[pydantic.BaseModel], data: Any) -> list[str]:
    try:
        model.model_validate(data)
    except pydantic.ValidationError as error:
        # What is missing stands elsewhere in the file, and so may what two keys together ask for.
        wrong = [fault for fault in error.errors() if fault["type"] != "missing" and fault["loc"]]
        return [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in wrong]
    return []


@contextlib.contextmanager
def serving_model(answers: dict[str, str]) -> Iterator[int]:
    """Serve a model on loopback with the answers of the page; yield the port.

    Args:
        answers: text for a word of the last message, `else` where none is in it; `name({…})` is a call of a tool.
    """

    def respond(body: dict[str, Any]) -> Behavior:
        asked = str(body["messages"][-1].get("content") or "")
        said = next((text for key, text in answers.items() if key in asked), answers.get("else", "Paris."))
        call = CALL.fullmatch(said)
        return tool_calls([(call[1], json.loads(call[2]))]) if call else answer(said)

    loop, started, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    server = ChatServer(respond)

    async def serve() -> None:
        async with server:
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    started.wait()
    try:
        yield server.port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def run_page(page: Page, folder: Path, programs: Path | None = None) -> None:
    """Run a page in an empty folder.

    Args:
        page: the page.
        folder: an empty folder.
        programs: where `python` and `reward-kit` are; by default where this Python is.

    Raises:
        PageError: something on it is not so.
    """
    with serving_model(page.answers) as port:
        runner = PageRunner(page, folder, programs or Path(sys.executable).parent, port)
        try:
            runner.run()
        finally:
            runner.close()
