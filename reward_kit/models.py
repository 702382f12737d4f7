"""Pydantic models of external data: messages, results of reward functions, and task files.

All models reject unknown keys, so a misspelled key is reported instead of ignored. Only `Message` and its tool calls
keep unknown keys, because providers add keys to transcripts and expect these keys back.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from reward_kit.errors import AlignmentError, did_you_mean, type_name
from reward_kit.legacy_tasks import upgrade_task
from reward_kit.task_parts import (
    CreditModel,
    CustomRewardModel,
    EvaluationCriteriaModel,
    LimitsModel,
    NamedRewardModels,
    PolicyModel,
    ResourceParts,
    ResourceServerConfig,
    RunLimitsModel,
    SandboxModel,
    UserModel,
)

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class FunctionCall(BaseModel):
    """The function of a tool call, and its arguments as the JSON text that the model wrote."""

    model_config = ConfigDict(from_attributes=True, extra="allow")

    name: str = Field(description="the name of the tool")
    arguments: str = Field(default="{}", description="a JSON object as text")


class ToolCall(BaseModel):
    """A tool call in an assistant message, in OpenAI chat format.

    Objects from the `openai` package are also accepted.
    """

    model_config = ConfigDict(from_attributes=True, extra="allow")

    id: str = Field(description="the id of the call, which its result repeats as tool_call_id")
    type: Literal["function"] = Field(default="function", description='always "function"')
    function: FunctionCall

    def to_chat(self) -> dict[str, Any]:
        """Return the same dict as `model_dump`, but much faster."""
        function = self.function
        if self.model_extra or function.model_extra:
            return self.model_dump()
        named = {"name": function.name, "arguments": function.arguments}
        return {"id": self.id, "type": self.type, "function": named}


PROVIDER_ITEMS = "provider_items"
"""The key of a message for API-specific items that the chat format cannot express, such as encrypted reasoning.

