"""The schema of train files, with the description and the default of each key.

`plan.py` rejects keys that would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Self, cast, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from reward_kit.credit.group_filter import Unscored
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.rl.learner.config import PPOConfig, schema_bounds
from reward_kit.rl.reward_manager import NormalizationType
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.branching import BranchChoice
from reward_kit.task_parts import BY_NAME, CreditModel, PolicyModel

_STRICT = ConfigDict(extra="forbid")
_STRICT_OR_NAME = ConfigDict(extra="forbid", json_schema_extra=BY_NAME)


def _checked(data: Any, build: ValidatorFunctionWrapHandler) -> Any:
    """Convert errors of a dataclass to Pydantic errors. `load_plan` rejects unknown keys, which Pydantic ignores."""
    try:
        return build(data)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def unknown_keys(data: Any, kind: type[Any]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield each unknown key in a mapping or its nested mappings, and the keys that the dataclass accepts there."""
    hints = get_type_hints(kind)
    for key, value in data.items() if isinstance(data, dict) else ():
        if key not in hints:
            yield (str(key),), list(hints)
            continue
        inner = [one for one in (hints[key], *get_args(hints[key])) if is_dataclass(one)]
        for rest, known in unknown_keys(value, cast("type[Any]", inner[0])) if inner else ():
            yield (key, *rest), known


class _Bounded:
    """Adds the bounds that `PPOConfig` checks to the JSON schema that editors use."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        document = handler(schema)
        keys = handler.resolve_ref_schema(document)["properties"]
        for name, bound in schema_bounds().items():
            number = next(iter(keys[name].get("anyOf", [keys[name]])))
            number.update(bound)
        return document


PPO = Annotated[PPOConfig, WrapValidator(_checked), _Bounded]
"""The keys of `ppo:` are the fields of `PPOConfig`."""


SELECTION_METRICS = (
    *("held_out/score", "held_out/passed_share", "held_out/min", "held_out/max", "held_out/return_mean"),
    *("score/mean", "score/passed_share", "score/min", "score/max", "episode/return_mean"),
)
"""The figures that can select the best checkpoint and stop training early; higher values are better."""


def _known_metric(name: str) -> str:
    if name not in SELECTION_METRICS:
        raise ValueError(f"this figure cannot be selected{did_you_mean(name, SELECTION_METRICS)}")
    return name


Metric = Annotated[
    str, AfterValidator(_known_metric), WithJsonSchema({"type": "string", "enum": list(SELECTION_METRICS)})
]


class BranchingModel(BaseModel):
    """Additional groups that continue episodes of the update from one of their steps.

    The episodes in such a group begin with the same recorded steps, which are not trained on again. Their advantages
    compare only what happened after these steps.
    """

    model_config = _STRICT

    groups: int = Field(ge=1, description="number of additional groups per update")
    where: BranchChoice = Field(
        default="uniform",
        description=(
            "the steps to continue from: `uniform` draws any step; `first_visits` draws among the first visits of "
            "states within their group; `uncertainty` prefers actions with a low probability per token"
        ),
    )


class RolloutModel(BaseModel):
    """The episodes that are collected for one update."""

    model_config = _STRICT

    samples_per_update: int = Field(default=8, ge=1, description="number of groups in a batch")
    group_size: int = Field(
        default=8, ge=1, description="number of episodes per sample, all from the same initial state"
    )
    samples_per_minibatch: int | None = Field(
        default=None,
        ge=1,
        description="number of groups to train on as soon as they are scored (pipelines minibatch and both)",
    )
    max_concurrency: int | None = Field(
        default=None, ge=1, description="maximum number of concurrent episodes; default: all episodes of a batch"
    )
    continuations: int | None = Field(
        default=None,
        ge=1,
        description="number of continuations that measure the value of the state before each step; required by the "
        "estimator vine, with pipeline: sync",
    )
    branching: BranchingModel | None = Field(
        default=None, description="additional groups that continue episodes of the update; requires pipeline: sync"
    )


class EngineModel(BaseModel):
    """The engine that collects episodes and calls rewards: this process or a Ray cluster."""

    model_config = _STRICT_OR_NAME

    type: Literal["local", "ray"] = Field(default="local", description="this process, or a Ray cluster")
    address: str | None = Field(
        default=None, description="address of a running cluster, or auto; default: start a cluster on this machine"
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="processes that collect episodes, each with a copy of the policy; default: as many as fit",
    )
    cpus: float = Field(default=1.0, gt=0, description="number of CPUs that each of these processes reserves")
    gpus: float = Field(default=0.0, ge=0, description="number of GPUs that each of these processes reserves")
    reward_workers: int = Field(
        default=0, ge=0, description="number of processes that call the reward; 0 calls it in this process"
    )
    env: list[str] = Field(default_factory=list, description="environment variables passed to all processes")
    worker_wait_s: float = Field(
        default=300.0, gt=0, description="number of seconds without any process after which training fails"
    )

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, data: Any) -> Any:
        return {"type": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.type == "local" and (given := sorted(self.model_fields_set - {"type"})):
            raise ValueError(f"{given[0]} has no effect without type: ray")
        return self


class RewardModel(BaseModel):
    """The options for calling the task's reward."""

    model_config = _STRICT

    max_concurrency: int = Field(default=16, ge=1, description="maximum number of concurrent calls")
    max_attempts: int = Field(
        default=1, ge=1, description="maximum number of attempts if a call fails with provider_error"
    )
    cache: bool = Field(default=False, description="score equal requests only once")


