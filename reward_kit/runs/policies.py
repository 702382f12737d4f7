"""Which policies a run has: those that the command line names, else the task file's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.replay_policy import recorded_labels
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.simulated_user import WHO, SimulatedUser
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.runs.overrides import keys_of_user
from reward_kit.runs.plan import NamedPolicy
from reward_kit.runs.tasks import LoadedTask
from reward_kit.task_parts import PolicyModel

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession

_PROVIDERS = ("openai",)
_OF_POLICY = re.compile(r"policy\.(\w+)")
_PACKAGE = "reward_kit."
_ASK_AN_ENDPOINT = ("openai", "own_agent")


class _Choice(NamedTuple):
    label: str
    type: str
    options: dict[str, Any]


def make_policies(
    task: LoadedTask,
    models: Sequence[str] = (),
    names: Sequence[str] = (),
    base_url: str | None = None,
    traffic: ProviderSession | None = None,
) -> list[NamedPolicy]:
    """The policies of a run, with the task file's options where the type agrees.

    Args:
        task: its `policy` is used where nothing else is named.
        models: as `openai/NAME`.
        names: built-in names; `file.py:Class`, relative to the task file; or `replay:RUN`, relative to the working
            directory, which plays every policy of that run.
        base_url: the endpoint of the models.
        traffic: what all their requests share.

    Raises:
        ConfigError: no policy is named anywhere, one cannot be made, or two have one label.
    """
    in_file = task.definition.policy
    choices = [_model(model, in_file) for model in models]
    for name in names:
        kind, _, run = name.partition(":")
        options = _file_options("replay" if run and kind == "replay" else name, in_file)
        choices += _replays(Path(run), options) if run and kind == "replay" else [_Choice(name, name, options)]
    is_of_file = not choices and in_file is not None
    if is_of_file and in_file is not None:
        choices = _of_file(in_file, task.folder)
    _check(task, choices)
    if base_url is not None:
        _send_to(base_url, choices)
    with _told_of_block(task) if is_of_file else nullcontext():
        made = [
            (label, make_policy(kind, options, task.folder, traffic, of_user=_of_user(task, options, base_url)))
            for label, kind, options in choices
        ]
    return [NamedPolicy(label, policy) for label, policy in made]


def _of_user(task: LoadedTask, options: Mapping[str, Any], base_url: str | None) -> set[str]:
    """Which options the user gave, and no file."""
    given = keys_of_user("policy", options, task.of_user)
    return given if base_url is None else given - {"base_url"} | keys_of_user("", ["base_url"], task.of_user)


@contextmanager
def _told_of_block(task: LoadedTask) -> Iterator[None]:
    """Name the line of the key in what goes wrong with the task's own `policy:` block, where it was not laid over."""
    try:
        yield
    except ConfigError as error:
        named = _OF_POLICY.match(str(error))
        key = named[1] if named else "type"
        block = task.located.data.get("policy")
        given = task.definition.policy.model_dump().get(key) if task.definition.policy is not None else None
        if not isinstance(block, Mapping) or (key in block and block[key] != given):
            raise
        raise ConfigError(f"{task.located.where(('policy', key))}: {error}") from error


def check_costs(task: LoadedTask, policies: Sequence[NamedPolicy], user: SimulatedUser | None) -> None:
    """A limit on cost holds only where the cost of every action is known.

    Raises:
        ConfigError: there is such a limit, and a policy or a user that does not know what it costs.
    """
    limits = (task.definition.limits.cost, task.definition.run_limits.cost)
    without = {named.label: named.policy for named in policies if not named.policy.knows_cost}
    without |= {WHO: user.policy} if user is not None and not user.knows_cost else {}
    unknown = list(without)
    if unknown and any(limit is not None for limit in limits):
        raise ConfigError(
            f"{task.path}: a limit on cost (--max-cost, limits.cost, run_limits.cost) cannot be kept: the price of "
            f"{', '.join(unknown)} is not known; {_how_to_know(without)}"
        )


