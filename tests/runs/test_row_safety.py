"""Test that dataset rows are only data: they run no command, change no address or header, and leave no folder."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import ScriptedUser
from reward_kit.environments.alfworld import AlfworldConfig, AlfworldResource
from reward_kit.environments.alfworld import _game_file as game_file
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.composite import CompositeResource, read_parts
from reward_kit.environments.config import merged_config
from reward_kit.environments.household_problems import TaskType
from reward_kit.environments.household_problems import generate_problem as household
from reward_kit.environments.python_state import PythonStateResource
from reward_kit.episodes.record import get_facts
from reward_kit.errors import ConfigError
from reward_kit.integrations.trl.environments import environment_factory
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.evaluation import Task
from reward_kit.runs.tasks import load_task

TINY = Path(__file__).parent.parent / "environments" / "mcp_tiny_server.py"
SECRET = "canary-variable-6d1f"


class Listener:
    """An attacker's server, which records all received headers."""

    def __init__(self) -> None:
        self.headers: list[str] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listener.headers += self.headers.values()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.server.shutdown()
    made.server.server_close()


def touch(path: Path) -> list[str]:
    return [sys.executable, "-c", f"open({str(path)!r}, 'w')"]


def attacks(folder: Path, url: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return by name the resource of a benign task and a malicious row for it."""
    outside, canary = str(folder / "outside"), folder / "canary"
    mcp = {"resource_type": "mcp", "base_resource_config": {"command": [sys.executable, str(TINY)]}}
    http = {"resource_type": "http", "base_resource_config": {"base_url": "http://127.0.0.1:9"}}
    command = " ".join(f"'{word}'" for word in touch(canary))
    server = {"start_command": command, "health_check_url": "http://127.0.0.1:{port}/"}
    openenv = {"resource_type": "openenv", "base_resource_config": {"base_url": "http://127.0.0.1:9"}}
    files = {"resource_type": "filesystem"}
    sql = {"resource_type": "sqlite"}
    gym = {"resource_type": "gymnasium", "base_resource_config": {"env_id": "FrozenLake-v1"}}
    several = {"resources": [{"type": "filesystem", "name": "files"}, {"type": "python_state", "name": "state"}]}
    header = {"base_url": url, "headers_env": {"X": "CANARY_TOKEN"}}
    return {
        "mcp command": (mcp, {"command": touch(canary)}),
        "mcp env": (mcp, {"env": {"PYTHONSTARTUP": "x"}}),
        "mcp pass_env": (mcp, {"pass_env": ["CANARY_TOKEN"]}),
        "mcp cwd": (mcp, {"cwd": outside, "task_folder": "/"}),
        "mcp working copy": (mcp, {"working_copy": outside, "task_folder": "/"}),
        "http server": (http, {"resource_server": server}),
        "http header": (http, header),
        "http endpoint": (http, {"base_url": url, "start_episode_endpoint": "/steal"}),
        "openenv server": (openenv, {"resource_server": server}),
        "openenv header": (openenv, header),
        "folder": (files, {"task_folder": "/", "source_dir": outside}),
        "folder inside": (files, {"source_dir": "."}),
        "seed file": (sql, {"task_folder": "/", "seed_sql_file": f"{outside}/secret.txt"}),
        "module of an environment": (gym, {"env_id": "evil_module:Env-v0"}),
        "argument of an environment": (gym, {"env_kwargs": {"render_mode": "human"}}),
        "game file": ({"resource_type": "textworld", "base_resource_config": {"maker": "simple"}}, {"game": "a.z8"}),
        "published game": ({"resource_type": "alfworld_real"}, {"game_file": f"{outside}/game.tw-pddl"}),
        "replaced resources": (several, {"resources": [{"type": "mcp", "config": {"command": touch(canary)}}]}),
        "part's folder": (several, {"files": {"task_folder": "/", "source_dir": outside}}),
        "dotted key": (gym, {"env_kwargs.desc": ["SG"]}),
    }


NAMES = list(attacks(Path(), ""))


@pytest.fixture
def attack(request: pytest.FixtureRequest, tmp_path: Path, listener: Listener, monkeypatch: Any) -> Any:
    monkeypatch.setenv("CANARY_TOKEN", SECRET)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("canary-file-71c2")
    (tmp_path / "task").mkdir()
    return attacks(tmp_path, listener.url)[request.param]


def first_key(row: dict[str, Any]) -> str:
    key, value = next(iter(row.items()))
    deeper = isinstance(value, dict) and key in ("files", "env_kwargs")
    return f"{key}.{next(iter(value))}" if deeper else key


def assert_untouched(folder: Path, listener: Listener) -> None:
    assert not (folder / "canary").exists()
    assert SECRET not in listener.headers


@pytest.mark.parametrize("attack", NAMES, indirect=True)
async def test_malicious_row_is_rejected_before_anything_starts(
    attack: Any, tmp_path: Path, listener: Listener
) -> None:
    task, row = attack
    keys = {"name": "t", "initial_user_prompt": "x", "dataset_path": "rows.jsonl", **task}
    (tmp_path / "task" / "task.yaml").write_text(json.dumps(keys))
    (tmp_path / "task" / "rows.jsonl").write_text(
        "\n".join(json.dumps(line) for line in ({"id": "good"}, {"id": "bad", "resource_config": row}))
    )
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:2: resource_config\.{first_key(row)}: a row cannot set"):
        load_task(tmp_path / "task" / "task.yaml")
    assert_untouched(tmp_path, listener)


@pytest.mark.parametrize("attack", NAMES, indirect=True)
async def test_malicious_row_is_rejected_in_a_task_from_python(attack: Any, tmp_path: Path, listener: Listener) -> None:
    task, row = attack
    with pytest.raises(ConfigError, match=r"dataset\[0\]: resource_config.*a row cannot set"):
        Task("t", initial_user_prompt="x", dataset=[{"resource_config": row}], folder=tmp_path / "task", **task)
    assert_untouched(tmp_path, listener)


@pytest.mark.parametrize("attack", NAMES, indirect=True)
async def test_malicious_sample_is_rejected_by_a_worker(attack: Any, tmp_path: Path, listener: Listener) -> None:
    task, row = attack
    definition = TaskDefinitionModel(name="t", initial_user_prompt="x", **task)
    worker = RLRolloutWorker(definition, ScriptedPolicy([]))
    async with worker.group(Sample("bad", resource_config=row)) as group:
        episode = await worker.collect_episode(group)
    failure = get_facts(episode)["failure"]
    assert re.search(r"sample 'bad': resource_config\..*: a row cannot set this key", failure["message"])
    assert_untouched(tmp_path, listener)


@pytest.mark.parametrize("attack", NAMES, indirect=True)
async def test_malicious_row_is_rejected_by_trl_environments(attack: Any, tmp_path: Path, listener: Listener) -> None:
    task, row = attack
    if "resources" in task:
        task = {"resource_type": "composite", "base_resource_config": {"resources": task["resources"]}}
    config = task.get("base_resource_config", {})
    with pytest.raises(ConfigError, match=r"row 'bad': resource_config.*a row cannot set"):
        environment_factory(task["resource_type"], config, example={"id": "bad", "resource_config": row})
    with pytest.raises(ConfigError, match="a row cannot set"):
        environment_factory(task["resource_type"], config, example={"resource_config": json.dumps(row)})
    assert_untouched(tmp_path, listener)


class TestTaskFolder:
    """The folder that confines a task's paths is always that of its file."""

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("resource_type: filesystem\nbase_resource_config:\n  task_folder: /\n", 5),
            ("resources:\n  - {type: filesystem, config: {task_folder: /}}\n", 3),
            (
                "resource_type: composite\nbase_resource_config:\n  resources: [{type: filesystem}]\n"
                "  filesystem: {task_folder: /}\n",
                4,
            ),
        ],
    )
    def test_task_file_cannot_set_the_task_folder(self, tmp_path: Path, text: str, line: int) -> None:
        path = tmp_path / "task.yaml"
        path.write_text(f"name: t\ninitial_user_prompt: x\n{text}")
        with pytest.raises(
            ConfigError, match=rf"task\.yaml:{line}: task_folder is always the directory of the task file"
        ):
            load_task(path)

    def test_command_line_cannot_set_the_task_folder(self, tmp_path: Path) -> None:
        path = tmp_path / "task.yaml"
        path.write_text("name: t\ninitial_user_prompt: x\nresource_type: filesystem\n")
        with pytest.raises(ConfigError, match="task_folder is always the directory of the task file"):
            load_task(path, {"base_resource_config.task_folder": "/"})


