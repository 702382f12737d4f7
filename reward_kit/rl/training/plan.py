"""The plan for a training run: the parsed train file, and the objects that it names, loaded and checked together."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from reward_kit.agent.policies import make_policy, policy_class
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.credit.estimators import ESTIMATORS
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.loading import load_function, user_module_name
from reward_kit.models import TaskDefinitionModel
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.optimizer import add_adapters, check_critic, parameter_groups
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.config import TrainModel, unknown_keys
from reward_kit.rl.training.trainer import trainable
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.inputs import credit_files, file_of_code, files_in_options, hash_path, own_modules, shown_path
from reward_kit.runs.redaction import Redaction, known_secrets, load_hook
from reward_kit.runs.task_file import (
    LocatedYaml,
    apply_overrides,
    error_context,
    error_location,
    overridden_keys,
    parse_task,
    validate_model,
)
from reward_kit.runs.tasks import LoadedTask, load_task, locate_credit, make_located_assigner, resolve_task
from reward_kit.task_parts import CreditModel, PolicyModel

TRAIN_FILE = "train file"
HELD_OUT = "held_out/"
_OF_TASKS = {*TaskDefinitionModel.model_fields} - {*TrainModel.model_fields}
_WITHOUT_GROUPS = ("reinforce_plus_plus", "discounted_returns", "gae")
_PPO_OPTIONS = {one.name for one in fields(PPOConfig)}
_PLAIN = (bool, int, float, str, list, dict, tuple)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The samples for evaluations. They are excluded from training unless they come from another file or dataset."""

    task: LoadedTask
    samples: tuple[Sample, ...]
    is_own_task: bool  # True if the evaluation has a separate task, and thus a separate reward


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The inputs of a training run, loaded and checked, except for the policy."""

    located: LocatedYaml  # the train file
    overrides: Mapping[str, Any]  # The overridden keys
    config: TrainModel
    task: LoadedTask
    samples: tuple[Sample, ...]  # The samples of the task, excluding held-out samples
    credit: CreditAssigner
    held_out: HeldOut | None  # None without an evaluation
    digests: Mapping[str, str]  # SHA-256 of every input that affects the result, except for a model's directory
    redaction: Redaction  # Redacts the secrets of the file, the tasks and the overrides in the run's files
    after_collect: Callable[..., Any] | None  # The hook of this name
    of_user: frozenset[str]  # The keys of `overrides` set by the user now, not by an earlier run's file

    @property
    def path(self) -> Path:
        """The train file."""
        return self.located.path

    @property
    def folder(self) -> Path:
        """The directory of the train file, which relative paths in the file refer to."""
        return self.path.resolve().parent

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.config.name or self.task.definition.name

    @property
    def samples_per_minibatch(self) -> int:
        """The number of groups in an update: a whole batch, or the part of a batch that is trained on early."""
        rollout = self.config.rollout
        if not self.config.pipeline.updates_early:
            return rollout.samples_per_update
        return rollout.samples_per_minibatch or max(1, rollout.samples_per_update // 4)

    @property
    def policy_block(self) -> tuple[PolicyModel, Path]:
        """The section for the policy to train, and the directory to which its paths are relative.

        Raises:
            ConfigError: If no policy exists.
        """
        if (block := self.config.policy) is not None:
            return block, self.folder
        if (block := self.task.definition.policy) is None:
            raise ConfigError(f"{self.path}: no policy; set the policy to train, for example {{type: hf, model: …}}")
        return block, self.task.folder

    @property
    def policy_of_user(self) -> set[str]:
        """The policy options that the user set on the command line or in Python rather than in a file."""
        given = self.of_user if self.config.policy is not None else self.task.of_user
        return overridden_keys("policy", self.policy_block[0].options(), given)

    def make_policy(self, **changes: Any) -> AgentPolicy:
        """Create the policy to train, and override the given options."""
        block, folder = self.policy_block
        return make_policy(block.type, {**block.options(), **changes}, folder, of_user=self.policy_of_user)

    def resolved(self) -> dict[str, Any]:
        """Return the content of the file as plain JSON, including all defaults."""
        document = self.config.model_dump(mode="json")
        if isinstance(self.config.task, dict):
            document["task"] = apply_overrides(self.config.task, {})
        options = {key: one for key, one in self.credit.options.items() if one is None or isinstance(one, _PLAIN)}
        of_task = {key.removeprefix("task."): one for key, one in self.overrides.items() if key.startswith("task.")}
        written = self.config.credit or parse_task(self.task.located, of_task).credit or CreditModel()
        # The assigner has absolute paths, which would change if the folder is moved.
        options |= {key: one for key, one in written.options().items() if key == "state_hash"}
        document["credit"] = {"estimator": written.estimator, "step_rewards": self.credit.step_rewards} | options
        return document


def load_plan(path: Path, overrides: Mapping[str, Any] | None = None, *, stored: Collection[str] = ()) -> TrainingPlan:
    """Load a train file and all objects that it names, except for the policy.

    Args:
        path: the YAML file.
        overrides: values that replace values in the file. Nested keys are dotted. Keys that begin with `task.` apply to
            the task.
        stored: the keys in `overrides` that come from an earlier run's file. Like the keys in the train file itself,
            these keys cannot send an API key to an endpoint.

    Raises:
        ConfigError: If the file is invalid. The message has one line per problem.
    """
    overrides = dict(overrides or {})
    of_task = {key.removeprefix("task."): one for key, one in overrides.items() if key.startswith("task.")}
    own = {key: one for key, one in overrides.items() if not key.startswith("task.")}
    located = LocatedYaml(path)
    data = located.data if isinstance(located.data, dict) else {}
    if data and "task" not in data and _OF_TASKS & data.keys():
        raise ConfigError(
            f"{path} is a task file for `reward-kit run`; "
            f"write a train file that refers to it with `task: {path.name}` "
            "and sets `updates` or `max_env_steps`"
        )
    # `ppo` is a dataclass, and Pydantic ignores unknown keys of dataclasses.
    unknown = unknown_keys(apply_overrides(data, own).get("ppo"), PPOConfig) if data else ()
    if lines := [
        f"{error_location(located, ('ppo', *key), own)}: ppo.{'.'.join(key)}: unknown key{did_you_mean(key[-1], known)}"
        for key, known in unknown
    ]:
        raise ConfigError("\n".join(lines))
    config = validate_model(located, own, TrainModel, "a train file")

    folder = path.resolve().parent
    stored_of_task = {key.removeprefix("task.") for key in stored if key.startswith("task.")}
    if isinstance(config.task, str):
        task = load_task(folder / config.task, of_task, stored=stored_of_task)
    elif "task" in own:
        raise ConfigError("-T task=… names a task file; set its keys with -T task.KEY=…")
    else:
        task = resolve_task(located.part("task"), of_task, stored=stored_of_task)
    own_credit = config.credit and locate_credit(config.credit, folder)
    credit = make_located_assigner(located, own_credit or task.definition.credit or CreditModel(), own)
    hooks = _load_hooks(located, own, config)
    credit.annotate_step = hooks.get("annotate_step")
    samples, held_out = task.samples, None
    if (evaluation := config.evaluation) is not None and evaluation.hold_out is not None:
        if evaluation.hold_out >= len(samples):
            raise ConfigError(
                f"evaluation.hold_out is {evaluation.hold_out}, but {task.path} has only {len(samples)} "
                "samples; keep some of them for training"
            )
        order = np.random.default_rng(derive_seed("hold_out", config.seed)).permutation(len(samples))
        chosen = set(order[: evaluation.hold_out].tolist())
        kept = tuple(sample for index, sample in enumerate(samples) if index in chosen)
        samples = tuple(sample for index, sample in enumerate(samples) if index not in chosen)
        held_out = HeldOut(task, kept[: evaluation.limit], False)
    elif evaluation is not None:
        if evaluation.task is not None:
            other = load_task(folder / evaluation.task)
        else:
            dataset = {"dataset_path": str(folder / str(evaluation.dataset_path))}
            other = resolve_task(task.located, of_task | dataset, stored=stored_of_task)
        held_out = HeldOut(other, other.samples[: evaluation.limit], evaluation.task is not None)
    _check(located, own, config, task, credit, held_out)

    digests = _input_digests(located, overrides, config, task, held_out)
    definitions = [one.definition.model_dump(mode="json") for one in (task, held_out and held_out.task) if one]
    with error_context(task.located, "redact"):
        hook = load_hook(task.definition.redact, task.folder)
    redaction = Redaction(known_secrets(config.model_dump(mode="json"), overrides, *definitions), hook)
    of_user = frozenset(overrides) - {*stored}
    after = hooks.get("after_collect")
    return TrainingPlan(located, overrides, config, task, samples, credit, held_out, digests, redaction, after, of_user)


def _input_digests(
    located: LocatedYaml, overrides: Mapping[str, Any], config: TrainModel, task: LoadedTask, held_out: HeldOut | None
) -> dict[str, str]:
    """Return SHA-256 digests of the train file (with overrides), the code that it names, and its tasks' inputs."""
    source = f"{hashlib.sha256(located.source).hexdigest()} {sorted(overrides.items())}"
    digests = {**task.digests, TRAIN_FILE: hashlib.sha256(source.encode()).hexdigest()}
    folder = located.path.resolve().parent
    files = list[tuple[str, Path | None]](credit_files(config.credit, folder).items())
    files += [(f"hook {name}", file_of_code(reference, folder)) for name, reference in _hooks(config).items()]
    if (policy := config.policy) is not None:
        files += [
            ("policy", file)
            for file in (file_of_code(policy.type, folder), *files_in_options(policy.options(), folder))
        ]
    for name, file in files:
        if file is not None:
            modules = own_modules(file, user_module_name(file)) if file.suffix == ".py" else (file,)
            digests |= {f"{name} {shown_path(one, folder)}": hash_path(one) for one in modules}
    if held_out is not None:
        digests |= {f"evaluation's {name}": digest for name, digest in held_out.task.digests.items()}
    return digests