def _how_to_know(policies: Mapping[str, AgentPolicy]) -> str:
    """What makes the price of these known: a file for a model of an endpoint, an attribute for a class of one's own."""
    own = [type(policy).__name__ for policy in policies.values() if not type(policy).__module__.startswith(_PACKAGE)]
    ways = []
    if len(own) < len(policies):
        block = "user" if WHO in policies else "policy"
        ways.append(
            f"name a price_file that has it, {block}: {{type: openai, price_file: prices.yaml}}, with a line such as "
            "gpt-5-mini: {input: 0.25, output: 2.00}, US dollars per million tokens"
        )
    if own:
        named = ", ".join(dict.fromkeys(own))
        ways.append(
            f"in the class {named} (an AgentPolicy) write is_free = True where its actions cost nothing, else let "
            "knows_cost return True and give each action log_probs={'usage': {'cost': US_DOLLARS}}"
        )
    return "; ".join(ways)


def _check(task: LoadedTask, choices: Sequence[_Choice]) -> None:
    if not choices:
        by_hand = "policy=MyPolicy to Task, or models='openai/NAME' to its run"
        in_file = "--model openai/NAME, --policy random, or a policy: block in the file"
        raise ConfigError(f"{task.path}: no policy. Give {in_file if task.located.is_written else by_hand}")
    if task.definition.resource_type is None and any(choice.type == "expert" for choice in choices):
        raise ConfigError(f"{task.path}: the expert policy asks the resource, and the task has no resource_type")
    if task.definition.user is not None and any(choice.type == "own_agent" for choice in choices):
        raise ConfigError(f"{task.path}: an own_agent talks to nobody but its model, so user: would have no effect")
    check_labels([choice.label for choice in choices])


def check_labels(labels: Sequence[str]) -> None:
    """Results stand under the labels of their policies.

    Raises:
        ConfigError: two are alike.
    """
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"two policies are called {twice!r}")


def _send_to(base_url: str, choices: Sequence[_Choice]) -> None:
    if all(choice.type not in _ASK_AN_ENDPOINT for choice in choices):
        raise ConfigError("--base-url is for models, and no policy of this run is one; give --model openai/NAME")
    for choice in choices:
        if choice.type in _ASK_AN_ENDPOINT:
            choice.options["base_url"] = base_url


def _model(model: str, in_file: PolicyModel | None) -> _Choice:
    provider, separator, name = model.partition("/")
    if not separator or not name or provider not in _PROVIDERS:
        near = did_you_mean(provider, _PROVIDERS) if separator else ""
        wanted = "openai/NAME" if separator or not model else f"openai/{model}"
        raise ConfigError(
            f"--model {model!r}: write {wanted}{near if near.endswith('?') else ''}, for OpenAI or, by "
            "--base-url, for any endpoint that speaks its protocol"
        )
    return _Choice(model, provider, {**_file_options(provider, in_file), "model": name})


def _of_file(in_file: PolicyModel, folder: Path) -> list[_Choice]:
    options = in_file.options()
    if in_file.type == "replay" and isinstance(options.get("run"), str):
        return _replays(folder / options["run"], options)
    label = f"openai/{options.get('model')}" if in_file.type == "openai" else in_file.type
    return [_Choice(label, in_file.type, options)]


def _replays(run: Path, options: Mapping[str, Any]) -> list[_Choice]:
    """One for each policy of the run, or the one that is named.

    Each stands under its own label, which is a part of the episodes' ids and seeds.
    """
    labels = [options["policy"]] if options.get("policy") is not None else recorded_labels(run)
    given = {**options, "run": str(run.resolve())}
    return [_Choice(str(label), "replay", {**given, "policy": label}) for label in labels]


def _file_options(name: str, in_file: PolicyModel | None) -> dict[str, Any]:
    return in_file.options() if in_file is not None and in_file.type == name else {}
