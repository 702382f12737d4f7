"""What training would refuse of a policy, found before a run has a folder: by options and names, without weights."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

from reward_kit.agent.policies import policy_class
from reward_kit.errors import ConfigError
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.lora import add_adapters
from reward_kit.rl.learner.optimizer import check_critic, parameter_groups
from reward_kit.rl.trainer import trainable
from reward_kit.rl.training.plan import TrainingPlan
from reward_kit.rl.training.setup import with_temperature
from reward_kit.runs.task_file import place_of

_OPTIONS = {one.name for one in fields(PPOConfig)}


def check_policy(plan: TrainingPlan) -> None:
    """Refuse what cannot be trained so.

    A language model is built from its configuration with no memory behind its weights, so that `ppo:` is held against
    the parameters that there will be. Of a policy of one's own only its class and the names of its options are known
    before it is made.

    Args:
        plan: what would be trained.

    Raises:
        ConfigError: the policy does not exist, has no such option, or cannot be trained as the file says.
    """
    block, folder = plan.policy_block
    kind = policy_class(block.type, block.options(), folder)
    if not hasattr(kind, "publish"):
        raise ConfigError(
            f"{plan.path}: {kind.__name__} is no TrainablePolicy, and nothing of it can be trained; give policy: "
            "{type: hf, …}, or one of your own"
        )
    if plan.config.engine.type == "ray" and not _takes_weights(kind):
        raise ConfigError(
            f"{plan.path}: engine: ray sends weights to processes that act, and {kind.__name__}.publish takes none; "
            "give it publish(version, state_dict)"
        )
    if block.type == "hf":
        _check_language_model(plan)


def _takes_weights(kind: Any) -> bool:
    """Whether `publish` can be called with a version and weights."""
    try:
        inspect.signature(kind.publish).bind(None, 0, {})
    except TypeError:
        return False
    return True


def _check_language_model(plan: TrainingPlan) -> None:
    block, _ = plan.policy_block
    if (device := block.options().get("device", "auto")) != "meta":
        from reward_kit.agent.policies.hf.model import parse_device  # with transformers, which only such a policy needs

        parse_device(str(device))
    policy = plan.make_policy(device="meta")
    try:
        ppo = with_temperature(plan.config.ppo, policy)
        module = trainable(policy).module
        if ppo.lora is not None:
            add_adapters(module, ppo.lora)
        parameter_groups(module, ppo)
        check_critic(ppo, has_values=hasattr(module, "value_head"))
    except ConfigError as error:
        raise ConfigError(f"{_where(plan, str(error))}: {error}") from error


def _where(plan: TrainingPlan, told: str) -> str:
    """The line of the option that a message begins with; else the file."""
    found = re.match(r"(?:ppo\.)?(\w+)", told)
    if found is None or found[1] not in _OPTIONS:
        return str(plan.path)
    return place_of(plan.located, ("ppo", found[1]), plan.overrides)
