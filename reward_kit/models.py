"""The data that crosses our edges: messages, results of reward functions, and the task file.

Everything here is pydantic and refuses what it does not know: a misspelt key is an error that names the field and shows
the value, never a silent default. `Message` and its tool calls alone keep unknown keys, because
transcripts come from providers that add their own and want them back.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from reward_kit.errors import AlignmentError, did_you_mean, type_name
from reward_kit.legacy_tasks import upgrade_task
from reward_kit.task_parts import (
    CreditModel,
    CustomRewardModel,
    EvaluationCriteriaModel,
    LimitsModel,
    PolicyModel,
    ResourceParts,
    ResourceServerConfig,
    RunLimitsModel,
    SandboxModel,
    UserModel,
)

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class FunctionCall(BaseModel):
    """The function a tool call names, with its arguments as the JSON text the model wrote."""

    model_config = ConfigDict(from_attributes=True, extra="allow")

    name: str = Field(description="of the tool")
    arguments: str = Field(default="{}", description="a JSON object, as text")


class ToolCall(BaseModel):
    """A tool call of an assistant message, in OpenAI chat form. Accepts the `openai` package's own objects."""

    model_config = ConfigDict(from_attributes=True, extra="allow")

    id: str = Field(description="the result's tool_call_id is the same")
    type: Literal["function"] = Field(default="function", description="the only kind")
    function: FunctionCall

    def to_chat(self) -> dict[str, Any]:
        """Return the same as `model_dump`, which takes much longer."""
        function = self.function
        if self.model_extra or function.model_extra:
            return self.model_dump()
        named = {"name": function.name, "arguments": function.arguments}
        return {"id": self.id, "type": self.type, "function": named}


class Message(BaseModel):
    """A message of a conversation, in OpenAI chat form.

    `content` is text, a list of content parts (`{"type": "text", "text": …}`, …) or None.
    """

    model_config = ConfigDict(extra="allow")

    role: Role = Field(description="who speaks; developer is what some endpoints call system")
    content: str | list[dict[str, Any]] | None = Field(
        default="", description="text, a template over the sample's row in a task file; or a list of content parts"
    )
    name: str | None = Field(default=None, description="of the speaker, or of the tool that answered")
    tool_call_id: str | None = Field(default=None, description="of a tool's message: which call it answers")
    tool_calls: list[ToolCall] | None = Field(default=None, description="of an assistant's message: what it calls")
    function_call: FunctionCall | None = Field(default=None, description="one call in OpenAI's form before tool_calls")
    reasoning_content: str | None = Field(default=None, description="what the model thought, where an endpoint says it")

    @field_validator("tool_calls")
    @classmethod
    def _no_call_is_none(cls, calls: list[ToolCall] | None) -> list[ToolCall] | None:
        return calls or None

    @property
    def text(self) -> str:
        """The text of the message: its content, or its text parts joined; "" without any."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content or [])

    def to_chat(self) -> dict[str, Any]:
        """Return the message as providers and files want it: no unset optional fields, `content` always there."""
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
    # NumPy's numbers are registered as Real, its bool is not.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"a score is a number, not {type_name(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a score is finite; leave the episode unscored by raising an error instead")
    return number


Score = Annotated[float, BeforeValidator(_finite_number)]


class _MappingModel(BaseModel):
    """Results can be read as attributes and as mappings: `result.score` and `result["score"]`."""

    model_config = ConfigDict(extra="forbid", revalidate_instances="always")

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(
                f"{key!r} is not a field of {type(self).__name__}{did_you_mean(key, type(self).model_fields)}"
            )
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(type(self).model_fields)

    def get(self, key: str, default: Any = None) -> Any:
        """Return `self[key]`, or `default` for an unknown field."""
        return getattr(self, key) if key in type(self).model_fields else default

    def keys(self) -> KeysView[str]:
        """Return the field names."""
        return dict(self.items()).keys()

    def values(self) -> ValuesView[Any]:
        """Return the field values."""
        return dict(self.items()).values()

    def items(self) -> ItemsView[str, Any]:
        """Return the fields as pairs."""
        return {name: getattr(self, name) for name in type(self).model_fields}.items()


class MetricResult(_MappingModel):
    """A named component of a score, in [0, 1]."""

    is_score_valid: bool = True
    score: Score = Field(ge=0.0, le=1.0)
    reason: str


class StepOutput(_MappingModel):
    """The reward of one step. `step_index` counts the policy's actions from 0; 3 and "3" are the same step."""

    step_index: int | str
    base_reward: Score
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    reason: str | None = None


def match_to_steps(outputs: Iterable[StepOutput] | None, steps: Collection[str], what: str) -> dict[str, StepOutput]:
    """Step outputs by the step that each names."""
    matched: dict[str, StepOutput] = {}
    for output in outputs or ():
        index = str(output.step_index)
        if index in matched:
            raise AlignmentError(f"{what}: step_index {index!r} is given twice")
        if index not in steps:
            known = list(steps)
            shown = ", ".join(known if len(known) <= 10 else [*known[:5], "…", *known[-1:]]) or "none"
            raise AlignmentError(f"{what}: step_index {index!r} names no step; known: {shown}")
        matched[index] = output
    return matched


