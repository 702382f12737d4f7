"""Test task files and datasets: accepted values and error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reward_kit.agent.starts import GroupStart
from reward_kit.errors import ConfigError
from reward_kit.runs.task_file import parse_override
from reward_kit.runs.tasks import LoadedTask, check_resource_starts, load_task, select_samples

MINIMAL = "name: t\ninitial_user_prompt: hello\n"


async def check(task: LoadedTask) -> None:
    await check_resource_starts(task)


def write(folder: Path, text: str, name: str = "task.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_task_without_a_dataset_is_its_own_only_sample(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, MINIMAL + "num_rollouts: 3\nground_truth: 4\n"))
    assert [(sample.id, sample.ground_truth) for sample in task.samples] == [("t", 4)]
    assert task.rollouts_per_sample == 3


def test_duplicate_sample_ids_are_rejected_with_both_locations(tmp_path: Path) -> None:
    write(tmp_path, '{"id": "a"}\n{"id": "a"}\n', "rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2.*'a' is already used at .*rows\.jsonl:1"):
        load_task(write(tmp_path, MINIMAL + "dataset_path: rows.jsonl\n"))


def test_every_problem_is_named_with_its_own_line(tmp_path: Path) -> None:
    text = "name: t\ninitial_user_prompt: x\nlimits:\n  wall_time_s: -1\n  total_token: 5\nmax_episode_steps: 0\n"
    with pytest.raises(ConfigError) as caught:
        load_task(write(tmp_path, text))
    problems = str(caught.value).splitlines()
    assert len(problems) == 3
    assert any("task.yaml:4: limits.wall_time_s" in line for line in problems)
    assert any(
        "task.yaml:5: limits.total_token: unknown key; did you mean 'total_tokens'?" in line for line in problems
    )
    assert any("task.yaml:6: max_episode_steps" in line and "got 0" in line for line in problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", r"task\.yaml:\d+: not YAML"),
        ("- a\n", "a mapping of keys"),
        ("", "a mapping of keys"),
        ("name: t\nname: u\n", r"task\.yaml:2: duplicate key 'name'"),
        ("name: t\n", "no first message"),
        ("name: t\npoc_max_turns: 3\nmax_episode_steps: 4\ninitial_user_prompt: x\n", "are the same option"),
    ],
)
def test_invalid_task_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, text))


def test_the_earlier_names_of_keys_still_work(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, MINIMAL + "poc_max_turns: 7\n"))
    assert task.definition.max_episode_steps == 7


def test_paths_are_relative_to_the_task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    write(folder, '{"id": "a"}\n', "rows.jsonl")
    write(folder, "CREATE TABLE t (x);", "seed.sql")
    text = "dataset_path: rows.jsonl\nresource_type: sqlite\nbase_resource_config: {seed_sql_file: seed.sql}\n"
    path = write(folder, MINIMAL + text)
    monkeypatch.chdir(tmp_path)
    task = load_task(path.relative_to(tmp_path))
    assert task.definition.base_resource_config["task_folder"] == str(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("base_resource_config: {a: 1}\n", "base_resource_config has no effect"),
        ("num_rollouts_per_sample: 2\n", "num_rollouts_per_sample has no effect"),
        ("num_rollouts: 2\ndataset_path: rows.jsonl\n", "num_rollouts has no effect"),
        (
            "resource_server: {start_command: x, health_check_url: y}\n",
            "resource_server has no effect: the task has no",
        ),
        (
            "resource_server: {start_command: x, health_check_url: y}\nresource_type: python_state\n",
            "resource_server has no effect: resource 'python_state' does not start a server",
        ),
    ],
)
def test_a_key_without_effect_is_an_error(tmp_path: Path, keys: str, message: str) -> None:
    write(tmp_path, '{"id": "a"}\n', "rows.jsonl")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, MINIMAL + keys))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def r(messages, groundtruth):\n    pass\n", "unknown parameter 'groundtruth'.*did you mean 'ground_truth'"),
        ("def r(messages, ground_truth):\n    pass\n", "needs ground_truth, but no sample has one"),
        (
            "from reward_kit import reward_function\n"
            "@reward_function(requirements=['no-such-package>=3'])\ndef r(messages):\n    pass\n",
            "requires 'no-such-package>=3'",
        ),
    ],
)
def test_reward_with_unusable_parameters_is_rejected(tmp_path: Path, source: str, message: str) -> None:
    write(tmp_path, source, "reward.py")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, MINIMAL + "reward_function_path: reward.py:r\n"))


def test_overrides_reach_inner_keys_and_are_validated(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    overrides = dict(map(parse_override, ["limits.wall_time_s=2.5", "stop_phrases=[a, b]"]))
    task = load_task(path, overrides)
    assert task.definition.limits.wall_time_s == 2.5
    assert task.definition.stop_phrases == ["a", "b"]
    with pytest.raises(ConfigError, match="unknown key"):
        load_task(path, {"limits.wall": 1})
    with pytest.raises(ConfigError, match=r"policy.type: missing; .* needs a type, e.g. -T policy.type=openai"):
        load_task(path, {"policy.price_file": "p.yaml"})
    with pytest.raises(ConfigError, match=r"-T: user.stop_phrase: .*YAML reads an empty value as null"):
        load_task(path, dict(map(parse_override, ["user.type=human", "user.stop_phrase="])))


def test_samples_are_selected_by_id_range_and_limit(tmp_path: Path) -> None:
    write(tmp_path, "".join(json.dumps({"id": f"s{n}"}) + "\n" for n in range(5)), "rows.jsonl")
    task = load_task(write(tmp_path, MINIMAL + "dataset_path: rows.jsonl\n"))
    assert [sample.id for sample in select_samples(task, limit=2)] == ["s0", "s1"]
    assert [sample.id for sample in select_samples(task, sample_ids=["s3", "s1"])] == ["s3", "s1"]
    with pytest.raises(ConfigError, match="no sample 's9'"):
        select_samples(task, sample_ids=["s9"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "must define exactly one ToolRegistry; found none"),
        (
            "from reward_kit import ToolRegistry\na, b = ToolRegistry('a'), ToolRegistry('b')\n",
            "must define exactly one ToolRegistry; found a, b",
        ),
        ("raise RuntimeError('at import')\n", "at import"),
    ],
)
def test_a_tools_module_defines_exactly_one_registry(tmp_path: Path, source: str, message: str) -> None:
    write(tmp_path, source, "tools.py")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, MINIMAL + "tools_module_path: tools.py\n"))


def test_a_date_in_yaml_stays_text(tmp_path: Path) -> None:
    write(tmp_path, "- {id: a, day: 2025-03-01, number: 3}\n", "rows.yaml")
    task = load_task(write(tmp_path, MINIMAL + "dataset_path: rows.yaml\nground_truth: 2025-03-01\n"))
    assert task.samples[0].row == {"id": "a", "day": "2025-03-01", "number": 3}
    assert task.samples[0].ground_truth == "2025-03-01"


class TestSeveralResources:
    TWO = (
        "name: t\ninitial_user_prompt: hello\nresources:\n"
        "  - type: sqlite\n    name: db\n    config: {seed_sql_file: seed.sql}\n"
        "  - type: shop.py:Shop\n    config: {initial_state: {till: 1}}\n"
    )
    SHOP = "from reward_kit.environments import PythonStateResource\nclass Shop(PythonStateResource):\n    pass\n"

    def project(self, folder: Path, more: str = "") -> Path:
        write(folder, "CREATE TABLE t (x);", "seed.sql")
        write(folder, self.SHOP, "shop.py")
        return write(folder, self.TWO + more)

    async def test_each_resource_gets_its_own_configuration(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = self.project(tmp_path)
        monkeypatch.chdir("/")
        task = load_task(path)
        await check(task)
        assert task.definition.resource_type == "composite"
        db, shop = task.definition.base_resource_config["resources"]
        assert (db["name"], db["config"]["task_folder"]) == ("db", str(tmp_path))
        assert (shop["name"], shop["type"]) == ("Shop", str(tmp_path / "shop.py:Shop"))
        assert "task_folder" not in shop["config"]
        assert type(task.definition).model_validate(task.definition.model_dump()) == task.definition

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "resource_type: sqlite\nresources: [{type: sqlite}]\n",
                r"task\.yaml:4: resources: resources replaces resource_type",
            ),
            (
                "resources: [{type: sqlite}]\nbase_resource_config: {a: 1}\n",
                r"task\.yaml:3: resources: resources replaces",
            ),
            (
                "resources:\n  - type: sqlite\n  - type: sqlit\n",
                r"task\.yaml:5: resources\.1: unknown resource 'sqlit'; did you mean 'sqlite'",
            ),
            ("resources:\n  - type: sqlite\n  - type: sqlite\n", r"task\.yaml:3: .*two resources are named 'sqlite'"),
            (
                "resources:\n  - type: sqlite\n    confg: {}\n",
                r"task\.yaml:5: resources\.0\.confg: unknown key; did you mean 'config'",
            ),
            (
                "resource_type: composite\nbase_resource_config: {resource: []}\n",
                r"task\.yaml:4: base_resource_config: composite resource: resources: missing",
            ),
        ],
    )
    def test_resource_error_has_its_line(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_task(write(tmp_path, MINIMAL + text))

    async def test_invalid_resource_is_named_before_the_run(self, tmp_path: Path) -> None:
        path = write(tmp_path, MINIMAL + "resources:\n  - {type: sqlite, config: {seed_sq: x}}\n")
        where = re.escape(f"{path}:3: ")
        with pytest.raises(ConfigError, match=rf"{where}resources: part 'sqlite': sqlite resource: seed_sq: unknown"):
            await check(load_task(path))

    async def test_missing_resource_configuration_is_reported_with_its_line(self, tmp_path: Path) -> None:
        path = write(tmp_path, MINIMAL + "resource_type: gymnasium\n")
        with pytest.raises(ConfigError, match=re.escape(f"{path}:3: resource 'gymnasium': env_id: missing")):
            await check(load_task(path))

    async def test_a_row_configures_its_resources_by_name(self, tmp_path: Path) -> None:
        write(tmp_path, '{"id": "a", "resource_config": {"Shop": {"initial_state": {"till": 5}}}}\n', "rows.jsonl")
        task = load_task(self.project(tmp_path, "dataset_path: rows.jsonl\n"))
        async with GroupStart(task.definition, task.samples[0], 0) as group:
            start = await group.episode(0)
            assert (start.fork, start.resource.parts["Shop"].state) == ("native", {"till": 5})
            await start.resource.close()
        write(tmp_path, '{"id": "a", "resource_config": {"shop": {}}}\n', "rows.jsonl")
        with pytest.raises(ConfigError, match=r"rows\.jsonl:1: resource_config: unknown resource 'shop'"):
            load_task(tmp_path / "task.yaml")

    def test_overrides_apply_to_list_items(self, tmp_path: Path) -> None:
        path = self.project(tmp_path)
        task = load_task(path, {"resources.0.config.max_rows": 3})
        assert task.definition.base_resource_config["resources"][0]["config"]["max_rows"] == 3
        with pytest.raises(ConfigError, match="'2' is not an index into a list of 2"):
            load_task(path, {"resources.2.config.max_rows": 3})

    @pytest.mark.parametrize(
        ("signature", "message"),
        [
            ("other: SqliteResource, Shop: PythonStateResource", ""),
            (
                "files: FilesystemResource",
                r"tools_module_path: tool 'own': parameter 'files' is annotated with Filesystem",
            ),
        ],
    )
    def test_tool_requiring_a_missing_resource_is_rejected(self, tmp_path: Path, signature: str, message: str) -> None:
        imports = "from reward_kit.environments import FilesystemResource, PythonStateResource, SqliteResource\n"
        source = (
            f"import reward_kit\n{imports}r = reward_kit.ToolRegistry('r')\n@r.tool\ndef own({signature}):\n    ''\n"
        )
        write(tmp_path, source, "tools.py")
        path = self.project(tmp_path, "tools_module_path: tools.py\n")
        if not message:
            assert load_task(path).tools is not None
            return
        with pytest.raises(ConfigError, match=message):
            load_task(path)

    def test_server_option_applies_to_the_resource_that_starts_it(self, tmp_path: Path) -> None:
        served = (
            "from reward_kit.environments import PythonStateResource\n"
            "class Served(PythonStateResource):\n    takes_resource_server = True\n"
        )
        write(tmp_path, served, "served.py")
        server = "resource_server: {start_command: serve, health_check_url: 'http://127.0.0.1:1/'}\n"
        one = "resources:\n  - {type: python_state}\n  - {type: served.py:Served}\n"
        task = load_task(write(tmp_path, MINIMAL + server + one))
        state, shop = task.definition.base_resource_config["resources"]
        assert "resource_server" not in state["config"]
        assert shop["config"]["resource_server"]["start_command"] == "serve"
        two = one + "  - {type: served.py:Served, name: second}\n"
        with pytest.raises(ConfigError, match=r"yaml:3: resource_server has no effect: 'Served' and 'second' could"):
            load_task(write(tmp_path, MINIMAL + server + two))
        none = "resources:\n  - {type: python_state}\n  - {type: sqlite}\n"
        with pytest.raises(ConfigError, match="'python_state', 'sqlite' does not start a server"):
            load_task(write(tmp_path, MINIMAL + server + none))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("sandbox:\n  read_paths: [nosuch.txt]\n", r"task\.yaml:5: sandbox\.read_paths: .*nosuch\.txt does not exist"),
        ("sandbox:\n  preload: [nosuch_module]\n", r"task\.yaml:5: sandbox\.preload: .*nosuch_module"),
        ("reward_options:\n  m: 4\n", r"task\.yaml:5: reward_options\.m: .*no option 'm'"),
        ("reward_options:\n  n: many\n", r"task\.yaml:5: reward_options\.n: .*whole number"),
    ],
)
def test_sandbox_errors_of_a_reward_have_their_line(tmp_path: Path, keys: str, message: str) -> None:
    write(tmp_path, "def r(messages, *, n: int = 3):\n    return 1.0\n", "reward.py")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, f"{MINIMAL}reward_function_path: reward.py:r\n{keys}"))


def test_column_in_single_braces_is_noted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"order": "tea"}\n')
    prompt = '{order} {{order}} {{ order }} {other} {\\"order\\": 1}'
    (tmp_path / "t.yaml").write_text(f'name: t\ndataset_path: rows.jsonl\ninitial_user_prompt: "{prompt}"\n')
    assert load_task(tmp_path / "t.yaml").notes == (
        "the prompt contains {order} in single braces, which are not replaced; write {{ order }}",
    )


def test_note_names_the_first_row_without_a_required_ground_truth(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def r(messages, ground_truth):\n    return {'score': 1.0}\n")
    rows = '{"id": "a", "ground_truth": 1}\n{"id": "b", "ground_thruth": 1}\n{"id": "c", "ground_truth": null}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    task = load_task(write(tmp_path, MINIMAL + "dataset_path: rows.jsonl\nreward_function_path: r.py:r\n"))
    (note,) = [note for note in task.notes if "ground_truth" in note]
    assert "rows.jsonl:2: no ground_truth, which reward 'r' requires; rename 'ground_thruth' to 'ground_truth'" in note
    assert note.endswith("(2 of 3 samples)")
