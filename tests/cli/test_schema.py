"""The schemas that `reward-kit schema` prints take every file of the examples, and refuse a key that is misspelt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests import command_line

ROOT = Path(__file__).parents[2]
TASKS = sorted(ROOT.glob("examples/*/*task*.yaml")) + sorted(ROOT.glob("examples/*/report.yaml"))
TRAINED = sorted(ROOT.glob("examples/*/train.yaml"))


def schema(folder: Path, *kind: str) -> dict[str, Any]:
    done = command_line.call("schema", *kind, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("kind", "paths"), [(("task",), TASKS), (("train",), TRAINED)], ids=["task", "train"])
def test_the_files_of_the_examples_fit(tmp_path: Path, kind: tuple[str, ...], paths: list[Path]) -> None:
    found = schema(tmp_path, *kind)
    assert len(paths) >= 2
    jsonschema.Draft202012Validator.check_schema(found)
    for path in paths:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        jsonschema.validate(data, found)
        with pytest.raises(jsonschema.ValidationError, match="misspelt"):
            jsonschema.validate({**data, "misspelt": 1}, found)


def test_it_is_that_of_tasks_where_nothing_is_said(tmp_path: Path) -> None:
    assert schema(tmp_path) == schema(tmp_path, "task")


def test_it_needs_no_torch_for_tasks_and_refuses_another_kind(tmp_path: Path) -> None:
    refused = command_line.call("schema", "tsk", cwd=tmp_path)
    assert refused.returncode == 2 and "'task', 'train'" in refused.stderr
