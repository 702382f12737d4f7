"""From a train file to everything that training needs, loaded and checked before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reward_kit.agent.policies import make_policy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.models import TaskDefinitionModel
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.training.config import TrainModel, unknown_keys
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.plan import check_costs
from reward_kit.runs.redaction import Redaction, known_secrets, load_hook
from reward_kit.runs.task_file import LocatedYaml, about, keys_of_user, overlaid, place_of, validated
from reward_kit.runs.tasks import LoadedTask, load_task, located_assigner, resolve_task
from reward_kit.task_parts import CreditModel, PolicyModel

TRAIN_FILE = "train file"
HELD_OUT = "held_out/"
_OF_TASKS = {*TaskDefinitionModel.model_fields} - {*TrainModel.model_fields}
_NEEDS_PEERS = (
    *("gigpo", "grpo", "rloo", "opo", "gpg", "grpo_passk", "turn_level_grpo", "reinforce_plus_plus_baseline"),
)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What the policy is evaluated on.

    Attributes:
        task: the same as in training, or another.
        samples: none of them is trained on, unless another file or dataset names it too.
        is_own_task: it has a task of its own, and so a reward.
    """

    task: LoadedTask
    samples: tuple[Sample, ...]
    is_own_task: bool


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A train file with everything loaded that it names, but for the policy.

    Attributes:
        located: the file.
        overrides: what was laid over it.
        config: the validated file.
        task: what is trained on.
        samples: its samples, without those that are held out.
        credit: turns scores into advantages.
        held_out: None where nothing is evaluated.
        digests: SHA-256 of everything that decides what comes of it, but for the policy's own files.
        redaction: what is kept out of the run's files: every secret that the file, the tasks and the overrides name.
        of_user: the keys of `overrides` that the user gave now, and no file of an earlier run.
    """

    located: LocatedYaml
    overrides: Mapping[str, Any]
    config: TrainModel
    task: LoadedTask
    samples: tuple[Sample, ...]
    credit: CreditAssigner
    held_out: HeldOut | None
    digests: Mapping[str, str]
    redaction: Redaction
    of_user: frozenset[str]

    @property
    def path(self) -> Path:
        """The train file."""
        return self.located.path

    @property
    def folder(self) -> Path:
        """Where it lies; what it names is relative to it."""
        return self.path.resolve().parent

    @property
    def name(self) -> str:
        """Of the run."""
        return self.config.name or self.task.definition.name

    @property
    def samples_per_minibatch(self) -> int:
        """Groups of one update of the weights, where they are trained on as they are scored; else all of a batch."""
        rollout = self.config.rollout
        if not self.config.pipeline.updates_early:
            return rollout.samples_per_update
        return rollout.samples_per_minibatch or max(1, rollout.samples_per_update // 4)

    @property
    def policy_block(self) -> tuple[PolicyModel, Path]:
        """Who is trained, and what its paths are relative to.

        Raises:
            ConfigError: nobody is named.
        """
        if (block := self.config.policy) is not None:
            return block, self.folder
        if (block := self.task.definition.policy) is None:
            raise ConfigError(f"{self.path}: no policy; name the one that is trained, such as {{type: hf, model: …}}")
        return block, self.task.folder

    def make_policy(self, **changes: Any) -> AgentPolicy:
        """The policy that is trained.

        Args:
            **changes: options of it that are others than the file's.

        Raises:
            ConfigError: there is none, or it cannot be made.
        """
        block, folder = self.policy_block
        options = {**block.options(), **changes}
        return make_policy(block.type, options, folder, of_user=self.policy_of_user)

    @property
    def policy_of_user(self) -> set[str]:
        """Which options of the policy the user gave, on the command line or in Python, and no file."""
        block, _ = self.policy_block
        given = self.of_user if self.config.policy is not None else self.task.of_user
        return keys_of_user("policy", block.options(), given)


def load_plan(path: Path, overrides: Mapping[str, Any] | None = None, *, stored: Collection[str] = ()) -> TrainingPlan:
    """Load a train file and everything it names, but for the policy.

    Args:
        path: the YAML file.
        overrides: keys laid over the file's, dotted for inner ones; those that begin with `task.` go to the task.
        stored: those of them that come from an earlier run's file. They lead no key anywhere, just as the train file.

    Raises:
        ConfigError: something is wrong; the message has one line per problem.
    """
    given = dict(overrides or {})
    of_task = {key.removeprefix("task."): given[key] for key in given if key.startswith("task.")}
    own = {key: value for key, value in given.items() if not key.startswith("task.")}
    stored_of_task = {key.removeprefix("task.") for key in stored if key.startswith("task.")}
    located = LocatedYaml(path)
    _refuse_task_file(located)
    _refuse_unknown_options(located, own)
    config = validated(located, own, TrainModel, "a train file")
    folder = path.resolve().parent
    task = _task(located, config, folder, of_task, own, stored_of_task)
    credit = located_assigner(located, config.credit or task.definition.credit or CreditModel(), own)
    _check_task(located, config, task)
    _check_together(located, config, credit, own)
    _check_lockstep(config, task, place_of(located, ("policy", "lockstep"), own))
    samples, held_out = _held_out(config, task, folder, of_task, stored_of_task)
    told = f"{hashlib.sha256(located.source).hexdigest()} {sorted(given.items())}"
    digests = {**task.digests, TRAIN_FILE: hashlib.sha256(told.encode()).hexdigest()}
    if held_out is not None:
        digests |= {f"evaluation's {name}": digest for name, digest in held_out.task.digests.items()}
    redaction = _redaction(config, given, task, held_out)
    of_user = frozenset(given) - {*stored}
    return TrainingPlan(located, given, config, task, samples, credit, held_out, digests, redaction, of_user)


def _refuse_task_file(located: LocatedYaml) -> None:
    data = located.data
    if not isinstance(data, dict) or "task" in data or not _OF_TASKS & data.keys():
        return
    raise ConfigError(
        f"{located.path} is a task file, for `reward-kit run`; a train file names it, by `task: {located.path.name}`, "
        "and says how many updates"
    )


def _refuse_unknown_options(located: LocatedYaml, overrides: Mapping[str, Any]) -> None:
    """Those of the learner: a dataclass, of whose keys the models know nothing."""
    data = overlaid(located.data, overrides) if isinstance(located.data, dict) else {}
    lines = [
        f"{place_of(located, ('ppo', *place), overrides)}: ppo.{'.'.join(place)}: unknown key"
        f"{did_you_mean(place[-1], known)}"
        for place, known in unknown_keys(data.get("ppo"), PPOConfig)
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _task(
    located: LocatedYaml,
    config: TrainModel,
    folder: Path,
    of_task: Mapping[str, Any],
    own: Mapping[str, Any],
    stored: Collection[str],
) -> LoadedTask:
    if isinstance(config.task, str):
        return load_task(folder / config.task, of_task, stored=stored)
    if "task" in own:
        raise ConfigError("-T task=… names a task file; set single keys of it with -T task.KEY=…")
    return resolve_task(located.part("task"), of_task, stored=stored)


def _check_task(located: LocatedYaml, config: TrainModel, task: LoadedTask) -> None:
    """What a task may have for a run, and training has no use for."""
    definition = task.definition
    if task.reward is None:
        raise ConfigError(f"{task.path}: training needs scores; name a reward_function_path")
    if definition.run_limits.model_dump(exclude_none=True):
        raise ConfigError(f"{task.path}: run_limits bound a run, and training is bounded by updates; leave them out")
    if isinstance(config.task, dict):
        unused = {
            "num_rollouts": "rollout.group_size",
            "num_rollouts_per_sample": "rollout.group_size",
            "policy": "policy" if config.policy else "",
            "credit": "credit" if config.credit else "",
        }
        for key, instead in unused.items():
            if instead and key in config.task:
                raise ConfigError(f"{located.where(('task', key))}: task.{key} has no effect: {instead} counts")
    check_costs(task, [], None)


def _check_together(
    located: LocatedYaml, config: TrainModel, credit: CreditAssigner, overrides: Mapping[str, Any]
) -> None:
    """A key that would have no effect beside the others is an error, not a silent no-op."""
    rollout, needs_evaluation = config.rollout, "there is no evaluation: block"
    metric = config.early_stop.metric if config.early_stop else ""
    refusals: dict[tuple[str, str], str] = {}
    if rollout.samples_per_minibatch is not None:
        if not config.pipeline.updates_early:
            refusals["rollout", "samples_per_minibatch"] = f"pipeline {config.pipeline.value} trains on whole batches"
        elif rollout.samples_per_minibatch > rollout.samples_per_update:
            refusals["rollout", "samples_per_minibatch"] = f"a batch has {rollout.samples_per_update} samples"
    if metric.startswith(HELD_OUT) and config.evaluation is None:
        refusals["early_stop", "metric"] = needs_evaluation
    if (config.checkpoints.best_by or "").startswith(HELD_OUT) and config.evaluation is None:
        refusals["checkpoints", "best_by"] = needs_evaluation
    if credit.estimator in _NEEDS_PEERS and rollout.group_size < 2:
        refusals["rollout", "group_size"] = f"{credit.estimator} compares the episodes of a group, and there is one"
    if (config.engine.workers or 0) > (episodes := rollout.samples_per_update * rollout.group_size):
        refusals["engine", "workers"] = f"an update has {episodes} episodes"
    for location, why in refusals.items():
        raise ConfigError(f"{place_of(located, location, overrides)}: {'.'.join(location)}: {why}")


def _check_lockstep(config: TrainModel, task: LoadedTask, where: str) -> None:
    policy = config.policy or task.definition.policy
    if config.engine.type == "local" or policy is None or not policy.options().get("lockstep"):
        return
    raise ConfigError(
        f"{where if config.policy else task.path}: policy.lockstep: with engine: ray it is chance which episodes are "
        "computed together, and what lockstep promises cannot be kept; leave it out"
    )


def _held_out(
    config: TrainModel, task: LoadedTask, folder: Path, of_task: Mapping[str, Any], stored: Collection[str]
) -> tuple[tuple[Sample, ...], HeldOut | None]:
    """The samples that are trained on, and those that are not."""
    asked = config.evaluation
    if asked is None:
        return task.samples, None
    if asked.hold_out is not None:
        if asked.hold_out >= len(task.samples):
            raise ConfigError(
                f"evaluation.hold_out is {asked.hold_out}, and {task.path} has {len(task.samples)} samples; some must "
                "be left to train on"
            )
        order = np.random.default_rng(derive_seed("hold_out", config.seed)).permutation(len(task.samples))
        chosen = set(order[: asked.hold_out].tolist())
        kept = tuple(sample for place, sample in enumerate(task.samples) if place in chosen)
        left = tuple(sample for place, sample in enumerate(task.samples) if place not in chosen)
        return left, HeldOut(task, kept[: asked.limit], False)
    if asked.task is not None:
        other = load_task(folder / asked.task)
        if other.reward is None:
            raise ConfigError(f"{other.path}: an evaluation needs scores; name a reward_function_path")
        return task.samples, HeldOut(other, other.samples[: asked.limit], True)
    laid_over = {**of_task, "dataset_path": str(folder / str(asked.dataset_path))}
    other = resolve_task(task.located, laid_over, stored=stored)
    return task.samples, HeldOut(other, other.samples[: asked.limit], False)


def _redaction(config: TrainModel, given: Mapping[str, Any], task: LoadedTask, held_out: HeldOut | None) -> Redaction:
    tasks = [task] if held_out is None else [task, held_out.task]
    definitions = [each.definition.model_dump(mode="json") for each in tasks]
    with about(task.located, "redact"):
        hook = load_hook(task.definition.redact, task.folder)
    return Redaction(known_secrets(config.model_dump(mode="json"), given, *definitions), hook)


def resolved(plan: TrainingPlan) -> dict[str, Any]:
    """The file as it counts, defaults filled in, as plain JSON."""
    document = plan.config.model_dump(mode="json")
    if isinstance(plan.config.task, dict):
        document["task"] = overlaid(plan.config.task, {})
    document["credit"] = {"estimator": plan.credit.estimator, "step_rewards": plan.credit.step_rewards} | {
        key: value for key, value in plan.credit.options.items() if value is None or isinstance(value, _PLAIN)
    }
    return document


_PLAIN = (bool, int, float, str, list, dict, tuple)
