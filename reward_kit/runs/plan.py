"""Plan a run: its policies, samples and directory.

`plan_run` is the last of the three steps before a run (parse, resolve, plan); `runner.run` executes the plan.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from reward_kit.agent.limits import ReachedLimit
from reward_kit.agent.policies import make_policy, option_names
from reward_kit.agent.policies.simple_policies import HumanPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import WHO, ScriptedUser, SimulatedUser
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, PolicyError, boundary, did_you_mean, type_name
from reward_kit.loading import load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.keys import PRESETS, intended_model
from reward_kit.reward_agent.named_rewards import each_call
from reward_kit.reward_agent.scoring import Reward
from reward_kit.runs.inputs import copy_inputs
from reward_kit.runs.redaction import Redaction, load_redaction, without_hidden, without_secrets
from reward_kit.runs.run_folder import RunFolder, RunHeader, new_run_path
from reward_kit.runs.summary import EpisodeRow
from reward_kit.runs.task_file import error_context, overridden_keys
from reward_kit.runs.task_objects import LivePolicy, copy_sources, object_reference
from reward_kit.runs.tasks import LoadedTask, select_samples
from reward_kit.task_parts import UserModel

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession


INTERRUPTED = "interrupted"
"""The reason and the status of a run that the user stopped."""
_OF_POLICY = re.compile(r"policy\.(\w+)")
_PACKAGE = "reward_kit."
_ASK_AN_ENDPOINT = {*PRESETS, "own_agent"}
_NO_USERS = {
    "expert": "it queries the environment, which a simulated user cannot see",
    "random": "it calls tools, which a simulated user does not have",
    "replay": "it replays an agent; use the policy that the user had",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArgs:
    """The arguments of a run from the command line or Python. They are stored in `run.json` so the run can be resumed.

    Attributes:
        task_path: the task file, or the placeholder path of a task from Python.
        overrides: the task keys to override; nested keys are dotted.
        models: the models, each as `PROVIDER/NAME`, such as `openai/NAME`.
        policies: the policies, as built-in names, `file.py:Class` or `replay:RUN`.
        base_url: the endpoint of the models.
        rollouts: the number of episodes per sample, or None to use the number in the task.
        limit: the number of samples to run; None for all.
        sample_ids: the samples to run; empty for all.
        seed: the seed for all random choices.
    """

    task_path: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[str] = ()
    policies: Sequence[str] = ()
    base_url: str | None = None
    rollouts: int | None = None
    limit: int | None = None
    sample_ids: Sequence[str] = ()
    seed: int = 0

    @classmethod
    def from_header(cls, header: RunHeader) -> RunArgs:
        """Return the arguments of an earlier run; overrides that contain a secret are omitted."""
        given = {field.name: getattr(header, field.name) for field in fields(cls)}
        return cls(**{**given, "task_path": Path(given["task_path"]), "overrides": without_hidden(header.overrides)})

    def with_changes(
        self,
        overrides: Mapping[str, Any],
        base_url: str | None,
        hidden: Sequence[str],
        *,
        command: str,
        allowed: tuple[str, ...] = ("run_limits.",),
    ) -> RunArgs:
        """Return the arguments with the changes that `command` may make: `allowed` keys, secrets and the endpoint."""
        for key in overrides:
            if not key.startswith(allowed) and key not in hidden:
                raise ConfigError(
                    f"-T {key}: {command} can change only {'… and '.join(allowed)}…; "
                    "start a new run to change other keys"
                )
        return replace(self, overrides={**self.overrides, **overrides}, base_url=base_url or self.base_url)


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy, its label in the results, and its settings: its type and options, except lists.

    If `is_lent` is set, the run does not close the policy.
    """

    label: str
    policy: AgentPolicy
    is_lent: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The episodes to collect, and the reward that scores them.

    Attributes:
        definition: the task definition, including the limits of the run.
        policies: the policies, each of which runs every sample.
        samples: the selected samples.
        rollouts: the number of episodes per sample and policy.
        seed: the seed for all random choices.
        max_concurrency: the maximum number of concurrent episodes, and of concurrent scores.
        reward: the reward for all episodes, or None if episodes are only collected.
        tools: the task's own tools, or None.
        user: the simulated user, or None.
        given: the number of existing episodes, which are only scored.
        redaction: the redaction of secrets in the run's files.
    """

    definition: TaskDefinitionModel
    policies: Sequence[NamedPolicy] = ()
    samples: Sequence[Sample] = ()
    rollouts: int = 1
    seed: int = 0
    max_concurrency: int = 16
    reward: Reward | None = None
    tools: ToolRegistry | None = None
    user: SimulatedUser | None = None
    given: int = 0
    redaction: Redaction = field(default_factory=Redaction)

    @property
    def has_human(self) -> bool:
        """True if a person at this terminal acts in the run."""
        acting = [named.policy for named in self.policies] + ([self.user.policy] if self.user is not None else [])
        return any(isinstance(policy, HumanPolicy) for policy in acting)

    @property
    def total(self) -> int:
        """The number of episodes."""
        return self.given + len(self.policies) * len(self.samples) * self.rollouts


class Listener(Protocol):
    """Callbacks for each episode. They are called in the event loop of the run."""

    def episode_stopped(self, row: EpisodeRow) -> None: ...

    def episode_scored(self, row: EpisodeRow) -> None: ...


@dataclass(slots=True)
class Control:
    """A handle to stop a run. It records the reason.

    No further episodes start after `stop_reason` is set. Cancel `scope` to stop immediately; running episodes are then
    lost and are run again on resume. `is_failure` marks a run that cannot continue until a problem is fixed.
    """

    stop_reason: str | None = None
    reached: ReachedLimit | None = None
    is_failure: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def finish(self, reason: str) -> None:
        """Prevent further episodes from starting."""
        self.stop_reason = self.stop_reason or reason

    def reach_limit(self, limit: ReachedLimit) -> None:
        """Prevent further episodes from starting because a run limit has been reached.

        A later call updates the message.
        """
        if self.stop_reason is None or self.reached is not None:
            self.reached = limit
            self.stop_reason = f"run limit reached: {limit.text} (run_limits.{limit.key})"

    def give_up(self, reason: str) -> None:
        """Stop immediately, because no running episode can succeed."""
        self.stop_reason, self.is_failure = reason, True
        self.scope.cancel()


Interruptible = Callable[[Control], AbstractAsyncContextManager[None]]
"""A function that returns a context manager in which the user can stop a run."""


def plan_run(
    task: LoadedTask,
    args: RunArgs,
    *,
    max_concurrency: int = 16,
    traffic: ProviderSession | None = None,
    live: Mapping[str, LivePolicy] | None = None,
    needs_policy: bool = True,
) -> RunPlan:
    """Create the policies and the simulated user, and select the samples.

    The function writes nothing and calls no model.
    """
    is_named = bool(args.models or args.policies or (task.definition.policy and not live))
    if live and not is_named and args.base_url is not None:
        raise ConfigError("base_url applies only to models, but this run has none; pass models='openai/NAME'")
    in_file = task.definition.policy
    if not needs_policy and in_file is not None and in_file.type in PRESETS and not in_file.options().get("model"):
        # The model is named by the run (--model), so check only the other keys.
        make_policies(task, replace(args, models=(f"{in_file.type}/MODEL",)), traffic)
        is_named = False
    policies = make_policies(task, args, traffic) if is_named or (needs_policy and not live) else []
    policies += [_live_policy(label, policy) for label, policy in (live or {}).items()]
    _check_labels([named.label for named in policies])
    user = make_user(task, traffic)
    check_costs(task, policies, user)
    with error_context(task.located, "redact"):
        redaction = load_redaction(task.definition, task.folder)
    plan = RunPlan(
        definition=task.definition,
        policies=policies,
        samples=select_samples(task, args.limit, args.sample_ids),
        rollouts=args.rollouts or task.rollouts_per_sample,
        seed=args.seed,
        max_concurrency=max_concurrency,
        reward=task.reward,
        tools=task.tools,
        user=user,
        redaction=redaction,
    )
    return replace(plan, max_concurrency=1) if plan.has_human else plan


def begin_run(
    log_dir: Path, task: LoadedTask, plan: RunPlan, args: RunArgs, live: Mapping[str, LivePolicy] | None = None
) -> RunFolder:
    """Create the directory of a new run, its `run.json`, and copies of its inputs."""
    path = new_run_path(log_dir, task.definition.name)
    objects = {f"policy {label}": policy for label, policy in (live or {}).items()}
    references = {name: object_reference(policy) for name, policy in objects.items()}
    from_python = {**task.objects.names, **references}
    arguments = {
        **asdict(args),
        "task_path": str(task.path.resolve()),
        "overrides": without_secrets(dict(args.overrides)),
    }
    header = RunHeader(
        run_id=path.name,
        task_name=task.definition.name,
        digests=dict(task.digests),
        task=without_secrets(task.definition.model_dump(mode="json", exclude_defaults=True)),
        run_limits=task.definition.run_limits.model_dump(),
        total=plan.total,
        max_concurrency=plan.max_concurrency,
        policy_settings={named.label: without_secrets(dict(named.settings)) for named in plan.policies},
        **({"from_python": from_python} if from_python else {}),
        **arguments,
    )
    folder = RunFolder.create(path, header, plan.redaction)
    copy_inputs(folder, task.inputs, task.digests, {**task.objects.copies, **copy_sources(objects)})
    return folder


# Resume


def read_resumable_header(path: Path) -> RunHeader:
    """Read the header of a run that is to be resumed."""
    header = RunHeader.read_resumable(path)
    if header.task_path is None:
        raise ConfigError(f"{path} is not a run of a task and cannot be resumed")
    if header.from_python is not None:
        objects = ", ".join(f"{name} {header.from_python[name]}" for name in header.from_python)
        raise ConfigError(
            f"--resume: {path} was started from Python with objects that no file defines "
            f"({objects}); start a new run from Python"
        )
    return header


# Policies


def make_policies(task: LoadedTask, args: RunArgs, traffic: ProviderSession | None = None) -> list[NamedPolicy]:
    """Create the policies named in the arguments, using the options of the task file.

    If no policy is named, create the policy of the task. Files in `policies` are relative to the task file. The path in
    `replay:RUN` is relative to the working directory; all policies of that run are replayed.
    """
    in_file, base_url = task.definition.policy, args.base_url
    choices: list[tuple[str, str, dict[str, Any]]] = []  # Label, type, options

    def options_for(kind: str) -> dict[str, Any]:
        return in_file.options() if in_file is not None and in_file.type == kind else {}

    def add_replays(run: Path, options: Mapping[str, Any]) -> None:
        """Add all policies of a run, or only the specified one. Episode ids and seeds depend on the labels."""
        from reward_kit.agent.policies.replay_policy import recorded_labels

        labels = [options["policy"]] if options.get("policy") is not None else recorded_labels(run)
        for label in labels:
            choices.append((str(label), "replay", {**options, "run": str(run.resolve()), "policy": label}))

    for model in args.models:
        provider, separator, name = model.partition("/")
        if not separator or not name or provider not in PRESETS:
            if provider in PRESETS:
                advice = f"write {provider}/NAME"
            elif meant := intended_model(model):
                advice = f"unknown provider {provider!r}; did you mean {meant!r}?"
            else:
                wanted = "openai/NAME" if separator or not model else f"openai/{model}"
                others = ", ".join(sorted({*PRESETS} - {"openai"}))
                advice = f"write {wanted}, for OpenAI or, with --base-url, any compatible endpoint; others: {others}"
            raise ConfigError(f"--model {model!r}: {advice}")
        choices.append((model, provider, {**options_for(provider), "model": name}))
    for name in args.policies:
        kind, _, run = name.partition(":")
        if run and kind == "replay":
            add_replays(Path(run), options_for("replay"))
        else:
            choices.append((name, name, options_for(name)))
    is_of_file = not choices and in_file is not None
    if is_of_file and in_file is not None:
        options = in_file.options()
        if in_file.type == "replay" and isinstance(options.get("run"), str):
            add_replays(task.folder / options["run"], options)
        else:
            label = f"{in_file.type}/{options.get('model')}" if in_file.type in PRESETS else in_file.type
            choices.append((label, in_file.type, options))
    if not choices:
        in_python = "pass policy=MyPolicy to Task, or models='openai/NAME' to its run"
        by_file = "pass --model openai/NAME or --policy random, or add a policy: block to the file"
        raise ConfigError(f"{task.path}: no policy is set; {by_file if task.located.is_written else in_python}")
    kinds = {kind for _, kind, _ in choices}
    if task.definition.resource_type is None and "expert" in kinds:
        raise ConfigError(f"{task.path}: the expert policy needs a resource, but the task has no resource_type")
    if task.definition.user is not None and "own_agent" in kinds:
        raise ConfigError(f"{task.path}: an own_agent policy talks only to its model, so user: has no effect")
    _check_labels([label for label, _, _ in choices])
    if in_file is not None and in_file.type not in kinds:
        for key in (key for key in args.overrides if key.startswith("policy.")):
            (label, kind, _), name = choices[0], key.split(".")[1]
            known = option_names(kind, task.folder)
            fix = f"; write -T 'policy={{type: {kind}, {name}: VALUE}}'"
            if known is not None and name not in known:
                fix = did_you_mean(name, known)
            raise ConfigError(
                f"-T {key}: has no effect, because the policy of the task is {in_file.type!r}, but this run uses "
                f"{label!r}{fix}"
            )
    if base_url is not None and not kinds & _ASK_AN_ENDPOINT:
        raise ConfigError("--base-url applies only to models, but this run has none; pass --model openai/NAME")
    made = []
    for label, kind, options in choices:
        if base_url is not None and kind in _ASK_AN_ENDPOINT:
            options["base_url"] = base_url
        of_user = overridden_keys("policy", options, task.of_user)
        if base_url is not None:
            of_user = of_user - {"base_url"} | overridden_keys("", ["base_url"], task.of_user)
        try:
            policy = make_policy(kind, options, task.folder, traffic, of_user=of_user)
            settings = {key: value for key, value in options.items() if not isinstance(value, list | tuple)}
            made.append(NamedPolicy(label, policy, settings={"type": kind, **settings}))
        except ConfigError as error:
            # An error in the task's own block names the line of the key unless the key was overridden.
            match = _OF_POLICY.match(str(error))
            key = match[1] if match else "type"
            block = task.located.data.get("policy")
            given = in_file.model_dump().get(key) if in_file is not None else None
            if not is_of_file or not isinstance(block, Mapping) or (key in block and block[key] != given):
                raise
            raise ConfigError(f"{task.located.where(('policy', key))}: {error}") from error
    return made


def _live_policy(label: str, given: LivePolicy) -> NamedPolicy:
    """Return a named policy for a class or an instance.

    A class is instantiated. An instance is not closed after the run.
    """
    if not isinstance(given, type):
        return NamedPolicy(label, given, is_lent=True)
    kind = given
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    needed = [item.name for item in parameters if item.default is item.empty and item.kind not in variable]
    if needed:
        raise ConfigError(
            f"policy {label!r} needs {', '.join(needed)}; pass an instance, {kind.__name__}({needed[0]}=…)"
        )
    try:
        with boundary(ConfigError, f"policy {label!r}"):
            return NamedPolicy(label, kind())
    except PolicyError as error:
        raise ConfigError(f"policy {label!r}: {error}") from error


def label_policies(policies: Sequence[LivePolicy]) -> dict[str, LivePolicy]:
    """Label each policy by the name of its class."""
    labels = [(item if isinstance(item, type) else type(item)).__name__ for item in policies]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"duplicate policy label {twice!r}; pass labels: policies={{'one': …, 'other': …}}")
    return dict(zip(labels, policies, strict=True))


def _check_labels(labels: Sequence[str]) -> None:
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"duplicate policy label {twice!r}")


def check_costs(task: LoadedTask, policies: Sequence[NamedPolicy], user: SimulatedUser | None) -> None:
    """Raise a ConfigError if there is a limit on cost but the cost of some actions is unknown."""
    if task.definition.run_limits.cost is not None and task.reward is not None:
        _check_judge_prices(task, task.reward)
    limits = (task.definition.limits.cost, task.definition.run_limits.cost)
    unknown = {named.label: named.policy for named in policies if not named.policy.knows_cost}
    unknown |= {WHO: user.policy} if user is not None and not user.knows_cost else {}
    if not unknown or all(limit is None for limit in limits):
        return
    own = [type(policy).__name__ for policy in unknown.values() if not type(policy).__module__.startswith(_PACKAGE)]
    fixes = []
    if len(own) < len(unknown):
        block = "user" if WHO in unknown else "policy"
        fixes.append(
            f"set a price_file, {block}: {{type: openai, price_file: prices.yaml}}, that has a line such as "
            "your-model: {input: 0.25, output: 2.00} (US dollars per million tokens)"
        )
    if own:
        fixes.append(
            f"in the class {', '.join(dict.fromkeys(own))} (an AgentPolicy) set is_free = True if its actions "
            "cost nothing; otherwise return True from knows_cost and set for each action "
            "log_probs={'usage': {'cost': US_DOLLARS}}"
        )
    raise ConfigError(
        f"{task.path}: a limit on cost (--max-cost, limits.cost, run_limits.cost) cannot be enforced: the "
        f"price of {', '.join(unknown)} is unknown; {'; '.join(fixes)}"
    )


def _check_judge_prices(task: LoadedTask, reward: Reward) -> None:
    for one in each_call(reward):
        for resource in one.resources.values():
            find = getattr(resource, "unpriced_model", None)
            if find is not None and (model := find(one.options)) is not None:
                raise ConfigError(
                    f"{task.path}: a limit on cost (--max-cost, run_limits.cost) cannot be enforced: the price of the "
                    f"judge {model!r} is unknown; set a price_file for the judge, client: {{price_file: prices.yaml}}, "
                    f"that has a line such as {model}: {{input: 0.25, output: 2.00}} (US dollars per million tokens)"
                )


def make_user(task: LoadedTask, traffic: ProviderSession | None = None) -> SimulatedUser | None:
    """Create the simulated user of a task, if it has one."""
    block = task.definition.user
    if block is None:
        return None
    # Report a misspelled key first; otherwise the intended key would be reported as missing.
    with error_context(task.located, "user"):
        taken = {"replies"} if block.type == "scripted" else option_names(block.type, task.folder)
    options = block.options()
    words: dict[str, Any] = {"instructions": block.instructions, "stop_phrase": block.stop_phrase}
    for key in options:
        if taken is not None and key not in taken:
            near = did_you_mean(key, {*UserModel.model_fields, *taken})
            where = task.located.where(("user", key))
            raise ConfigError(f"{where}: user.{key}: unknown key for a user of type {block.type!r}{near}")
    try:
        if block.type in _NO_USERS:
            raise ConfigError(f"the policy {block.type!r} cannot be a user: {_NO_USERS[block.type]}")
        if block.type in PRESETS and not block.instructions:
            raise ConfigError("a model needs instructions to act as the user; set user.instructions")
        if block.type == "scripted":
            replies = options.get("replies")
            if isinstance(replies, str):
                replies, named = load_object(replies, task.folder), replies
                if not callable(replies):
                    raise ConfigError(f"user.replies: {named} is {type_name(replies)}, not a function")
            user: SimulatedUser = ScriptedUser(replies, opens=block.opens, **words)
        else:
            of_user = overridden_keys("user", options, task.of_user)
            policy = make_policy(block.type, options, task.folder, traffic, section="user", of_user=of_user)
            user = SimulatedUser(policy, opens=block.opens, **words)
        for sample in task.samples:
            user.check(sample)
    except ConfigError as error:
        if str(error).startswith("user.api_key_env: "):
            raise ConfigError(f"{task.located.where(('user', 'api_key_env'))}: {error}") from error
        raise ConfigError(f"{task.located.where(('user',))}: user: {error}") from error
    return user
