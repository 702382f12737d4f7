"""Test that the schemas of `reward-kit schema` accept every example file and reject misspelled keys.

They are published with the docs, where the first line of each example finds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests import command_line

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "schemas"
TRAINED = sorted(ROOT.glob("examples/*/train.yaml"))
SWEEPS = sorted([*ROOT.glob("examples/*/sweep.yaml"), *ROOT.glob("benchmarks/*.yaml")])
TASKS = sorted(set(ROOT.glob("examples/*/*.yaml")) - {*TRAINED, *SWEEPS})
EXAMPLES = {"task": TASKS, "train": TRAINED, "sweep": SWEEPS}


def schema(folder: Path, *kind: str) -> dict[str, Any]:
    done = command_line.call("schema", *kind, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module", params=["task", "train", "sweep"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def printed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return schema(tmp_path_factory.mktemp("schema"), kind)


def test_example_files_match_the_schema(kind: str, printed: dict[str, Any]) -> None:
    paths = EXAMPLES[kind]
    assert paths
    jsonschema.Draft202012Validator.check_schema(printed)
    for path in paths:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        jsonschema.validate(data, printed)
        with pytest.raises(jsonschema.ValidationError, match="misspelt"):
            jsonschema.validate({**data, "misspelt": 1}, printed)


def test_published_schemas_match_the_command(kind: str, printed: dict[str, Any]) -> None:
    published = json.loads((PUBLISHED / f"{kind}.json").read_text(encoding="utf-8"))
    assert published == printed, f"reward-kit schema {kind} > docs/schemas/{kind}.json"


@pytest.mark.parametrize(
    ("kind_of_file", "path"),
    [(kind, path) for kind, paths in EXAMPLES.items() for path in paths],
    ids=lambda value: f"{value.parent.name}/{value.name}" if isinstance(value, Path) else value,
)
def test_first_line_of_an_example_names_its_schema(kind_of_file: str, path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == PUBLISHED / f"{kind_of_file}.json"


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, block in (("", schema), *schema["$defs"].items()):
        for key, said in block.get("properties", {}).items():
            yield f"{name}.{key}", said


def test_every_key_has_a_description(printed: dict[str, Any]) -> None:
    """A key has its own description or that of its block."""
    texts = {f"#/$defs/{name}": block.get("description") for name, block in printed["$defs"].items()}
    untold = []
    for name, said in keys(printed):
        held = [one.get("$ref", "") for one in (said, *said.get("anyOf", []))]
        if not said.get("description") and not any(texts.get(one) for one in held):
            untold.append(name)
    assert not untold


@pytest.fixture(scope="module")
def of_training(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return schema(tmp_path_factory.mktemp("schema"), "train")


def test_blocks_may_be_given_by_name(of_training: dict[str, Any]) -> None:
    file = {"task": "task.yaml", "updates": 1, "engine": "ray", "policy": "random", "credit": "grpo"}
    jsonschema.validate(file | {"reward_manager": "episode"}, of_training)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(file | {"rollout": "many"}, of_training)


@pytest.mark.parametrize(
    "ppo", [{"lr": -1.0}, {"epochs": 0}, {"temperature": 0}, {"min_lr_share": 2.0}, {"loss": "pop"}, {"lrr": 1.0}]
)
def test_schema_rejects_options_that_training_rejects(of_training: dict[str, Any], ppo: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"task": "task.yaml", "updates": 1, "ppo": ppo}, of_training)


def test_default_schema_is_that_of_tasks(tmp_path: Path) -> None:
    assert schema(tmp_path) == schema(tmp_path, "task")


def test_unknown_schema_kind_is_rejected(tmp_path: Path) -> None:
    refused = command_line.call("schema", "tsk", cwd=tmp_path)
    assert refused.returncode == 2 and "'task', 'train', 'sweep'" in refused.stderr
