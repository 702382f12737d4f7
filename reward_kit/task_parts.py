"""The sections of a task file: resources, their server, policy, simulated user, limits, and credit."""

from __future__ import annotations

import math
import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

STOP_PHRASE = "###STOP###"
"""The text that ends a conversation with a simulated user by default."""
SandboxLevel = Literal["in_process", "warm", "isolated"]
"""The sandbox of a reward: none, a persistent sandboxed process, or a fresh process for each call."""
BY_NAME: JsonDict = {"type": ["object", "string"]}
"""The JSON schema of a section that may also be given as a plain name."""
StepRewards = Literal["reward_function", "environment"]
"""The source of step rewards for a result that has no step outputs: none, or the environment."""


def _number_to_text(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"YAML reads this as {str(value).lower()}; put the value in quotes")
    return str(value) if isinstance(value, int | float) else value


Word = Annotated[str, BeforeValidator(_number_to_text, json_schema_input_type=str | int | float)]
"""A word of a command or the value of a variable; a number parsed by YAML is converted back to text."""


class ResourcePartModel(BaseModel):
    """A resource in a task that has more than one."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(min_length=1, description="the name of a built-in resource, or module:Class")
    name: str = Field(
        default="", description="a name that is unique among the task's resources; default: the name of the type"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="the resource's configuration")

    @model_validator(mode="after")
    def _check_name(self) -> ResourcePartModel:
        # The name becomes a prefix of tool names and must not look like a key of the configuration.
        self.name = self.name or self.type.rpartition(":")[2]
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", self.name) or self.name == "resources":
            raise ValueError(
                f"the name {self.name!r} is invalid; use 1 to 32 of the characters A-Z a-z 0-9 _ -; "
                "'resources' is reserved"
            )
        return self


def _check_unique_names(parts: list[ResourcePartModel]) -> list[ResourcePartModel]:
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two resources are named {twice!r}; rename one of them")
    return parts


ResourceParts = Annotated[list[ResourcePartModel], Field(min_length=1), AfterValidator(_check_unique_names)]


class ResourceServerConfig(BaseModel):
    """The command that starts the server behind an `http` resource.

    `{port}` in the command, the URL and the variables is replaced by a free port; without `{port}`, the URL is fixed.
    `{python}` in the command and the variables is replaced by the running Python interpreter.
    """

    model_config = ConfigDict(extra="forbid")

    start_command: str = Field(
        description="program and arguments, quoted as in a shell; the program runs in the task's directory"
    )
    health_check_url: str = Field(description="URL that returns status 2xx when the server is ready")
    start_timeout_s: float = Field(default=60.0, gt=0, description="seconds to wait until the server is ready")
    env: dict[str, Word] = Field(default_factory=dict, description="environment variables to add")
    pass_env: list[str] = Field(
        default_factory=list, description="names of additional environment variables to pass to the server"
    )

    @field_validator("start_command")
    @classmethod
    def _check_command(cls, command: str) -> str:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"cannot be split into words: {error}") from error
        if not words:
            raise ValueError("the command is empty; specify a program")
        return command

    @model_validator(mode="after")
    def _check_port(self) -> ResourceServerConfig:
        is_given = any("{port}" in text for text in (self.start_command, *self.env.values()))
        if is_given != ("{port}" in self.health_check_url):
            raise ValueError("{port} must occur in both health_check_url and start_command (or env), or in neither")
        return self


class CriterionModel(BaseModel):
    """A dimension of a rubric: the quality that an LLM judge rates, and its weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str = Field(min_length=1, description="the quality to rate")
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="weight relative to the other criteria")


class EvaluationCriteriaModel(BaseModel):
    """The expected final state and tool calls, which are passed to reward functions as `evaluation_criteria`."""

    model_config = ConfigDict(extra="forbid")

    final_state_query: str | None = Field(default=None, description="a query for a reward that checks the final state")
    ground_truth_function_calls: list[list[str]] | None = Field(
        default=None, description="the names of the tools to call, one list per turn"
    )
    ground_truth_comparable_state: dict[str, Any] | None = Field(
        default=None, description="the content required of the final state"
    )
    rubric: dict[str, str | CriterionModel] | None = Field(
        default=None,
        description="dimensions for llm_judge: a mapping from names to descriptions or to {description, weight}",
    )


class LimitsModel(BaseModel):
    """Limits of one episode. None means no limit."""

    model_config = ConfigDict(extra="forbid")

    wall_time_s: float | None = Field(default=None, gt=0, description="seconds after which the episode is truncated")
    total_tokens: int | None = Field(default=None, gt=0, description="prompt and completion tokens of all steps")
    cost: float | None = Field(default=None, gt=0, description="US dollars, computed from the policy's price_file")
    environment_time_s: float | None = Field(
        default=300.0, gt=0, description="seconds for one setup, reset, fork or observation of the resource"
    )
    tool_time_s: float | None = Field(default=60.0, gt=0, description="seconds for one call of a tool")
    policy_time_s: float | None = Field(default=None, gt=0, description="seconds for one action of the policy")
    reward_time_s: float | None = Field(default=600.0, gt=0, description="seconds for one call of the reward function")
    tool_output_chars: int = Field(
        default=16_000, gt=0, description="maximum length of a tool output; longer outputs are cut and marked"
    )


