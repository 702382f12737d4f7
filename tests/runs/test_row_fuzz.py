"""Random rows and task files: no row starts a program, leaves the folder or sends a variable; parsing runs nothing.

Three canaries stand outside: a command that would make a file, a file with a secret text, a variable with a secret
value. Rows are made of all configuration keys of all resources, of the other fields that mean something, and of values
that name a canary. `pytest -m campaign tests/runs/test_row_fuzz.py` tries 20,000 of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from reward_kit.agent.policies.simple_policies import ExpertPolicy, ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.environments.alfworld import AlfworldConfig
from reward_kit.environments.config import merged_config, resource_class
from reward_kit.environments.filesystem import FilesystemConfig
from reward_kit.environments.gymnasium import GymnasiumConfig
from reward_kit.environments.http import HttpConfig
from reward_kit.environments.mcp import McpConfig
from reward_kit.environments.openenv import OpenEnvConfig
from reward_kit.environments.python_state import PythonStateConfig
from reward_kit.environments.sokoban import SokobanConfig
from reward_kit.environments.sqlite import SqliteConfig
from reward_kit.environments.textworld import TextworldConfig
from reward_kit.environments.webshop import WebshopConfig
from reward_kit.episodes.json_codec import compact_json
from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.task_file import LocatedYaml, validate_model
from reward_kit.runs.tasks import LoadedTask, load_task
from tests.profiles import examples

SECRET_TEXT, SECRET_VALUE, VARIABLE = "canary-text-58c1", "canary-value-90fe", "REWARD_KIT_CANARY_TOKEN"
OUTSIDE = "@outside@"  # in what hypothesis draws; the folder itself is another one in each run of the tests
URL = "@url@"
MODELS: tuple[Any, ...] = (
    AlfworldConfig,
    FilesystemConfig,
    GymnasiumConfig,
    HttpConfig,
    McpConfig,
    OpenEnvConfig,
    PythonStateConfig,
    SokobanConfig,
    SqliteConfig,
    TextworldConfig,
    WebshopConfig,
)
PARTS = {"db": "sqlite", "files": "filesystem", "state": "python_state"}
BENIGN: dict[str, dict[str, Any]] = {
    "python_state": {},
    "filesystem": {"base_resource_config": {"source_dir": "data"}},
    "sqlite": {},
    "gymnasium": {"base_resource_config": {"env_id": "FrozenLake-v1"}},
    "sokoban": {},
    "alfworld": {},
    "webshop": {"base_resource_config": {"products": 10}},
    "http": {"base_resource_config": {"base_url": URL, "timeout": 5, "health_endpoint": None}},
    "openenv": {"base_resource_config": {"base_url": URL, "timeout": 5}},
    "mcp": {"base_resource_config": {"command": [sys.executable, "-c", "print()"], "start_timeout_s": 5}},
    "textworld": {"base_resource_config": {"maker": "simple"}},
    "several": {"resources": [{"type": t, "name": n} for n, t in PARTS.items()]},
}
NOT_SET_UP = ("mcp", "textworld", "openenv")  # a process or a handshake each time; what they would get is looked at

COMMAND = [sys.executable, "-c", f"open('{OUTSIDE}/made', 'w')"]
SHELL = f'{sys.executable} -c \'open("{OUTSIDE}/made", "w")\''
SERVER = {"start_command": SHELL, "health_check_url": "http://127.0.0.1:{port}/", "start_timeout_s": 1}
PATHS = ["/", "..", OUTSIDE, f"{OUTSIDE}/secret.txt", "../../outside/secret.txt", "data/link", "data/link/secret.txt"]
SQL = [
    f"ATTACH '{OUTSIDE}/made' AS a; CREATE TABLE a.t (x)",
    f"CREATE TABLE t (x); VACUUM INTO '{OUTSIDE}/made'",
    f"CREATE TABLE t AS SELECT readfile('{OUTSIDE}/secret.txt')",
    f"SELECT load_extension('{OUTSIDE}/made')",
    "SELECT fts3_tokenizer('t', x'4141414141414141'); CREATE VIRTUAL TABLE f USING fts3 (a, tokenize=t)",
    f"PRAGMA temp_store_directory = '{OUTSIDE}'",
    "CREATE TABLE t (x); INSERT INTO t VALUES (1)",
]
TEXTS = [
    *PATHS,
    *SQL,
    SHELL,
    URL,
    f"{URL}/x",
    VARIABLE,
    f"${{{VARIABLE}}}",
    f"{{{{ self.__init__.__globals__.os.environ['{VARIABLE}'] }}}}",
    f"{{__import__('os').system('touch {OUTSIDE}/made')}}",
    f"{OUTSIDE}/evil.py:run",
    "os:system",
    "evil:Env-v0",
    "file:///etc/passwd",
    "SFFF",
]
keys = st.sampled_from(sorted({name for model in MODELS for name in model.model_fields} | {*PARTS, "resources"}))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 8), st.floats(0, 1), st.sampled_from(TEXTS), st.text(max_size=8)
)
pointed = st.sampled_from(
    [
        COMMAND,
        SERVER,
        {"X": VARIABLE},
        [VARIABLE],
        {"X": f"${VARIABLE}"},
        {"desc": ["SF", "FG"]},
        {"desc": ["SF", "FG"], "render_mode": "human"},
        {"a.txt": "text"},
        {f"{OUTSIDE}/made": "x", "../made": "x"},
        {"maze": COMMAND},
        [{"type": "mcp", "name": "db", "config": {"command": COMMAND}}],
        [{"type": "filesystem", "config": {"source_dir": OUTSIDE, "task_folder": "/"}}],
    ]
)
values = st.recursive(
    st.one_of(scalars, pointed),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(keys, st.text(max_size=6)), inner)),
    max_leaves=6,
)
configs = st.dictionaries(st.one_of(keys, keys, keys, st.text(max_size=6)), values, min_size=1, max_size=4)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool", "root"]), "content": values}), max_size=2
)
FIELDS = {
    "id": st.one_of(st.sampled_from(["../../../outside/made", "/etc/x", "a\0b", ""]), scalars),
    "messages": st.one_of(messages, values),
    "question": scalars,
    "policy": values,
    "resource_server": values,
    "resource_type": scalars,
    "user": values,
    "replies": values,
    "gold_actions": values,
    "ground_truth": values,
    "seed": scalars,
}


@st.composite
def rows(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a benign task's resource and a row; half of the rows have only keys of that resource."""
    name = draw(st.sampled_from(sorted(BENIGN)))
    config = draw(configs)
    if draw(st.booleans()):
        allowed = sorted(allowed_keys(name))
        chosen = draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=3, unique=True))
        config = {}
        for key in chosen:
            *way, last = key.split(".")
            inner = config
            for part in way:
                inner = inner.setdefault(part, {})
            inner[last] = draw(st.sampled_from(SQL) if last == "seed_sql" else st.one_of(values, pointed))
    fields = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    return name, {**{field: draw(FIELDS[field]) for field in fields}, "resource_config": config}


