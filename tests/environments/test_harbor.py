"""Tests of Harbor task folders as tasks, without a container engine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_kit.environments.harbor import HarborResource, needs_network, solution_script
from reward_kit.environments.harbor_task import fill_variables, main_reward, parse_rewards, read_harbor_task
from reward_kit.errors import ConfigError, RewardError
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.rewards import harbor_tests
from reward_kit.runs.tasks import load_task
from reward_kit.runs.trust import plan_file_code
from tests.command_line import call

EXAMPLE = Path(__file__).parents[2] / "examples" / "harbor_tasks" / "count_errors"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "tasks" / "count_errors"))


@pytest.fixture
def no_engine(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which no container engine is on the PATH."""
    (tmp_path / "bin").mkdir()
    return {**os.environ, "PATH": str(tmp_path / "bin"), "REWARD_KIT_TRUST": "1"}


def edit(task: Path, old: str, new: str) -> Path:
    file = task / "task.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return task


def test_limits_are_read_from_the_configuration(task: Path) -> None:
    read = read_harbor_task(task)
    environment = read.config.environment
    assert (environment.cpus, environment.memory_mb, read.config.agent_s) == (1.0, 512, 300.0)
    assert not read.unsupported and not needs_network(read)


def test_keys_of_older_schemas_are_read(task: Path) -> None:
    edit(task, 'network_mode = "no-network"', 'allow_internet = true\nstorage = "2G"')
    edit(task, "memory_mb = 512", 'memory = "512M"')
    environment = read_harbor_task(task).config.environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == (512, 2048, "public")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cpus = 1", 'cpus = "two"', r"task\.toml: environment\.cpus: expected a number \(got 'two'\)"),
        ("cpus = 1", "cpus = -1", r"environment\.cpus: must be above 0"),
        ("cpus = 1", 'docker_image = "--privileged"', r"environment\.docker_image"),
        ("memory_mb = 512", 'memory = "much"', "expected a size such as '2G'"),
        ("cpus = 1", "cpus", r"task\.toml: .*line"),
        ("[verifier]", '[verifier]\nenv = {"A B" = "x"}', r"verifier\.env"),
        ("network_mode", "network_mod", r"environment\.network_mod: unknown key; did you mean 'network_mode'"),
        ("[agent]", "[agents]", "task.toml: agents: unknown key; did you mean 'agent'"),
    ],
)
def test_invalid_configuration_is_reported_on_one_line(task: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_harbor_task(edit(task, old, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n", None])
def test_task_without_an_instruction_is_rejected(task: Path, text: str | None) -> None:
    file = task / "instruction.md"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(ConfigError, match=r"instruction\.md is missing or empty"):
        read_harbor_task(task)


def test_other_keys_of_harbor_are_ignored(task: Path) -> None:
    edit(task, "[agent]", 'source = "x"\nartifacts = []\n[metadata]\ntags = []\n[agent]\nfuture = 1')
    edit(task, "[environment]", '[environment]\ngpu_types = []\nskills_dir = "/skills"')
    assert read_harbor_task(task).config.environment.gpus is None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("cpus = 1", "gpus = 1", "environment.gpus"),
        ('"no-network"', '"allowlist"', "network_mode is allowlist"),
        ("[agent]", '[agent]\nnetwork_mode = "public"', "differs between agent, verifier and environment"),
        ("[verifier]", '[verifier]\nenvironment_mode = "separate"', "a separate container"),
    ],
)
async def test_unsupported_parts_are_errors_of_the_setup(task: Path, old: str, new: str, reason: str) -> None:
    edit(task, old, new)
    with pytest.raises(ConfigError, match=reason):
        await HarborResource().setup({"folder": str(task)})


def test_network_is_off_unless_the_task_or_the_user_asks_for_it(task: Path) -> None:
    edit(task, 'network_mode = "no-network"', "")
    assert not needs_network(read_harbor_task(task))
    assert needs_network(read_harbor_task(task), given=True)


def test_tests_that_download_need_an_explicit_network_mode(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("# curl\ncurl -LsSf https://example.com | sh\n")
    assert not needs_network(read_harbor_task(task))
    edit(task, 'network_mode = "no-network"', "")
    read = read_harbor_task(task)
    with pytest.raises(ConfigError, match=r"tests/test\.sh runs curl, but task\.toml has no environment\.network_mode"):
        needs_network(read)
    assert not needs_network(read, given=False)


def test_variables_of_the_host_must_be_passed() -> None:
    given = {"KEY": "${KEY}", "MODEL": "${MODEL:-small}", "PRICE": "$5"}
    assert fill_variables(given, {"KEY": "abc"}, "env") == {"KEY": "abc", "MODEL": "small", "PRICE": "$5"}
    with pytest.raises(ConfigError, match="env: needs the variable KEY; add it to pass_env"):
        fill_variables(given, {}, "env")


@pytest.mark.parametrize(
    ("as_json", "as_text", "rewards", "main"),
    [
        ("", "0.5\n", {"reward": 0.5}, 0.5),
        ('{"a": 1, "b": 0}', "1", {"a": 1.0, "b": 0.0}, 0.5),
        ('{"a": 1, "reward": 0.25}', "", {"a": 1.0, "reward": 0.25}, 0.25),
        ("1", "", {"reward": 1.0}, 1.0),
        ("true", "", {"reward": 1.0}, 1.0),
    ],
)
def test_rewards_are_read_as_in_harbor(as_json: str, as_text: str, rewards: dict[str, float], main: float) -> None:
    assert parse_rewards(as_json, as_text) == rewards and main_reward(rewards) == main


@pytest.mark.parametrize(
    ("as_json", "as_text"),
    [
        ("", ""),
        ("", "passed"),
        ("", "nan"),
        ("{", "1"),
        ('{"a": "1"}', "1"),
        ('{"a": 1e999}', "1"),
        ("{}", "1"),
    ],
)
def test_invalid_rewards_are_not_scores(as_json: str, as_text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_rewards(as_json, as_text)


def test_reward_of_the_tests_is_the_score() -> None:
    result = harbor_tests([], state={"rewards": {"a": 1.0, "b": 0.0}, "reward": 0.5, "log": ""})
    assert result.score == 0.5 and {name: metric.score for name, metric in result.metrics.items()} == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "not that of a harbor resource"),
        ({"problem": "no reward", "log": "a\nb"}, "no reward; end of the log: a"),
    ],
)
def test_episode_without_a_reward_is_unscored(state: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        harbor_tests([], state=state)


@pytest.mark.parametrize("place", [lambda task: task, lambda task: task / "task.toml"])
def test_folder_is_loaded_like_a_task_file(task: Path, place: Callable[[Path], Path]) -> None:
    loaded = load_task(place(task))
    assert [sample.id for sample in loaded.samples] == ["count_errors"]
    assert loaded.definition.name == "count_errors" and loaded.definition.limits.tool_time_s == 420.0
    assert loaded.path == task / "task.toml"


def test_folder_of_tasks_is_a_dataset(task: Path) -> None:
    shutil.copytree(task, task.with_name("another"))
    (task.parent / "notes").mkdir()
    loaded = load_task(task.parent)
    assert [(sample.id, dict(sample.resource_config)) for sample in loaded.samples] == [
        ("another", {"task": "another"}),
        ("count_errors", {"task": "count_errors"}),
    ]


def test_changed_file_of_the_task_changes_the_inputs(task: Path) -> None:
    before = load_task(task).digests
    (task / "tests" / "score.py").write_text("print(1)\n")
    assert load_task(task).digests != before


@pytest.mark.parametrize("row", [{"task": "../secret"}, {"task": "missing"}])
async def test_rows_can_name_only_tasks_of_the_folder(task: Path, row: dict[str, str]) -> None:
    shutil.copytree(task, task.parents[1] / "secret")
    with pytest.raises(ConfigError, match="has no task"):
        await HarborResource().setup({"folder": "tasks", "task_folder": str(task.parents[1]), **row})


async def test_folder_outside_of_the_task_file_is_rejected(task: Path) -> None:
    with pytest.raises(ConfigError, match="outside the task's directory"):
        await HarborResource().setup({"folder": "..", "task_folder": str(task)})


def test_all_files_of_the_tasks_need_consent(task: Path) -> None:
    code = plan_file_code(task.parent)
    assert code.files.keys() == {file.resolve() for file in task.rglob("*") if file.is_file()}
    assert "builds and runs the containers of 1 Harbor task" in code.settings[0]
    (task.parent / "task.yaml").write_text("name: x\nresource_type: harbor\nbase_resource_config: {folder: .}\n")
    assert plan_file_code(task.parent / "task.yaml").files.keys() > code.files.keys()


async def test_dry_run_starts_no_container(task: Path) -> None:
    resource = HarborResource()
    token = CURRENT_PROVIDER_SESSION.set(ProviderSession(is_dry_run=True))
    try:
        await resource.setup({"folder": str(task)})
        await resource.reset(1)
        assert "`/app/errors.json`" in await resource.get_observation()
        assert await resource.final_state() is None
    finally:
        CURRENT_PROVIDER_SESSION.reset(token)
        await resource.close()


def test_solution_script_writes_all_files_of_the_solution(task: Path) -> None:
    (task / "solution" / "data.bin").write_bytes(b"\x00\xff")
    script = solution_script(read_harbor_task(task))
    assert "base64 -d > /solution/data.bin <<'END_OF_FILE'\nAP8=\n" in script
    assert script.endswith("bash /solution/solve.sh")


def test_dry_run_needs_no_engine(task: Path, tmp_path: Path, no_engine: dict[str, str]) -> None:
    done = call("run", str(task), "--policy", "expert", "--dry-run", "--json", cwd=tmp_path, env=no_engine)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["tools"] == ["bash"] and "service.log" in shown["first_request"]["messages"][0]["content"]


def test_run_without_an_engine_is_a_one_line_error(task: Path, tmp_path: Path, no_engine: dict[str, str]) -> None:
    done = call("run", str(task), "--policy", "expert", cwd=tmp_path, env=no_engine)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "no container engine: docker is not on the PATH; podman is not on the PATH; start Docker or install Podman"
    )


def test_folder_that_is_not_a_task_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a task: expected a task file, a Harbor task"):
        load_task(tmp_path)