class Levels(PythonStateResource):
    """A user's resource whose rows choose a level."""

    per_sample_keys = frozenset({"level", "rules.size", "task_folder"})

    async def setup(self, config: Any) -> None:
        self.given = config
        await super().setup({})


class TestOwnResources:
    """A custom resource declares the keys that rows may set."""

    def test_declared_row_keys_override_task_keys(self) -> None:
        base = {"level": {"a": 1}, "rules": {"size": 3, "command": "x"}}
        row = {"level": {"b": 2}, "rules": {"size": 4}}
        expected = {"level": {"a": 1, "b": 2}, "rules": {"size": 4, "command": "x"}}
        assert merged_config(Levels, base, row, "row 1") == expected
        assert merged_config(Levels, base, {"rules": {}}, "row 1") == base

    @pytest.mark.parametrize(
        ("row", "key"),
        [
            ({"command": "x"}, "command"),
            ({"rules": {"size": 1, "command": "x"}}, "rules.command"),
            ({"rules": "x"}, "rules"),
            ({"rules.size": 1}, "rules.size"),
            ({"level.x": 1}, "level.x"),
            ({"task_folder": "/"}, "task_folder"),
            ({"initial_state": {}}, "initial_state"),
            ({7: 1}, "7"),
            ({"": 1}, ""),
        ],
    )
    def test_undeclared_row_keys_are_rejected_with_the_remedy(self, row: dict[Any, Any], key: str) -> None:
        told = re.escape(f"rows.jsonl:3: resource_config.{key}: a row cannot set this key (rows may set level, ")
        with pytest.raises(ConfigError, match=rf"{told}.*add it to Levels\.per_sample_keys"):
            merged_config(Levels, {}, row, "rows.jsonl:3")

    def test_rows_may_set_no_keys_by_default(self) -> None:
        with pytest.raises(ConfigError, match=r"rows may not set any of its keys.*add it to Closed\.per_sample_keys"):
            merged_config(Closed, {}, {"level": 1}, "row 1")

    def test_a_declaration_that_is_a_text_is_reported(self) -> None:
        with pytest.raises(ConfigError, match=r"Misdeclared\.per_sample_keys must be a set of names, got 'level'"):
            merged_config(Misdeclared, {}, {"level": 1}, "row 1")

    async def test_parts_of_a_composite_resource_declare_their_own_keys(self) -> None:
        base = {"resources": [{"type": f"{__name__}:Levels", "name": "game"}, {"type": "sqlite"}]}
        merged = merged_config(CompositeResource, base, {"game": {"level": 1}, "sqlite": {"seed_sql": ""}}, "row 1")
        assert read_parts(merged)["game"][1] == {"level": 1}
        for row, key in (({"game": {"command": 1}}, "game.command"), ({"sqlite": {"seed_sql_file": "x"}}, "sqlite.s")):
            with pytest.raises(ConfigError, match=rf"resource_config\.{key}.*rows may set game\.level, .*sqlite\.now"):
                merged_config(CompositeResource, base, row, "row 1")