def _hooks(config: TrainModel) -> dict[str, str]:
    return config.hooks.model_dump(exclude_none=True) if config.hooks is not None else {}


def _load_hooks(located: LocatedYaml, own: Mapping[str, Any], config: TrainModel) -> dict[str, Callable[..., Any]]:
    hooks = {}
    for name, reference in _hooks(config).items():
        try:
            hooks[name] = load_function(reference, "hook", located.path.resolve().parent)
        except ConfigError as error:
            where = error_location(located, ("hooks", name), own)
            raise ConfigError(f"{where}: hooks.{name}: {error}") from error
    return hooks


def _check(
    located: LocatedYaml,
    own: Mapping[str, Any],
    config: TrainModel,
    task: LoadedTask,
    credit: CreditAssigner,
    held_out: HeldOut | None,
) -> None:
    """Reject inputs that cannot be used for training, and keys in the file or in `own` that would have no effect."""
    definition, rollout = task.definition, config.rollout
    if task.reward is None:
        raise ConfigError(f"{task.path}: training requires scores; set reward_function_path")
    if held_out is not None and held_out.task.reward is None:
        raise ConfigError(f"{held_out.task.path}: an evaluation requires scores; set reward_function_path")
    if definition.run_limits.model_dump(exclude_none=True):
        raise ConfigError(
            f"{task.path}: run_limits have no effect in training, which updates or max_env_steps limit; remove them"
        )
    if isinstance(config.task, dict):
        unused = {"num_rollouts": "rollout.group_size", "num_rollouts_per_sample": "rollout.group_size"}
        unused |= {"policy": "policy"} if config.policy else {}
        unused |= {"credit": "credit"} if config.credit else {}
        for key in [key for key in unused if key in config.task]:
            raise ConfigError(
                f"{located.where(('task', key))}: task.{key} has no effect, because {unused[key]} is used instead"
            )
    refusals: dict[tuple[str, str], str] = {}
    if rollout.samples_per_minibatch is not None and not config.pipeline.updates_early:
        refusals["rollout", "samples_per_minibatch"] = f"pipeline {config.pipeline.value} trains on whole batches"
    elif (rollout.samples_per_minibatch or 0) > rollout.samples_per_update:
        refusals["rollout", "samples_per_minibatch"] = f"a batch has {rollout.samples_per_update} samples"
    for key in ("branching", "continuations"):
        if getattr(rollout, key) is not None and (
            config.pipeline is not Schedule.SYNC or config.dynamic_sampling is not None or config.engine.type == "ray"
        ):
            refusals["rollout", key] = "requires pipeline: sync and engine: local, without dynamic_sampling"
    if rollout.branching is not None and rollout.continuations is not None:
        refusals["rollout", "branching"] = "cannot be combined with continuations"
    if rollout.continuations is not None and config.reward_manager.normalization_type != "none":
        refusals["rollout", "continuations"] = "measures scores that are not normalized; remove reward_manager"
    is_built_in = credit.estimator in ESTIMATORS  # A user's estimator may use anything
    if is_built_in and (rollout.continuations is None) == (credit.estimator == "vine"):
        why = "is required by the estimator vine" if rollout.continuations is None else "is used only by vine"
        refusals["rollout", "continuations"] = why
    if config.evaluation is None:
        if config.early_stop is not None and config.early_stop.metric.startswith(HELD_OUT):
            refusals["early_stop", "metric"] = "needs an evaluation section"
        if (config.checkpoints.best_by or "").startswith(HELD_OUT):
            refusals["checkpoints", "best_by"] = "needs an evaluation section"
    if is_built_in and credit.estimator not in _WITHOUT_GROUPS and rollout.group_size < 2:
        refusals["rollout", "group_size"] = f"{credit.estimator} compares the episodes of a group, but group_size is 1"
    if (config.engine.workers or 0) > (episodes := rollout.samples_per_update * rollout.group_size):
        refusals["engine", "workers"] = f"an update has {episodes} episodes"
    for location, why in refusals.items():
        raise ConfigError(f"{error_location(located, location, own)}: {'.'.join(location)}: {why}")

    policy = config.policy or definition.policy
    if config.engine.type == "ray" and policy is not None and policy.options().get("lockstep"):
        where = error_location(located, ("policy", "lockstep"), own) if config.policy else task.path
        raise ConfigError(
            f"{where}: policy.lockstep: with engine: ray, episodes are grouped by timing, so "
            "lockstep cannot make results reproducible; remove it"
        )