class SandboxLimitsModel(BaseModel):
    """Limits of one call of a sandboxed reward, in addition to `limits.reward_time_s`.

    None means the default of the sandbox.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    cpu_s: float | None = Field(default=None, gt=0, description="seconds of CPU time; default: limits.reward_time_s")
    memory_mb: int | None = Field(default=None, ge=16, description="MiB, not counting preloaded modules; default 512")
    processes: int | None = Field(default=None, ge=0, description="processes that the reward may start; default 0")
    open_files: int | None = Field(default=None, ge=8, description="open file descriptors; default 64")
    disk_mb: int | None = Field(default=None, ge=1, description="MiB of files that the reward may write; default 16")
    output_kb: int | None = Field(default=None, ge=0, description="KiB of the reward's output to keep; default 64")
    result_kb: int | None = Field(default=None, ge=1, description="KiB of a result; default 256")


class SandboxModel(BaseModel):
    """The sandbox of the reward function."""

    model_config = ConfigDict(extra="forbid")

    level: SandboxLevel | None = Field(
        default=None, description="default: warm for your own files, in_process for built-in rewards"
    )
    limits: SandboxLimitsModel = Field(default_factory=SandboxLimitsModel, description="limits of one call")
    read_paths: list[str] = Field(default_factory=list, description="files and directories that the reward may read")
    preload: list[str] = Field(
        default_factory=list, description="installed modules to import once, before the first call"
    )


class RunLimitsModel(BaseModel):
    """Limits of a run over all its episodes and policies. None means no limit."""

    model_config = ConfigDict(extra="forbid")

    cost: float | None = Field(
        default=None, gt=0, description="US dollars, computed from the price_file of each policy"
    )
    total_tokens: int | None = Field(default=None, gt=0, description="prompt and completion tokens")
    steps: int | None = Field(default=None, gt=0, description="number of actions of the policies")
    wall_time_s: float | None = Field(default=None, gt=0, description="seconds, including the time before a resume")
    outage_time_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds to wait for a model endpoint that is down; default: 600, or less "
        "before the endpoint's first response",
    )


class PolicyModel(BaseModel):
    """The policy that chooses the actions, and its policy-specific settings. Unknown keys are rejected."""

    model_config = ConfigDict(extra="allow", json_schema_extra=BY_NAME)

    type: str = Field(
        description="`openai`, `responses`, `anthropic`, `gemini`, `mistral`, `openrouter`, `vllm`, `sglang`, "
        "`llama.cpp`, `ollama`, `hf`, `own_agent`, `scripted`, `random`, `expert`, `human`, `replay`, or module:Class"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_to_mapping(cls, data: Any) -> Any:
        return {"type": data} if isinstance(data, str) else data

    def options(self) -> dict[str, Any]:
        """Return the keys other than `type`."""
        return dict(self.model_extra or {})


class UserModel(PolicyModel):
    """The simulated user: its instructions, and the settings of the policy that plays the user."""

    type: str = Field(description="`openai`, `anthropic` or another provider, `scripted`, `human`, or module:Class")
    instructions: str | None = Field(
        default=None, description="the user's system message, a template over the sample's row"
    )
    stop_phrase: str = Field(
        default=STOP_PHRASE, min_length=1, description="text that ends the conversation if a reply contains it"
    )
    opens: bool | None = Field(
        default=None, description="whether the user speaks first; default: true if no message has the role user"
    )


class CustomRewardModel(BaseModel):
    """A reward in verl's format, as an alternative to `reward_function_path` and `reward_options`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, description="file.py or package.module")
    name: str = Field(default="compute_score", min_length=1, description="the function or class in the file or module")
    reward_kwargs: dict[str, Any] = Field(default_factory=dict, description="additional keyword parameters")


class NamedRewardModel(BaseModel):
    """One of a task's rewards. Its score is reported as a metric under its name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100, description="a name that is unique among the task's rewards")
    weight: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="the weight in the score, relative to the other rewards; with 0, the reward is only a metric",
    )
    reward_function_path: str = Field(min_length=1, description="file.py:function, package.module:function or a URL")
    reward_options: dict[str, Any] = Field(
        default_factory=dict, description="keyword parameters of the reward function, the same for all calls"
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip() or name == "judge_usage":
            raise ValueError(f"the name {name!r} is invalid; use only printable characters; 'judge_usage' is reserved")
        return name


def _check_rewards(rewards: list[NamedRewardModel]) -> list[NamedRewardModel]:
    names = [reward.name for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two rewards are named {twice!r}; rename one of them")
    total = math.fsum(reward.weight for reward in rewards)
    if not 0 < total < math.inf:
        raise ValueError(f"the weights sum to {total:g}; give at least one reward a positive weight")
    return rewards


NamedRewardModels = Annotated[list[NamedRewardModel], Field(min_length=1), AfterValidator(_check_rewards)]


class CreditModel(BaseModel):
    """The estimator that assigns credit to each step, and its specific settings. Unknown keys are rejected."""

    model_config = ConfigDict(extra="allow", frozen=True, json_schema_extra=BY_NAME)

    estimator: str = Field(
        default="gigpo",
        min_length=1,
        description="an advantage estimator: `gigpo`, `grpo`, `rloo`, …, or your own file.py:function",
    )
    step_rewards: StepRewards = Field(
        default="reward_function",
        description="for results without step outputs: no rewards, or the rewards of the environment",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_to_mapping(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"estimator": data}
        if not isinstance(data, dict | CreditModel):
            raise ValueError("write the name of an estimator, or a mapping such as {estimator: gigpo, omega: 0.3}")
        if isinstance(data, dict) and "name" in data:
            raise ValueError("the key for the estimator is 'estimator', not 'name'")
        return data

    def options(self) -> dict[str, Any]:
        """Return the options of the estimator."""
        return dict(self.model_extra or {})
