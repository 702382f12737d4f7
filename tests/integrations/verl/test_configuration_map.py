"""Test that every key in the map of verl's configuration exists in verl or reward-kit."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.models import TaskDefinitionModel
from reward_kit.rl.training.config import TrainModel
from reward_kit.rl_helpers import ESTIMATORS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "migrating" / "verl.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| `", line)]
KEY = re.compile(r"`([\w.]+)`")


def test_reward_kit_keys_are_in_the_schemas() -> None:
    train, task = TrainModel.model_json_schema(), TaskDefinitionModel.model_json_schema(by_alias=False)
    ours = [key for row in ROWS for key in KEY.findall(row[1])]
    options_of_estimators = {"estimator"}.union(*(inspect.signature(one).parameters for one in ESTIMATORS.values()))
    assert len(ours) > 50
    for key in ours:
        if key.startswith("task."):
            assert key.removeprefix("task.") in task["properties"], key
        elif key.startswith("policy."):
            assert key.removeprefix("policy.") in inspect.signature(HFAgentPolicy).parameters, key
        elif key.startswith("credit."):
            assert key.removeprefix("credit.") in options_of_estimators, key
        else:
            assert has(train, key.split(".")), key


def test_estimator_names_match_the_map() -> None:
    (row,) = (row for row in ROWS if "`algorithm.adv_estimator`" in row[0])
    same = row[2].split("the same names:")[1].split(";")[0]
    assert set(KEY.findall(same)) <= set(ESTIMATORS) and "gigpo" in ESTIMATORS


def has(schema: dict[str, Any], path: list[str]) -> bool:
    node = schema
    for name in path:
        node = node.get("properties", {}).get(name)
        if node is None:
            return False
        target = re.search(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(node))
        node = schema["$defs"][target[1]] if target else node
    return True


@pytest.mark.campaign
def test_verl_keys_are_in_its_configuration() -> None:
    packages = ROOT / ".integrations" / "learners"
    found = list(packages.glob("lib/python*/site-packages/verl/trainer/config/_generated_ppo_trainer.yaml"))
    if not found:
        pytest.skip("verl is not in .integrations/learners: make test-integrations")
    theirs = yaml.safe_load(found[0].read_text(encoding="utf-8"))
    keys = [key for row in ROWS for key in KEY.findall(row[0])]
    assert len(keys) > 50
    for key in keys:
        node = theirs
        for name in key.split("."):
            assert isinstance(node, dict) and name in node, key
            node = node[name]
