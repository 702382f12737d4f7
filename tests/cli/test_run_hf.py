"""Test `reward-kit run` with a language model in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from reward_kit.checks import check_episode
from reward_kit.cli.main import program
from reward_kit.episodes.record import episode_from_record
from reward_kit.errors import ConfigError
from tests.agent.policies.hf.small_models import byte_tokenizer, small_llama

REWARD = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def reached(messages, environment_return):
    return EvaluateResult(score=environment_return)
"""
POLICY = {"type": "hf", "model": "./small", "action_format": "hermes", "constrain": True, "max_new_tokens": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    tokenizer = byte_tokenizer()
    small_llama(len(tokenizer), context=4096).save_pretrained(path / "small")
    tokenizer.save_pretrained(path / "small")
    (path / "reward.py").write_text(REWARD)
    return path


def run(folder: Path, *arguments: str, **policy: Any) -> Result:
    task = {
        "name": "lake",
        "resource_type": "gymnasium",
        "base_resource_config": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
        "reward_function_path": "reward.py:reached",
        "num_rollouts": 3,
        "max_episode_steps": 4,
        "policy": {**POLICY, **policy},
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    logs = ["--log-dir", str(folder / "runs"), "--display", "none"]
    return CliRunner().invoke(program, ["run", str(folder / "task.yaml"), *logs, *arguments])


def test_model_folder_beside_the_task_acts_and_is_recorded(folder: Path) -> None:
    done = run(folder)
    assert done.exit_code == 0, done.output
    (path,) = (folder / "runs").iterdir()
    records = [json.loads(line) for line in (path / "episodes.jsonl").read_text().splitlines()]
    assert len(records) == 3
    for record in records:
        episode = episode_from_record(record)
        assert record["failure"] is None
        assert check_episode(episode) == []
        assert episode.tokens.allowed
        assert record["usage"]["completion_tokens"] == sum(span.stop - span.start for span in episode.tokens.spans)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"model": "./smal"}, "does not exist"),
        ({"model": "nobody/no-such-model"}, "neither a directory nor a model"),
        ({"temprature": 1}, "unknown key for policy 'hf'; did you mean 'temperature'"),
    ],
)
def test_invalid_policy_option_is_one_line_and_leaves_no_run(
    folder: Path, policy: dict[str, Any], message: str
) -> None:
    before = sorted((folder / "runs").glob("*"))
    done = run(folder, **policy)
    # What the program prints as one line, and leaves with 2.
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert sorted((folder / "runs").glob("*")) == before