def check_policy(plan: TrainingPlan) -> None:
    """Check, before any weights are loaded, that a policy can be trained with this plan.

    A language model is built from its configuration on the meta device, so that `ppo:` can be checked against its
    parameters. For a custom policy, only its class and the names of its options are known before it is created.

    Raises:
        ConfigError: If the policy cannot be trained.
    """
    block, folder = plan.policy_block
    kind = policy_class(block.type, block.options(), folder)
    publish = getattr(kind, "publish", None)
    if publish is None:
        raise ConfigError(
            f"{plan.path}: {kind.__name__} is not a TrainablePolicy and cannot be trained; set policy: {{type: hf, …}}"
            ", or use your own policy with `module`, `pad_token_id` and `publish`"
        )
    if plan.config.engine.type == "ray":
        try:
            inspect.signature(publish).bind(None, 0, {})
        except TypeError:
            raise ConfigError(
                f"{plan.path}: engine: ray sends weights to the processes that act, but "
                f"{kind.__name__}.publish does not accept any; define publish(version, state_dict)"
            ) from None
    if block.type != "hf":
        return
    if (device := block.options().get("device", "auto")) != "meta":
        from reward_kit.agent.policies.hf.model import parse_device  # Requires transformers.

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
        # The line of the option that the message begins with, or else the file.
        option = re.match(r"(?:ppo\.)?(\w+)", str(error))
        is_known = option is not None and option[1] in _PPO_OPTIONS
        where = error_location(plan.located, ("ppo", option[1]), plan.overrides) if option and is_known else plan.path
        raise ConfigError(f"{where}: {error}") from error


def with_temperature(ppo: PPOConfig, policy: object) -> PPOConfig:
    """Add the policy's sampling temperature to the options, because the learner also divides logits by it."""
    temperature = getattr(getattr(policy, "sampling", None), "temperature", 1.0)
    if temperature == ppo.temperature:
        return ppo
    if ppo.temperature != 1.0:
        raise ConfigError(
            f"ppo.temperature is {ppo.temperature:g}, but the policy samples at a temperature of {temperature:g}; "
            "remove the key"
        )
    if temperature == 0.0:
        raise ConfigError("the policy samples greedily (temperature 0), so there is nothing to learn from its choices")
    return replace(ppo, temperature=temperature)