class Closed(ForkableResource):
    """A resource that declares no keys."""


class Misdeclared(ForkableResource):
    """A resource whose declaration lacks the braces."""

    per_sample_keys = "level"  # type: ignore[assignment]


async def test_names_of_a_problem_are_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """TextWorld evaluates text in braces in a game's texts, including the goal."""
    good = household("train", 0, 0, TaskType.PICK_AND_PLACE).to_json()
    for key, value in (("target", "mug{7*6}"), ("destination", "shelf) ;{7*6}\n(x"), ("target", 7)):
        with pytest.raises(ConfigError, match="not a household problem"):
            await AlfworldResource().setup({"problem": {**good, key: value}})
    thing = good["things"][0]
    for changes in ({"name": "mug{1} 1"}, {"type": "mug {1}"}, {"at": "shelf 1)"}, {"name": "mug 1 2"}):
        with pytest.raises(ConfigError, match="not a household problem"):
            await AlfworldResource().setup({"problem": {**good, "things": [{**thing, **changes}]}})


async def test_published_game_is_below_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "game.tw-pddl").write_text("{}")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    for path in ("../game.tw-pddl", str(tmp_path / "game.tw-pddl")):
        settings = AlfworldConfig(game_file=path, task_folder=str(tmp_path / "data"))
        with pytest.raises(ConfigError, match="outside the task's directory"):
            game_file(settings)


def test_row_fields_are_not_rendered_as_templates(tmp_path: Path) -> None:
    text = "{{ 7 * 7 }} {% raw %} {{ question }} ${HOME}"
    row = {"question": text, "replies": [text], "who": text}
    task = Task("t", initial_user_prompt="Q: {{ question }}", dataset=[row, {"question": "{{ 1 }}"}], folder=tmp_path)
    assert [task.messages(n)[0].text for n in (0, 1)] == [f"Q: {text}", "Q: {{ 1 }}"]
    user = ScriptedUser(instructions="You are {{ who }}.")
    (said,) = user._instructions.render(task.samples[0])
    assert said.text == f"You are {text}."
    own = Task("t", dataset=[{"messages": [{"role": "user", "content": text}]}], folder=tmp_path)
    assert own.messages(0)[0].text == text


def test_sample_id_is_not_used_as_a_path(tmp_path: Path) -> None:
    ids = ["../../../x", "/etc/x", "..", "a/b\\c", "\u202e.txt"]
    policy = ScriptedPolicy([{"type": "text", "content": "done"}])
    rows = [{"id": name} for name in ids]
    run = Task("t", initial_user_prompt="x", policy=policy, dataset=rows, folder=tmp_path).run(
        log_dir=tmp_path / "deep" / "runs"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"]
    assert [path.parent for path in tmp_path.rglob("episodes.jsonl")] == [run.path]


def test_a_row_cannot_configure_a_resource_that_the_task_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "resource_config": {"command": ["touch", "canary"]}}\n')
    (tmp_path / "task.yaml").write_text("name: t\ndataset_path: rows.jsonl\ninitial_user_prompt: hello\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: resource_config has no effect"):
        load_task(tmp_path / "task.yaml")