class RewardManagerModel(BaseModel):
    """The conversion of episode scores to token rewards."""

    model_config = _STRICT_OR_NAME

    name: Literal["episode"] = Field(
        default="episode", description="the reward manager, which puts the score of each episode on its last token"
    )
    normalization_type: NormalizationType = Field(
        default="none",
        description="normalization of scores: by the length of the episode, or by the mean and "
        "standard deviation of all scores so far",
    )

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"name": data}
        if isinstance(data, dict) and data.get("name", "episode") in ("naive", "batch", "prime", "dapo"):
            raise ValueError(
                f"the reward manager {data['name']!r} scores single answers and is meant for custom training loops; "
                "in `train`, the task's reward scores episodes; set the task's reward_function_path and "
                "remove reward_manager"
            )
        return data


class DynamicSamplingModel(BaseModel):
    """Dynamic sampling as in DAPO: collect more groups until enough of them have a learning signal."""

    model_config = _STRICT

    max_collections: int = Field(
        default=4,
        ge=1,
        description="maximum number of times that groups are collected for one update; "
        "if they do not suffice, the batch is smaller",
    )
    band: tuple[float, float] | None = Field(
        default=None, description="keep only groups whose mean score is within these bounds"
    )
    keep_step_signal: bool = Field(
        default=False, description="also keep groups in which the scores are equal but the steps differ (GiGPO)"
    )
    unscored: Unscored = Field(
        default="ignore", description="whether to ignore the unscored episodes of a group, or to drop the group"
    )


class EvaluationModel(BaseModel):
    """Evaluations on samples that are not used for training."""

    model_config = _STRICT

    every: int = Field(
        default=10,
        ge=1,
        description=(
            "number of updates between evaluations; there is also one before the first update and one after the last"
        ),
    )
    every_env_steps: int | None = Field(
        default=None, ge=1, description="number of environment steps between evaluations, instead of `every`"
    )
    rollouts: int = Field(default=1, ge=1, description="number of episodes per sample")
    task: str | None = Field(default=None, description="another task file, relative to this one")
    dataset_path: str | None = Field(default=None, description="a file with other samples of the same task")
    hold_out: int | None = Field(
        default=None, ge=1, description="number of samples of the task to hold out, drawn with the seed"
    )
    limit: int | None = Field(default=None, ge=1, description="use only this many samples, from the beginning")
    temperature: float | None = Field(
        default=None, ge=0, description="the sampling temperature; default: the temperature of training; 0 is greedy"
    )
    examples: int = Field(default=0, ge=0, description="maximum number of episodes to show after each evaluation")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("task", "dataset_path", "hold_out") if getattr(self, key) is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ValueError(f"set exactly one of task, dataset_path and hold_out, got {names}")
        if self.every_env_steps is not None and "every" in self.model_fields_set:
            raise ValueError("set only one of every and every_env_steps")
        return self

    def is_due(self, updates: int, steps_before: int, steps: int) -> bool:
        """Return whether to evaluate after an update that increased the number of environment steps."""
        if (every := self.every_env_steps) is not None:
            return steps // every > steps_before // every
        return updates % self.every == 0


class HooksModel(BaseModel):
    """Custom functions, each in the form file.py:function."""

    model_config = _STRICT

    after_collect: str | None = Field(
        default=None, min_length=1, description="called with the episodes of each group before they are scored"
    )
    annotate_step: str | None = Field(
        default=None, min_length=1, description="called with each step and its episode before credit is computed"
    )


