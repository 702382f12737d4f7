"""The sweep file: its schema, and the overrides of its arms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.runs.task_file import LocatedYaml, validate_model

START = "start"
"""The name of the untrained policy, which is evaluated like an arm."""
_STRICT = ConfigDict(extra="forbid")
ArmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]
Seed = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0)]


class SweepEvaluationModel(BaseModel):
    """The evaluation of the last weights of each run, and of the untrained policy."""

    model_config = _STRICT

    temperatures: list[Temperature] | None = Field(
        default=None,
        min_length=1,
        description="sampling temperatures; 0 is greedy; default: the temperature of the train file's evaluation",
    )
    rollouts: int = Field(default=1, ge=1, description="number of episodes per sample; always 1 at temperature 0")
    by: str | None = Field(
        default=None, min_length=1, description="a key of the samples or a tag; scores are also shown per value"
    )
    dataset_path: str | None = Field(
        default=None, description="a file with held-out samples; default: the held-out samples of the train file"
    )
    limit: int | None = Field(default=None, ge=1, description="use only this many samples, from the beginning")


class SweepModel(BaseModel):
    """A sweep file."""

    model_config = _STRICT

    name: str = Field(min_length=1, description="the name of the sweep")
    train: str = Field(min_length=1, description="the train file of all arms, relative to this file")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="values that replace values of the train file in all arms; dotted if nested"
    )
    seeds: Annotated[int, Field(ge=1)] | Annotated[list[Seed], Field(min_length=1)] = Field(
        default=5, description="number of seeds of each arm, or the seeds"
    )
    arms: dict[ArmName, dict[str, Any]] = Field(
        min_length=1, description="the settings to compare: each name with the values that it overrides"
    )
    baseline: str | None = Field(
        default=None, description="the arm with which the others are compared; default: the first"
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        description="number of runs at a time; default: CPU cores divided by the train file's threads",
    )
    evaluation: SweepEvaluationModel = Field(default_factory=SweepEvaluationModel)

    @field_validator("seeds", mode="before")
    @classmethod
    def _check_seeds(cls, given: Any) -> Any:
        numbers = given if isinstance(given, list) else [given]
        least = 0 if isinstance(given, list) else 1
        if not numbers or not all(type(one) is int and one >= least for one in numbers):
            raise ValueError("must be a number of 1 or more, or a list of seeds of 0 or more")
        return given


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A parsed sweep file. Nothing that it refers to is loaded."""

    located: LocatedYaml
    config: SweepModel

    @classmethod
    def read(cls, path: Path) -> SweepFile:
        """Parse a sweep file.

        Raises:
            ConfigError: If the file is invalid. The message has one line per problem.
        """
        located = LocatedYaml(path)
        config = validate_model(located, {}, SweepModel, "a sweep file")
        if START in config.arms:
            where = located.where(("arms", START))
            raise ConfigError(f"{where}: arms.{START}: {START!r} is the name of the untrained policy; rename the arm")
        for key, block in (
            (("overrides",), config.overrides),
            *((("arms", arm), of) for arm, of in config.arms.items()),
        ):
            if "seed" in block:
                where = located.where((*key, "seed"))
                raise ConfigError(f"{where}: {'.'.join(key)}.seed: each arm has all `seeds`; remove the key")
        if not (path.parent / config.train).is_file():
            where = located.where(("train",))
            named = Path(config.train)
            beside = [str(named.with_name(one.name)) for one in (path.parent / named).parent.glob("*.y*ml")]
            near = did_you_mean(config.train, beside)
            raise ConfigError(f"{where}: train: the file {config.train} does not exist{near}")
        if config.baseline is not None and config.baseline not in config.arms:
            near = did_you_mean(config.baseline, config.arms)
            raise ConfigError(f"{located.where(('baseline',))}: baseline: unknown arm {config.baseline!r}{near}")
        repeatable = (("seeds",), config.seeds), (("evaluation", "temperatures"), config.evaluation.temperatures)
        for path_of, values in repeatable:
            if isinstance(values, list) and len(set(values)) < len(values):
                raise ConfigError(f"{located.where(path_of)}: {'.'.join(path_of)}: a value occurs twice")
        return cls(located, config)

    @property
    def path(self) -> Path:
        """The sweep file."""
        return self.located.path

    @property
    def train_path(self) -> Path:
        """The train file."""
        return self.path.parent / self.config.train

    @property
    def baseline(self) -> str:
        """The arm with which the others are compared."""
        return self.config.baseline or next(iter(self.config.arms))

    @property
    def seeds(self) -> list[int]:
        """The seeds of each arm."""
        seeds = self.config.seeds
        return list(range(seeds)) if isinstance(seeds, int) else seeds

    def overrides(self, arm: str) -> dict[str, Any]:
        """Return the overrides of an arm. Its own keys replace those of all arms, including nested ones."""
        own = self.config.arms[arm]
        common = {
            key: value
            for key, value in self.config.overrides.items()
            if not any(f"{key}.".startswith(f"{other}.") for other in own)
        }
        return common | own

    def evaluation_overrides(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides for the evaluations of a run with these overrides."""
        found, given = dict(overrides), self.config.evaluation
        if given.dataset_path is not None:
            found = {key: value for key, value in overrides.items() if key.partition(".")[0] != "evaluation"}
            found["evaluation"] = {"dataset_path": str((self.path.parent / given.dataset_path).resolve())}
        if given.limit is not None:
            found["evaluation.limit"] = given.limit
        return found