def allowed_keys(name: str) -> frozenset[str]:
    kind, base = ("composite", {"resources": BENIGN[name]["resources"]}) if name == "several" else (name, None)
    return resource_class(kind).per_sample_keys_for(base or BENIGN[name].get("base_resource_config", {}))


class Stage:
    """The folders and the server of the canaries, with their state."""

    def __init__(self, folder: Path) -> None:
        self.outside, self.task = folder / "outside", folder / "deep" / "task"
        self.outside.mkdir()
        (self.task / "data").mkdir(parents=True)
        (self.outside / "secret.txt").write_text(SECRET_TEXT)
        (self.outside / "evil.py").write_text(f"open({str(self.outside / 'made')!r}, 'w')\n")
        (self.task / "data" / "link").symlink_to(self.outside)
        (self.task / "data" / "known.txt").write_text("known")
        self.requests: list[str] = []
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode("utf-8", "replace")
                stage.requests.append(f"{self.path} {self.headers} {body}")
                answer = json.dumps({"episode_id": "e", "observation": "x", "tools": []}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.before = self.listed()

    def listed(self) -> list[str]:
        """Return all files outside of the task's folder."""
        return sorted(str(path) for folder in (self.outside, self.task.parent) for path in folder.iterdir())

    def filled(self, value: Any) -> Any:
        """Return the drawn value with this stage's folder and address."""
        if isinstance(value, str):
            return value.replace(OUTSIDE, str(self.outside)).replace(URL, self.url)
        if isinstance(value, dict):
            return {self.filled(key): self.filled(item) for key, item in value.items()}
        return [self.filled(item) for item in value] if isinstance(value, list) else value

    def check(self, *texts: str) -> None:
        """Check that no canary was touched or recorded."""
        assert self.listed() == self.before
        told = [*texts, *self.requests]
        self.requests.clear()
        for text in told:
            assert SECRET_TEXT not in text and SECRET_VALUE not in text

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    os.environ[VARIABLE] = SECRET_VALUE
    made = Stage(tmp_path_factory.mktemp("stage"))
    yield made
    made.close()
    del os.environ[VARIABLE]


def try_row(stage: Stage, name: str, row: dict[str, Any]) -> None:
    """Load a benign task with this row, and play an episode if it is accepted."""
    stage.task.joinpath("task.yaml").write_text(
        json.dumps(
            {
                "name": "t",
                "dataset_path": "rows.jsonl",
                "max_episode_steps": 2,
                "limits": {"environment_time_s": 20},
                **({} if name == "several" else {"resource_type": name}),
                **({} if "messages" in row else {"initial_user_prompt": "Hello."}),
                **stage.filled(BENIGN[name]),
            }
        )
    )
    stage.task.joinpath("rows.jsonl").write_text(json.dumps(stage.filled(row)))
    try:
        task = load_task(stage.task / "task.yaml")
    except ConfigError as error:
        event(f"{name}: refused")
        stage.check(str(error))
        return
    event(f"{name}: accepted")
    (sample,) = task.samples
    stage.check(str(check_merged(task, sample)), *(message.text for message in Prompt(task.definition).render(sample)))
    if name not in NOT_SET_UP:
        stage.check(*anyio.run(played, task, sample))


def check_merged(task: LoadedTask, sample: Sample) -> dict[str, Any]:
    """Check that the sample's configuration differs from the task's only in keys that rows may set."""
    kind = resource_class(task.definition.resource_type or "")
    base = task.definition.base_resource_config
    merged = merged_config(kind, base, sample.resource_config, "row")
    allowed = {tuple(key.split(".")) for key in kind.per_sample_keys_for(base)}
    for path in changed(base, merged, ()):
        assert any(path[: len(key)] == key for key in allowed), path
    return merged


def changed(base: Any, merged: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Return the paths where two configurations differ."""
    if isinstance(base, dict) and isinstance(merged, dict):
        assert base.keys() <= merged.keys()
        for key, value in merged.items():
            yield from changed(base.get(key, {} if isinstance(value, dict) else None), value, (*path, key))
    elif base != merged:
        yield path


async def played(task: LoadedTask, sample: Sample) -> list[str]:
    """Return the record and the final state of an episode by the expert."""
    has_expert = task.definition.resource_type in ("sqlite", "sokoban", "alfworld", "webshop", "gymnasium")
    policy = ExpertPolicy() if has_expert else ScriptedPolicy([{"type": "tool_call", "name": "get_state"}])
    worker = RLRolloutWorker(task.definition, policy)
    try:
        async with worker.group(sample) as group:
            episode = await worker.collect_episode(group)
    except RewardKitError as error:
        return [str(error)]
    state = episode.custom_data.get("final_state") or {}
    return [compact_json(episode_to_record(episode)), bytes(state.get("payload") or b"").decode("utf-8", "replace")]


TASK_KEYS = sorted(TaskDefinitionModel.model_fields)
task_files = st.dictionaries(
    st.one_of(st.sampled_from(TASK_KEYS), st.sampled_from(TASK_KEYS), keys), st.one_of(values, configs), max_size=8
)
TAGS = [
    f"!!python/object/apply:os.system ['touch {OUTSIDE}/made']",
    f"!!python/object/new:subprocess.Popen [['touch', '{OUTSIDE}/made']]",
    "!!python/name:os.system",
    f"!!python/module:{OUTSIDE}/evil",
    "!include /etc/passwd",
]


def try_file(stage: Stage, data: dict[str, Any], tag: str | None) -> None:
    """Parse and validate a task file, with a YAML tag as the value of an additional key."""
    path = stage.task / "random.yaml"
    text = yaml.safe_dump({"name": "t", **stage.filled(data)}, allow_unicode=True)
    path.write_text(text + (f"evil: {stage.filled(tag)}\n" if tag else ""))
    try:
        validate_model(LocatedYaml(path), {}, TaskDefinitionModel, "a task file")
        event("file: valid")
    except ConfigError as error:
        event("file: refused")
        stage.check(str(error))
    stage.check()


LONG = settings(max_examples=examples(20_000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
SHORT = settings(LONG, max_examples=examples(100))
as_rows = given(drawn=rows())
as_files = given(data=task_files, tag=st.one_of(st.none(), st.sampled_from(TAGS)))


@SHORT
@as_rows
def test_no_row_touches_a_canary(stage: Stage, drawn: tuple[str, dict[str, Any]]) -> None:
    try_row(stage, *drawn)


@SHORT
@as_files
def test_reading_a_task_file_executes_nothing(stage: Stage, data: dict[str, Any], tag: str | None) -> None:
    try_file(stage, data, tag)


@pytest.mark.campaign
@LONG
@as_rows
def test_none_of_20_000_rows_touches_a_canary(stage: Stage, drawn: tuple[str, dict[str, Any]]) -> None:
    try_row(stage, *drawn)


@pytest.mark.campaign
@LONG
@as_files
def test_reading_20_000_task_files_executes_nothing(stage: Stage, data: dict[str, Any], tag: str | None) -> None:
    try_file(stage, data, tag)
