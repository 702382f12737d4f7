"""Which policies a run has: those that the command line names, else the task file's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from reward_kit.agent.policies import make_policy
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.models import PolicyModel
from reward_kit.runs.runner import NamedPolicy
from reward_kit.runs.tasks import Task

_PROVIDERS = ("openai",)


class _Choice(NamedTuple):
    label: str
    type: str
    options: dict[str, Any]


def make_policies(
    task: Task, models: Sequence[str] = (), names: Sequence[str] = (), base_url: str | None = None
) -> list[NamedPolicy]:
    """The policies of a run, with the task file's options where the type agrees.

    Args:
        task: its `policy` is used where nothing else is named.
        models: as `openai/NAME`.
        names: built-in names, or `file.py:Class`, relative to the task file.
        base_url: the endpoint of the models.

    Raises:
        ConfigError: no policy is named anywhere, one cannot be made, or two have one label.
    """
    in_file = task.definition.policy
    choices = [_model(model, in_file) for model in models]
    choices += [_Choice(name, name, _file_options(name, in_file)) for name in names]
    if not choices and in_file is not None:
        label = f"openai/{in_file.options().get('model')}" if in_file.type == "openai" else in_file.type
        choices = [_Choice(label, in_file.type, in_file.options())]
    _check(task, choices)
    if base_url is not None:
        _send_to(base_url, choices)
    folder = task.path.resolve().parent
    return [NamedPolicy(label, make_policy(kind, options, folder)) for label, kind, options in choices]


def _check(task: Task, choices: Sequence[_Choice]) -> None:
    if not choices:
        raise ConfigError(
            f"{task.path}: no policy. Give --model openai/NAME, --policy random, or a policy: block in the file"
        )
    if task.definition.resource_type is None and any(choice.type == "expert" for choice in choices):
        raise ConfigError(f"{task.path}: the expert policy asks the resource, and the task has no resource_type")
    labels = [choice.label for choice in choices]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"two policies are called {twice!r}")


def _send_to(base_url: str, choices: Sequence[_Choice]) -> None:
    if all(choice.type != "openai" for choice in choices):
        raise ConfigError("--base-url is for models, and no policy of this run is one; give --model openai/NAME")
    for choice in choices:
        if choice.type == "openai":
            choice.options["base_url"] = base_url


def _model(model: str, in_file: PolicyModel | None) -> _Choice:
    provider, separator, name = model.partition("/")
    if not separator or not name or provider not in _PROVIDERS:
        raise ConfigError(
            f"--model {model!r}: write openai/NAME{did_you_mean(provider, _PROVIDERS)} "
            "(any OpenAI-compatible endpoint through --base-url)"
        )
    return _Choice(model, provider, {**_file_options(provider, in_file), "model": name})


def _file_options(name: str, in_file: PolicyModel | None) -> dict[str, Any]:
    return in_file.options() if in_file is not None and in_file.type == name else {}