Its value maps the API to the list of all items of the message. These items are sent back unchanged to the same API.
"""


class Message(BaseModel):
    """A message of a conversation, in OpenAI chat format.

    `content` is a string, a list of content parts (`{"type": "text", "text": …}`, …) or None.
    """

    model_config = ConfigDict(extra="allow")

    role: Role = Field(description="the role of the speaker; some endpoints use developer for system")
    content: str | list[dict[str, Any]] | None = Field(
        default="",
        description="a string, which in a task file is a template over the sample's row; or a list of content parts",
    )
    name: str | None = Field(
        default=None, description="the name of the speaker, or of the tool that returned the result"
    )
    tool_call_id: str | None = Field(
        default=None, description="in a tool message, the id of the call whose result it is"
    )
    tool_calls: list[ToolCall] | None = Field(default=None, description="in an assistant message, its tool calls")
    function_call: FunctionCall | None = Field(default=None, description="a single call, in OpenAI's older format")
    reasoning_content: str | None = Field(default=None, description="the model's reasoning, if the endpoint returns it")

    @field_validator("tool_calls")
    @classmethod
    def _empty_calls_to_none(cls, calls: list[ToolCall] | None) -> list[ToolCall] | None:
        return calls or None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate a message in the same way as pydantic, but report a missing role as reward-kit 0.4 did."""
        if isinstance(obj, dict) and "role" not in obj:
            problem = InitErrorDetails(
                type=PydanticCustomError("missing", "Role is required"), loc=("role",), input=obj
            )
            raise ValidationError.from_exception_data(cls.__name__, [problem])
        return super().model_validate(obj, **options)

    @property
    def text(self) -> str:
        """The text of the message: its content, or its joined text parts; "" if it has no text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content or [])

    def to_chat(self) -> dict[str, Any]:
        """Return the message in the form that is sent to providers and written to files.

        The result always has `content`; optional fields that are not set are omitted.
        """
        data: dict[str, Any] = {"role": self.role, "content": self.content}
        for key, value in (("name", self.name), ("tool_call_id", self.tool_call_id)):
            if value is not None:
                data[key] = value
        if self.tool_calls:
            data["tool_calls"] = [call.to_chat() for call in self.tool_calls]
        if self.function_call:
            data["function_call"] = self.function_call.model_dump()
        if self.reasoning_content is not None:
            data["reasoning_content"] = self.reasoning_content
        return {**data, **(self.model_extra or {})}


def _finite_number(value: Any) -> float:
    if getattr(value, "ndim", None) == 0:  # A scalar of NumPy or torch, which have their own bool types
        value = value.item()
    if not isinstance(value, numbers.Real):  # A bool is an int
        raise ValueError(f"a score must be a number, got {type_name(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a score must be finite; raise an error to leave the episode unscored")
    return number


Score = Annotated[float, BeforeValidator(_finite_number)]


class _MappingModel(BaseModel):
    """Base class of results whose fields can also be read as items: `result.score` and `result["score"]`."""

    model_config = ConfigDict(extra="forbid", revalidate_instances="always")

    _listed_if_set: ClassVar[frozenset[str]] = frozenset()
    """Fields that iteration omits while they are `None`, so that `dict(result)` has the fields of reward-kit 0.4."""

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(
                f"{key!r} is not a field of {type(self).__name__}{did_you_mean(key, type(self).model_fields)}"
            )
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        later = self._listed_if_set
        return (name for name in type(self).model_fields if name not in later or getattr(self, name) is not None)

    def get(self, key: str, default: Any = None) -> Any:
        """Return `self[key]`, or `default` for an unknown field."""
        return getattr(self, key) if key in type(self).model_fields else default

    def keys(self) -> KeysView[str]:
        return dict(self.items()).keys()

    def values(self) -> ValuesView[Any]:
        return dict(self.items()).values()

    def items(self) -> ItemsView[str, Any]:
        return {name: getattr(self, name) for name in self}.items()


class MetricResult(_MappingModel):
    """A named component of a score. `success=` is accepted for compatibility with reward-kit 0.4 and has no effect."""

    is_score_valid: bool = True
    score: Score
    reason: str

    @model_validator(mode="before")
    @classmethod
    def _drop_success(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if key != "success"} if isinstance(data, dict) else data


_StepMetric = Annotated[
    Annotated[MetricResult, Tag("metric")] | Annotated[Score, Tag("number")],
    Discriminator(lambda value: "metric" if isinstance(value, dict | MetricResult) else "number"),
]


class StepOutput(_MappingModel):
    """The reward of one step. `step_index` counts the policy's actions from 0; it may be 3 or "3".

    Each metric is a `MetricResult` or a number.
    """

    step_index: int | str
    base_reward: Score
    metrics: dict[str, _StepMetric] = Field(default_factory=dict)
    reason: str | None = None


def match_to_steps(outputs: Iterable[StepOutput] | None, steps: Collection[str], what: str) -> dict[str, StepOutput]:
    """Return the step outputs, keyed by step index.

    Raises:
        AlignmentError: a step index is unknown or repeated.
    """
    matched: dict[str, StepOutput] = {}
    for output in outputs or ():
        index = str(output.step_index)
        if index in matched:
            raise AlignmentError(f"{what}: step_index {index!r} occurs twice")
        if index not in steps:
            known = list(steps)
            shown = ", ".join(known if len(known) <= 10 else [*known[:5], "…", *known[-1:]]) or "none"
            raise AlignmentError(f"{what}: unknown step_index {index!r}; known: {shown}")
        matched[index] = output
    return matched


class EvaluateResult(_MappingModel):
    """The result of a reward function for one rollout.

    A result with `is_score_valid=False` or with `error` set leaves the rollout unscored, and its `score` is not used.
    `query` and `response` are a judge's prompt and response; they are stored with the score. If the scores of a group
    were post-processed, `raw_score` is the original score, and `is_imputed` is true if there was no original score.
    """

    _listed_if_set = frozenset({"query", "response", "raw_score", "is_imputed"})

    score: Score
    is_score_valid: bool = True
    reason: str | None = None
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    step_outputs: list[StepOutput] | None = None
    error: str | None = None
    query: str | None = None
    response: str | None = None
    raw_score: Score | None = None
    is_imputed: bool | None = None

    def _repr_html_(self) -> str:
        from reward_kit.notebook_html import result_html

        return result_html(self.model_dump())


class TaskDefinitionModel(BaseModel):
    """A task: its prompt, resource, limits, and reward.

    Paths are relative to the task file. `messages` and `initial_user_prompt` are Jinja2 templates over the fields of
    the sample's row and `observation`, the environment's first observation. If no template uses `observation`, the
    observation is appended as a user message unless the key `observation` is false.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = Field(min_length=1, description="the task's name, used in results and in the names of run directories")
    description: str = Field(default="", description="a description for readers")
    tags: list[str] = Field(
        default_factory=list,
        description="tags of all samples, in addition to the `tags` of each dataset row; results are shown per tag",
    )
    resource_type: str | None = Field(default=None, description="the name of a built-in resource, or module:Class")
    base_resource_config: dict[str, Any] = Field(
        default_factory=dict, description="the resource's configuration; a row's resource_config overrides its keys"
    )
    resources: ResourceParts | None = Field(
        default=None, description="multiple resources, instead of resource_type and base_resource_config"
    )
    tools_module_path: str | None = Field(
        default=None, description="file.py or dotted module that contains a ToolRegistry"
    )
    tools: list[str] | None = Field(
        default=None,
        description="names of the tools that the agent sees; default: the task's tools, otherwise the resource's tools",
    )
    observation: bool = Field(
        default=True,
        description="whether the agent sees the environment's first observation, such as a database schema",
    )
    reward_function_path: str | None = Field(
        default=None, description="file.py:function, package.module:function or a URL"
    )
    reward_options: dict[str, Any] = Field(
        default_factory=dict, description="keyword parameters of the reward function, the same for all calls"
    )
    custom_reward_function: CustomRewardModel | None = Field(
        default=None, description="the reward in verl's format, instead of reward_function_path and reward_options"
    )
    rewards: NamedRewardModels | None = Field(
        default=None,
        description="multiple rewards, instead of reward_function_path; the score is their weighted mean",
    )
    goal_description: str | None = Field(
        default=None, description="a description of the goal, passed to reward functions"
    )
    evaluation_criteria: EvaluationCriteriaModel | None = Field(
        default=None, description="the expected final state, passed to reward functions"
    )
    initial_user_prompt: str | None = Field(
        default=None, description="the user's first message, which follows messages; a template over the sample's row"
    )
    messages: list[Message] = Field(
        default_factory=list, description="the first messages; their contents are templates over the sample's row"
    )
    resource_server: ResourceServerConfig | None = Field(
        default=None, description="how to start the server behind an http resource"
    )
    num_rollouts: int = Field(default=1, ge=1, description="number of rollouts of a task without a dataset")
    dataset_path: str | None = Field(
        default=None,
        description="a JSONL, CSV or YAML file with one sample per row, or a folder of Harbor tasks; "
        "without it, the task is the only sample",
    )
    num_rollouts_per_sample: int = Field(default=1, ge=1, description="number of episodes per sample of the dataset")
    max_episode_steps: int = Field(
        default=10,
        ge=1,
        alias="poc_max_turns",
        description="maximum number of actions of the policy, after which the episode is truncated",
    )
    termination_regex: str | None = Field(
        default=None,
        description="regular expression to search for in each output of the policy; a match ends the episode",
    )
    stop_phrases: list[str] = Field(
        default_factory=list, description="strings that end the episode if an output contains one of them"
    )
    terminate_tool: str | None = Field(default=None, description="name of an additional tool that ends the episode")
    on_text: Literal["end", "continue"] | None = Field(
        default=None,
        description=(
            "the effect of an action without tool calls; default: end if there are no tools, otherwise continue"
        ),
    )
    nudge: str = Field(
        default="Please continue with a tool call.",
        description="the reply to a text message that does not end the episode",
    )
    noise: Literal["independent", "shared"] = Field(
        default="independent", description="`shared`: the environments of a group draw the same random numbers"
    )
    ground_truth: Any = Field(
        default=None,
        description=(
            "the ground truth, which is passed to reward functions but never to the policy; only without a dataset"
        ),
    )
    pass_threshold: float = Field(default=1.0, description="the lowest score that passes")
    policy: PolicyModel | None = Field(default=None, description="the policy; --model and --policy override it")
    user: UserModel | None = Field(
        default=None, description="the simulated user, who replies to the agent's text messages"
    )
    limits: LimitsModel = Field(default_factory=LimitsModel, description="limits of one episode")
    run_limits: RunLimitsModel = Field(default_factory=RunLimitsModel, description="limits of a whole run")
    sandbox: SandboxModel = Field(default_factory=SandboxModel, description="the sandbox of the reward function")
    credit: CreditModel | None = Field(default=None, description="the credit assigned to each step after the run")
    redact: str | None = Field(
        default=None,
        description="file.py:function that maps a string to a string, applied to every string before it is stored",
    )

    @model_validator(mode="before")
    @classmethod
    def _upgrade_legacy_keys(cls, data: Any) -> Any:
        return upgrade_task(data)

    @model_validator(mode="before")
    @classmethod
    def _reject_two_step_limits(cls, data: Any) -> Any:
        if isinstance(data, dict) and {"max_episode_steps", "poc_max_turns"} <= data.keys():
            raise ValueError("max_episode_steps and poc_max_turns are the same option; keep max_episode_steps")
        return data

    @field_validator("tools", mode="before")
    @classmethod
    def _check_tool_names(cls, names: Any) -> Any:
        if isinstance(names, str):
            raise ValueError(
                "expected a list of names; to name the file with the task's own tools, use tools_module_path"
            )
        if isinstance(names, list) and (twice := next((name for name in names if names.count(name) > 1), None)):
            raise ValueError(f"{twice!r} is listed twice")
        return names

    @field_validator("resources")
    @classmethod
    def _reject_two_resource_forms(cls, parts: Any, info: ValidationInfo) -> Any:
        if parts is not None and (info.data.get("resource_type") or info.data.get("base_resource_config")):
            raise ValueError("resources replaces resource_type and base_resource_config; remove one of the two")
        return parts

    @field_validator("rewards")
    @classmethod
    def _reject_two_reward_forms(cls, rewards: Any, info: ValidationInfo) -> Any:
        for key in ("reward_function_path", "reward_options", "custom_reward_function"):
            if rewards is not None and info.data.get(key):
                raise ValueError(f"rewards replaces {key}; remove one of the two")
        return rewards

    @model_validator(mode="after")
    def _combine_resources(self) -> TaskDefinitionModel:
        # From here on, and also in stored definitions, there is only one form.
        if self.resources is not None:
            self.resource_type = "composite"
            self.base_resource_config = {"resources": [part.model_dump() for part in self.resources]}
            self.resources = None
        return self

    @model_validator(mode="after")
    def _normalize_reward(self) -> TaskDefinitionModel:
        # From here on, there is only one form, as for resources.
        if (custom := self.custom_reward_function) is not None:
            if self.reward_function_path is not None or self.reward_options:
                raise ValueError(
                    "custom_reward_function replaces reward_function_path and reward_options; remove one of the two"
                )
            self.reward_function_path = f"{custom.path}:{custom.name}"
            self.reward_options = dict(custom.reward_kwargs)
            self.custom_reward_function = None
        return self

    @field_validator("user")
    @classmethod
    def _check_user_is_answered(cls, user: UserModel | None, info: ValidationInfo) -> UserModel | None:
        if user is not None and info.data.get("on_text") == "end":
            raise ValueError("with on_text: end, the episode would end before the user replies; remove on_text or user")
        return user

    @field_validator("termination_regex")
    @classmethod
    def _regex_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return pattern