class EvaluateResult(_MappingModel):
    """The result of a reward function for one rollout.

    A result with `is_score_valid=False` or with `error` set leaves the rollout unscored: its `score` is not used.
    `query` and `response` are the question to a judge and its answer; they are kept with the score. Where scores of a
    group were processed further, `raw_score` is the score before, and `is_imputed` is true if there was none.
    """

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
    """A task: what is asked, in which resource, how an episode ends, and how it is scored.

    Paths are relative to the task file. `messages` and `initial_user_prompt` are Jinja2 templates over the fields of
    the sample's row and `observation`, the environment's first observation; where no template uses it, that
    observation is appended as a user message.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = Field(min_length=1, description="names the task in results, and its runs' folders")
    description: str = Field(default="", description="for people")
    resource_type: str | None = Field(default=None, description="a built-in resource's name, or module:Class")
    base_resource_config: dict[str, Any] = Field(
        default_factory=dict, description="the resource's configuration; a row's resource_config is laid over it"
    )
    resources: ResourceParts | None = Field(
        default=None, description="several resources, instead of resource_type and base_resource_config"
    )
    tools_module_path: str | None = Field(default=None, description="file.py or dotted module with a ToolRegistry")
    reward_function_path: str | None = Field(
        default=None, description="file.py:function, package.module:function or a URL"
    )
    reward_options: dict[str, Any] = Field(
        default_factory=dict, description="keyword parameters of the reward function, fixed for all its calls"
    )
    custom_reward_function: CustomRewardModel | None = Field(
        default=None, description="the reward as verl names it, instead of reward_function_path and reward_options"
    )
    goal_description: str | None = Field(default=None, description="handed to reward functions")
    evaluation_criteria: EvaluationCriteriaModel | None = Field(
        default=None, description="what a reward may compare a final state with; handed to reward functions"
    )
    initial_user_prompt: str | None = Field(
        default=None, description="a first message of the user, after messages; a template over the sample's row"
    )
    messages: list[Message] = Field(
        default_factory=list, description="the first messages; their contents are templates over the sample's row"
    )
    resource_server: ResourceServerConfig | None = Field(
        default=None, description="how to start the server behind an http resource"
    )
    num_rollouts: int = Field(default=1, ge=1, description="rollouts of the task itself, where it has no dataset")
    dataset_path: str | None = Field(
        default=None, description="JSONL, CSV or a YAML list, a sample each row; without it the task is the one sample"
    )
    num_rollouts_per_sample: int = Field(default=1, ge=1, description="episodes of each sample of the dataset")
    max_episode_steps: int = Field(
        default=10, ge=1, alias="poc_max_turns", description="actions of the policy, then the episode is cut off"
    )
    termination_regex: str | None = Field(default=None, description="searched in each output of the policy")
    stop_phrases: list[str] = Field(default_factory=list, description="an output that contains one ends the episode")
    terminate_tool: str | None = Field(default=None, description="offer a tool of this name with which the agent ends")
    on_text: Literal["end", "continue"] | None = Field(
        default=None, description="what an action without tool calls does; default: end without tools, else continue"
    )
    nudge: str = Field(
        default="Please continue with a tool call.", description="the answer to a text that does not end the episode"
    )
    noise: Literal["independent", "shared"] = Field(
        default="independent", description="`shared`: after the start the worlds of a group draw the same chances"
    )
    ground_truth: Any = Field(
        default=None, description="handed to reward functions, never to the policy; of a task without a dataset"
    )
    pass_threshold: float = Field(default=1.0, description="a score of at least this counts as a pass")
    policy: PolicyModel | None = Field(default=None, description="who acts; --model and --policy stand above it")
    user: UserModel | None = Field(default=None, description="who answers the agent's texts")
    limits: LimitsModel = Field(default_factory=LimitsModel, description="bounds on one episode")
    run_limits: RunLimitsModel = Field(default_factory=RunLimitsModel, description="bounds on a whole run")
    sandbox: SandboxModel = Field(default_factory=SandboxModel, description="how the reward is confined")
    credit: CreditModel | None = Field(default=None, description="how each step is credited when the run is over")
    redact: str | None = Field(default=None, description="file.py:function, text to text, applied before it is stored")

    @model_validator(mode="before")
    @classmethod
    def _as_it_is_named_now(cls, data: Any) -> Any:
        return upgrade_task(data)

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_the_step_limit(cls, data: Any) -> Any:
        if isinstance(data, dict) and {"max_episode_steps", "poc_max_turns"} <= data.keys():
            raise ValueError("max_episode_steps and poc_max_turns are two names of one key; keep max_episode_steps")
        return data

    @field_validator("resources")
    @classmethod
    def _stand_alone(cls, parts: Any, info: ValidationInfo) -> Any:
        if parts is not None and (info.data.get("resource_type") or info.data.get("base_resource_config")):
            raise ValueError("resources replaces resource_type and base_resource_config; keep one form")
        return parts

    @model_validator(mode="after")
    def _several_resources_are_one(self) -> TaskDefinitionModel:
        # One form from here on, which is also what a stored definition is read back from.
        if self.resources is not None:
            self.resource_type = "composite"
            self.base_resource_config = {"resources": [part.model_dump() for part in self.resources]}
            self.resources = None
        return self

    @model_validator(mode="after")
    def _one_name_for_the_reward(self) -> TaskDefinitionModel:
        # As with the resources: one form from here on.
        if (named := self.custom_reward_function) is not None:
            if self.reward_function_path is not None or self.reward_options:
                raise ValueError("custom_reward_function replaces reward_function_path with reward_options; keep one")
            self.reward_function_path = f"{named.path}:{named.name}"
            self.reward_options = dict(named.reward_kwargs)
            self.custom_reward_function = None
        return self

    @field_validator("user")
    @classmethod
    def _a_user_is_answered(cls, user: UserModel | None, info: ValidationInfo) -> UserModel | None:
        if user is not None and info.data.get("on_text") == "end":
            raise ValueError("on_text: end would end the episode where the user answers; leave one of them out")
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
