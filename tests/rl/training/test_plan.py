"""Validation of train files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_kit.errors import ConfigError
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.description import describe_plan
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl_helpers import ESTIMATORS
from reward_kit.runs.task_file import overrides_in_python, parse_override
from reward_kit.runs.tasks import load_task
from tests.rl.training.frozen_lake import TRAIN, lake_folder


def line_of(path: Path, key: str) -> int:
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.lstrip().startswith(f"{key}:"))


def test_omitted_sections_have_defaults(tmp_path: Path) -> None:
    plan = load_plan(lake_folder(tmp_path, rollout=None, ppo=None, credit=None, evaluation=None))
    assert plan.config.pipeline is Schedule.SYNC and plan.config.ppo.loss == "ppo"
    assert (plan.config.rollout.samples_per_update, plan.config.rollout.group_size) == (8, 8)
    assert plan.credit.estimator == "gigpo" and plan.held_out is None and plan.config.best_by == "score/mean"
    assert plan.samples_per_minibatch == 8, "nothing is trained on early"
    assert [sample.id for sample in plan.samples] == list("abcd")


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"updatse": 3}, "updatse", "updatse: unknown key; did you mean 'updates'?"),
        ({"rollout": {"group_sise": 3}}, "group_sise", "rollout.group_sise: unknown key; did you mean 'group_size'?"),
        ({"ppo": {"clip_hihg": 1}}, "clip_hihg", "ppo.clip_hihg: unknown key; did you mean 'clip_high'?"),
        (
            {"ppo": {"limits": {"aprox_kl": 1}}},
            "aprox_kl",
            "ppo.limits.aprox_kl: unknown key; did you mean 'approx_kl'?",
        ),
        ({"ppo": {"lr": -1}}, "ppo", "lr must be at least 0"),
        ({"ppo": {"lr": True}}, "lr", "ppo.lr: expected a number, got true"),
        ({"ppo": {"epochs": False}}, "ppo", "epochs must be an integer of at least 1, got 0"),
        ({"ppo": {"warmup": False}}, "warmup", "ppo.warmup: expected a number, got false"),
        ({"ppo": {"lora": {"rank": True}}}, "rank", "ppo.lora.rank: expected a number, got true"),
        ({"ppo": {"limits": {"approx_kl": True}}}, "approx_kl", "ppo.limits.approx_kl: expected a number, got true"),
        ({"ppo": {"lr_by_name": {"head": True}}}, "head", "ppo.lr_by_name.head: expected a number, got true"),
        ({"updates": True}, "updates", "updates: expected a number, got true"),
        ({"rollout": {"max_concurrency": True}}, "max_concurrency", "rollout.max_concurrency: expected a number, got"),
        ({"pipeline": "asynchronous"}, "pipeline", "'sync', 'minibatch', 'one_step_off' or 'both'"),
        ({"credit": {"estimator": "gigpo", "omegga": 0.5}}, "omegga", "gigpo has no option 'omegga'"),
        ({"reward_manager": "dapo"}, "reward_manager", "'dapo' scores single answers and is meant for custom"),
        ({"rollout": {"group_size": 1}}, "group_size", "gigpo compares the episodes of a group, but group_size is 1"),
        ({"rollout": {"samples_per_minibatch": 1}}, "samples_per_minibatch", "pipeline sync trains on whole batches"),
        (
            {"pipeline": "both", "rollout": {"samples_per_update": 2, "samples_per_minibatch": 3}},
            "samples_per_minibatch",
            "a batch has 2 samples",
        ),
        ({"early_stop": {"at_least": 1}, "evaluation": None}, "early_stop", "needs an evaluation section"),
        (
            {"checkpoints": {"best_by": "held_out/score"}, "evaluation": None},
            "best_by",
            "needs an evaluation section",
        ),
        ({"early_stop": {"at_least": 1, "metric": "held_out/scor"}}, "metric", "did you mean 'held_out/score'?"),
        ({"checkpoints": {"best_by": "learner/loss"}}, "best_by", "this figure cannot be selected"),
        ({"updates": None}, "name", "set updates or max_env_steps"),
        (
            {"evaluation": {"hold_out": 1, "every": 1, "every_env_steps": 1}},
            "evaluation",
            "set only one of every and every_env_steps",
        ),
        ({"evaluation": {"every": 1}}, "evaluation", "exactly one of task, dataset_path and hold_out, got none"),
        ({"engine": "rya"}, "engine", "'local' or 'ray'"),
        ({"engine": {"type": "ray", "nodes": 2}}, "nodes", "engine.nodes: unknown key"),
        ({"engine": {"workers": 2}}, "engine", "workers has no effect without type: ray"),
        ({"engine": {"type": "ray", "workers": 5}}, "workers", "engine.workers: an update has 4 episodes"),
        (
            {"engine": "ray", "policy": {"type": "hf", "model": "m", "lockstep": True}},
            "lockstep",
            "lockstep cannot make results reproducible",
        ),
    ],
)
def test_unknown_and_ineffective_keys_are_rejected(
    tmp_path: Path, changes: dict[str, Any], key: str, told: str
) -> None:
    path = lake_folder(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        load_plan(path)
    assert told in str(refused.value)
    assert str(refused.value).startswith(f"{path}:{line_of(path, key)}: ")


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"max_episode_stepps": 3}, "max_episode_stepps: unknown key; did you mean 'max_episode_steps'?"),
        (
            {"num_rollouts_per_sample": 3},
            "task.num_rollouts_per_sample has no effect, because rollout.group_size is used instead",
        ),
        ({"max_episode_steps": True}, "max_episode_steps: expected a number, got true"),
        ({"policy": "random"}, "task.policy has no effect, because policy is used instead"),
        ({"run_limits": {"steps": 3}}, "in training, which updates or max_env_steps limit"),
    ],
)
def test_inline_task_is_validated(tmp_path: Path, task: dict[str, Any], told: str) -> None:
    path = lake_folder(tmp_path, task={**TRAIN["task"], **task})
    with pytest.raises(ConfigError) as refused:
        load_plan(path)
    assert told in str(refused.value) and str(path) in str(refused.value)
    if "run_limits" not in task:
        assert f":{line_of(path, next(iter(task)))}:" in str(refused.value)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_can_be_described(tmp_path: Path, name: str) -> None:
    rollout = {**TRAIN["rollout"], "continuations": 2} if name == "vine" else TRAIN["rollout"]
    plan = load_plan(lake_folder(tmp_path, credit=name, rollout=rollout))
    assert f"Credit      {name}: A = " in describe_plan(plan)


def test_training_needs_scores(tmp_path: Path) -> None:
    task = {key: value for key, value in TRAIN["task"].items() if key not in ("reward_function_path", "sandbox")}
    with pytest.raises(ConfigError, match="training requires scores"):
        load_plan(lake_folder(tmp_path, task=task))


def test_task_can_be_a_separate_file_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({**TRAIN["task"], "num_rollouts_per_sample": 3}))
    path = lake_folder(tmp_path, task="task.yaml", name=None)
    plan = load_plan(path, {"task.max_episode_steps": 7, "ppo.lr": "2e-3"})
    assert plan.task.definition.max_episode_steps == 7 and plan.config.ppo.lr == 0.002
    assert plan.name == "lake" and "dataset" in plan.digests
    with pytest.raises(ConfigError, match=r"^-T: max_episode_step: unknown key; did you mean 'max_episode_steps'"):
        load_plan(path, {"task.max_episode_step": 7})
    with pytest.raises(ConfigError, match=r"^-T: ppo\.lr: expected a number, got true$"):
        load_plan(path, {"ppo.lr": True})
    with pytest.raises(ConfigError, match=r"^-T: ppo\.betas\.0: expected a number, got false$"):
        load_plan(path, {"ppo.betas": [False, 0.9]})
    with pytest.raises(ConfigError, match=r"^-T: updates: must be 1 or more"):
        load_plan(path, {"updates": 0})


class TestHeldOut:
    def test_held_out_samples_are_drawn_by_the_seed_and_not_trained_on(self, tmp_path: Path) -> None:
        path = lake_folder(tmp_path, evaluation={"hold_out": 2})
        drawn = set()
        for seed in range(8):
            plan = load_plan(path, {"seed": seed})
            assert plan.held_out is not None
            held_out = [sample.id for sample in plan.held_out.samples]
            assert sorted([*held_out, *(sample.id for sample in plan.samples)]) == list("abcd") and len(held_out) == 2
            drawn.add(tuple(held_out))
        assert len(drawn) > 1

    def test_holding_out_every_sample_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="keep some of them for training"):
            load_plan(lake_folder(tmp_path, evaluation={"hold_out": 4}))

    def test_evaluation_can_use_another_dataset_or_task(self, tmp_path: Path) -> None:
        (tmp_path / "others.jsonl").write_text("".join(json.dumps({"id": name}) + "\n" for name in "xyz"))
        plan = load_plan(lake_folder(tmp_path, evaluation={"dataset_path": "others.jsonl", "limit": 2}))
        assert plan.held_out is not None and not plan.held_out.is_own_task
        assert [sample.id for sample in plan.held_out.samples] == ["x", "y"] and len(plan.samples) == 4
        (tmp_path / "hard.yaml").write_text(yaml.safe_dump({**TRAIN["task"], "name": "hard"}))
        plan = load_plan(lake_folder(tmp_path, evaluation={"task": "hard.yaml"}))
        assert plan.held_out is not None and plan.held_out.is_own_task
        assert plan.held_out.task.definition.name == "hard" and len(plan.samples) == 4


def test_every_changed_file_or_override_changes_the_digests(tmp_path: Path) -> None:
    path = lake_folder(tmp_path)
    before = load_plan(path).digests
    assert load_plan(path).digests == before
    assert load_plan(path, {"seed": 1}).digests != before
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "\n# another\n")
    after = load_plan(path).digests
    assert {name for name in after if after[name] != before[name]} == {"reward", "evaluation's reward"}


def test_resolved_configuration_is_plain_json(tmp_path: Path) -> None:
    document = json.loads(json.dumps(load_plan(lake_folder(tmp_path)).resolved()))
    assert document["ppo"]["lr"] == 0.01 and document["ppo"]["limits"]["lag_max"] == 8.0
    assert document["credit"]["omega"] == 0.5 and document["pipeline"] == "sync"


def test_overridden_estimator_names_all_options_that_no_longer_apply(tmp_path: Path) -> None:
    credit = {"estimator": "gigpo", "omega": 0.3, "gamma": 0.9, "min_anchor_group_size": 3}
    path = lake_folder(tmp_path, credit=credit)
    with pytest.raises(ConfigError) as refused:
        load_plan(path, {"credit.estimator": "grpo"})
    message = str(refused.value)
    assert re.match(
        r".*train\.yaml:\d+: credit\.omega, credit\.min_anchor_group_size: the estimator grpo has no", message
    )
    override = message.rpartition(" with ")[2]
    assert override == "-T 'credit={estimator: grpo, gamma: 0.9}'"
    _, option = shlex.split(override)
    assert load_plan(path, dict([parse_override(option)])).credit.options["gamma"] == 0.9


def test_overridden_estimator_of_a_task_names_the_options_that_no_longer_apply(tmp_path: Path) -> None:
    lake_folder(tmp_path)
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump({**TRAIN["task"], "credit": {"estimator": "gigpo", "omega": 0.3}}))
    with pytest.raises(ConfigError, match=r"task\.yaml:\d+: credit\.omega: .*with -T 'credit={estimator: rloo}'"):
        load_task(task, {"credit.estimator": "rloo"})
    with overrides_in_python(), pytest.raises(ConfigError, match=r"with overrides={'credit': {'estimator': 'rloo'}}"):
        load_task(task, {"credit.estimator": "rloo"})
