"""Test that every option, limit and diagnostic of the learner is documented."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.cli.main import program
from reward_kit.rl.learner.config import OffPolicyLimits, PPOConfig
from reward_kit.rl.model_kit.models import save_model
from reward_kit.rl.ppo import PPOLearner
from tests.agent.policies.hf.small_models import byte_tokenizer, small_llama

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "ppo.md").read_text(encoding="utf-8")
PAGE_OF_METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


REWARD = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def odd(messages):
    return EvaluateResult(score=len(str(messages[2].content)) % 5 / 5)
"""


def test_documented_example_learns_from_stored_episodes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    save_model(tmp_path / "small", small_llama(len(tokenizer), context=4096), tokenizer)
    (tmp_path / "reward.py").write_text(REWARD)
    options_of_policy = {"model": "small", "action_format": "hermes", "max_new_tokens": 20}
    task = {
        "name": "lake",
        "resource_type": "gymnasium",
        "base_resource_config": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
        "reward_function_path": "reward.py:odd",
        "num_rollouts": 4,
        "max_episode_steps": 3,
        "policy": {"type": "hf", **options_of_policy},
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    options = ["--log-dir", str(tmp_path / "runs"), "--display", "none"]
    done = CliRunner().invoke(program, ["run", str(tmp_path / "task.yaml"), *options])
    assert done.exit_code == 0, done.output
    (run,) = (tmp_path / "runs").iterdir()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    policy = make_policy("hf", options_of_policy, tmp_path)
    assert isinstance(policy, HFAgentPolicy)
    rows = names["rows_of_run"](run, policy.pad_token_id)
    assert len(rows.batch["input_ids"]) >= 4 and rows.batch["advantages"].any()
    found = PPOLearner(policy.module, PPOConfig(lr=1e-3)).update(rows, version=1)
    assert (found["optimizer_steps"], found["lag_max"]) == (1.0, 1.0)
    assert found["logprob_gap"] < 1e-4


def described(config: type) -> list[str]:
    """Return the names under "Attributes:" in the docstring of a class."""
    attributes = inspect.cleandoc(config.__doc__ or "").split("Attributes:\n")[1].split("\n\n")[0]
    return re.findall(r"^    (\w+): \S", attributes, re.MULTILINE)


def test_every_option_and_limit_is_documented() -> None:
    # The page links to the reference of train files, which is generated from the docstrings.
    assert "(train_file.md#ppo)" in PAGE
    for config in (PPOConfig, OffPolicyLimits):
        assert [one.name for one in fields(config)] == described(config)
    table = [line for line in PAGE.split("## Alarms")[1].split("\n#")[0].splitlines() if line.startswith("|")]
    limits = {line.split("|")[1].strip(" `"): line.split("|")[2].strip() for line in table[2:]}
    assert limits.keys() == {one.name for one in fields(OffPolicyLimits)}
    for name, told in limits.items():
        assert getattr(OffPolicyLimits(), name) == (None if told == "none" else float(told))


def test_every_diagnostic_is_documented() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    metrics = PAGE_OF_METRICS.read_text(encoding="utf-8")
    for name in names["found"]:
        assert f"`learner/{name}`" in metrics or name.startswith("alarm/"), name
