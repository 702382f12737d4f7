"""Samples, the seeds and ids derived from them, and the first messages of their episodes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pydantic

from reward_kit.errors import ConfigError, boundary, did_you_mean
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.validation import describe_validation_error

if TYPE_CHECKING:
    import jinja2


class PromptError(ConfigError):
    """Raised if a template of the task does not fit a sample.

    Attributes:
        key: the key of the template in the task file.
        problem: the message without the location of the sample.
    """

    # All other parameters have defaults, so that the error can be pickled.
    def __init__(self, message: str, key: tuple[str | int, ...] = (), problem: str = "") -> None:
        super().__init__(message)
        self.key, self.problem = key, problem


def parse_tags(value: Any) -> tuple[str, ...]:
    """Return a row's tags, given the value of its `tags` field.

    The value is a list of strings, or a string in which tags are separated by commas, as in a CSV file. Any other value
    yields no tags.
    """
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    return tuple(dict.fromkeys(tag.strip() for tag in given if isinstance(tag, str) and tag.strip()))


@dataclass(frozen=True, slots=True)
class Sample:
    """The initial condition of an episode: a row of the dataset, or the task itself if it has no dataset.

    Attributes:
        id: the id of the sample, unique in its task.
        row: the fields that message templates and reward functions may use.
        ground_truth: the value that reward functions receive. The policy never receives it.
        resource_config: the settings that override the task's `base_resource_config`.
        where: the sample's file and line, shown in error messages.
    """

    id: str
    row: Mapping[str, Any] = field(default_factory=dict)
    ground_truth: Any = None
    resource_config: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def __post_init__(self) -> None:
        """Reject a `resource_config` that is only in the row, where it has no effect."""
        if self.row.get("resource_config") and not self.resource_config:
            raise ConfigError(
                f"sample {self.id!r}: resource_config in the row has no effect; pass Sample(…, resource_config=…)"
            )

    @property
    def location(self) -> str:
        """The sample's id, file and line, shown in error messages."""
        return f"sample {self.id!r}" + (f" ({self.where})" if self.where else "")

    @classmethod
    def from_task(cls, task: TaskDefinitionModel) -> Sample:
        """Return the task itself as a sample, for a task without a dataset."""
        return cls(task.name, {"tags": list(task.tags)} if task.tags else {}, ground_truth=task.ground_truth)


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of one episode. All episodes of a group have the same environment seed but different policy seeds."""

    run: int
    environment: int
    policy: int
    noise: int


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from the given parts, such as a purpose, the run's seed, and ids.

    Equal parts always produce equal seeds.
    """
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def derive_seeds(run_seed: int, sample_id: str, rollout_index: int, noise: str, policy_label: str = "") -> Seeds:
    """Return the environment seed f(run, sample) and the policy seed f(run, sample, rollout index, policy).

    If `noise` is "independent", the forks in a group draw different random numbers. If it is "shared", they draw the
    same random numbers.
    """
    noise_parts = (rollout_index,) if noise == "independent" else ()
    return Seeds(
        run=run_seed,
        environment=derive_seed("environment", run_seed, sample_id),
        policy=derive_seed("policy", run_seed, sample_id, rollout_index, policy_label),
        noise=derive_seed("noise", run_seed, sample_id, *noise_parts),
    )


def make_group_id(run_seed: int, sample_id: str, policy_label: str = "") -> str:
    """Return a readable id for a sample's group of episodes. The id is unique in a run."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", sample_id)[:40]
    return f"{slug}-{derive_seed('group', run_seed, sample_id, policy_label) & 0xFFFFFFFFFFFF:012x}"


def make_rollout_id(group_id: str, rollout_index: int) -> str:
    """Return the id of one episode in a group."""
    return f"{group_id}-{rollout_index}"


class Prompt:
    """The compiled templates of the first messages of an episode.

    Attributes:
        shows_observation: True if a template uses the first observation of the environment.

    Raises:
        ConfigError: If a template is invalid.
    """

    def __init__(self, task: TaskDefinitionModel) -> None:
        self._task = task
        self._messages = list(task.messages)
        if task.initial_user_prompt is not None:
            self._messages.append(Message(role="user", content=task.initial_user_prompt))
        self._templates: dict[str, jinja2.Template] = {}
        self.shows_observation = False
        for message in self._messages:
            content = message.content
            parts = [{"text": content}] if isinstance(content, str) else content or []
            for text in (part.get("text") for part in parts):
                if not (isinstance(text, str) and "{" in text):
                    continue
                # Jinja2 costs 30 ms to import and many tasks have no template.
                import jinja2

                from reward_kit.agent.prompt_templates import TemplateLimitError, compile_template

                try:
                    self._templates[text], used = compile_template(text)
                except (jinja2.TemplateSyntaxError, TemplateLimitError) as error:
                    raise ConfigError(f"task {task.name!r}: message template {text[:60]!r}: {error}") from None
                self.shows_observation |= "observation" in used

    def render(self, sample: Sample, observation: str = "") -> list[Message]:
        """Return the first messages of an episode.

        The templates are rendered with the sample's row. If the task has no templates, the row's `messages` are used.

        Args:
            sample: the sample of the episode.
            observation: the first observation of the environment, as text. It is ignored if the task hides the
                observation.

        Raises:
            ConfigError: If a template does not fit the row, or a message is invalid.
        """
        messages: list[Message] = []
        if not self._task.observation:
            observation = ""
        default = {"observation": ""} if self._task.observation else {}
        fields = {**default, **sample.row, **({"observation": observation} if observation else {})}
        for index, message in enumerate(self._messages):
            key = ("messages", index) if index < len(self._task.messages) else ("initial_user_prompt",)
            content: Any = message.content
            if isinstance(content, str):
                content = self._fill(content, fields, sample, key)
            elif content:
                content = [
                    {**part, "text": self._fill(part["text"], fields, sample, key)}
                    if isinstance(part.get("text"), str)
                    else part
                    for part in content
                ]
            messages.append(message.model_copy(update={"content": content}))
        if not messages:
            try:
                messages = pydantic.TypeAdapter(list[Message]).validate_python(sample.row.get("messages") or [])
            except pydantic.ValidationError as error:
                problems = "; ".join(describe_validation_error(error))
                raise ConfigError(f"{sample.location}: messages: {problems}") from None
        if observation and not self.shows_observation:
            messages.append(Message(role="user", content=observation))
        return messages

    def _fill(self, text: str, fields: Mapping[str, Any], sample: Sample, key: tuple[str | int, ...]) -> str:
        if text not in self._templates:
            return text
        from reward_kit.agent.prompt_templates import TemplateLimitError, render_template

        try:
            with boundary(ConfigError, f"message template {text[:60]!r}"):
                return render_template(self._templates[text], fields)
        except ConfigError as error:
            cause = error.__cause__
            undefined = re.fullmatch(r"'(\w+)' is undefined", str(cause))
            if undefined is not None:
                is_hidden = undefined[1] == "observation"  # with a default unless the task hides it
                names = [*map(str, sample.row), *(["observation"] if self._task.observation else [])]
                why = ", because the task sets observation: false" if is_hidden else did_you_mean(undefined[1], names)
                problem = f"message template {text[:60]!r}: {cause}{why}"
            elif isinstance(cause, TemplateLimitError):
                problem = f"message template {text[:60]!r}: {cause}"
            else:
                problem = f"{error}; the row's fields: {', '.join(sorted(map(str, sample.row))) or 'none'}"
            raise PromptError(f"{sample.location}: {problem}", key, problem) from cause