class CheckpointsModel(BaseModel):
    """The checkpoints. A checkpoint is also written at the end of training and when training is interrupted."""

    model_config = _STRICT

    every: int = Field(default=10, ge=1, description="number of updates between checkpoints")
    keep: int = Field(default=2, ge=1, description="number of latest checkpoints to keep, in addition to the best one")
    best_by: Metric | None = Field(
        default=None,
        description="the figure that selects the best checkpoint; "
        "default: held_out/score, or score/mean without an evaluation",
    )


class EarlyStopModel(BaseModel):
    """The condition under which training ends early."""

    model_config = _STRICT

    metric: Metric = Field(default="held_out/score", description="the figure to compare with at_least")
    at_least: float = Field(description="the value at which training ends")
    times: int = Field(
        default=1, ge=1, description="number of consecutive evaluations or updates that must reach the value"
    )


class WandbModel(BaseModel):
    """Logging to Weights & Biases.

    Logging is enabled only if this section is present, because it sends figures to an external service.
    """

    model_config = _STRICT

    project: str = Field(min_length=1, description="the project, which is created if it does not exist")
    entity: str | None = Field(default=None, description="the owner of the project; default: your account")
    group: str | None = Field(
        default=None, min_length=1, description="the group of the run; default: none, or the directory of the sweep"
    )
    mode: Literal["online", "offline"] = Field(default="online", description="`offline` stores figures on disk only")


class LogsModel(BaseModel):
    """Additional outputs for figures. `metrics.jsonl` is always written."""

    model_config = _STRICT

    tensorboard: bool = Field(
        default=False, description="write the figures for TensorBoard to the directory of the run"
    )
    wandb: WandbModel | None = None
    episodes_every: int | None = Field(
        default=None, ge=1, description="number of updates between batches whose episodes are kept"
    )


class TrainModel(BaseModel):
    """A train file."""

    model_config = _STRICT

    name: str | None = Field(
        default=None, min_length=1, description="the name of the run; default: the name of the task"
    )
    task: str | dict[str, Any] = Field(description="a task file, relative to this one, or the keys of a task")
    policy: PolicyModel | None = Field(default=None, description="the policy to train; default: the policy of the task")
    updates: int | None = Field(
        default=None, ge=1, description="number of updates of the weights, each from a new batch"
    )
    max_env_steps: int | None = Field(
        default=None,
        ge=1,
        description=(
            "number of environment steps after which training ends, including steps of dropped groups and of "
            "continuations; the batch that reaches it is used"
        ),
    )
    seed: int = Field(default=0, description="the seed of all random choices")
    threads: int | None = Field(
        default=None,
        ge=1,
        description="number of torch threads; a resumed run is bitwise identical only if it uses the same number",
    )
    pipeline: Schedule = Field(default=Schedule.SYNC, description="the order of rollouts, scoring and updates")
    engine: EngineModel = Field(default_factory=EngineModel)
    rollout: RolloutModel = Field(default_factory=RolloutModel)
    reward: RewardModel = Field(default_factory=RewardModel)
    reward_manager: RewardManagerModel = Field(default_factory=RewardManagerModel)
    credit: CreditModel | None = Field(
        default=None,
        description="the credit estimator; default: the estimator of the task, or gigpo if the task has none",
    )
    dynamic_sampling: DynamicSamplingModel | None = None
    hooks: HooksModel | None = None
    ppo: PPO = Field(default_factory=PPOConfig)
    evaluation: EvaluationModel | None = None
    checkpoints: CheckpointsModel = Field(default_factory=CheckpointsModel)
    early_stop: EarlyStopModel | None = None
    logs: LogsModel = Field(default_factory=LogsModel)

    @model_validator(mode="after")
    def _is_limited(self) -> Self:
        if self.updates is None and self.max_env_steps is None:
            raise ValueError("set updates or max_env_steps")
        return self

    def reached_limits(self, updates: int, env_steps: int) -> dict[str, int]:
        """Return the limits, by key, that this many updates and environment steps reach."""
        limits = {"updates": (self.updates, updates), "max_env_steps": (self.max_env_steps, env_steps)}
        return {key: limit for key, (limit, count) in limits.items() if limit is not None and count >= limit}

    def is_finished(self, updates: int, env_steps: int) -> bool:
        """Return whether this many updates and environment steps are enough."""
        return bool(self.reached_limits(updates, env_steps))

    @property
    def best_by(self) -> str:
        """The name of the figure that selects the best checkpoint."""
        return self.checkpoints.best_by or ("held_out/score" if self.evaluation else "score/mean")
