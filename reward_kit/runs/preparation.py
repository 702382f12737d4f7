"""A loaded task made ready to run: who acts, who answers, what is kept out of its files, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reward_kit.agent.policies.simple_policies import HumanPolicy
from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.errors import ConfigError
from reward_kit.runs.given import kept_sources, name_of
from reward_kit.runs.inputs import keep_inputs
from reward_kit.runs.plan import NamedPolicy, Plan
from reward_kit.runs.policies import check_costs, check_labels, make_policies
from reward_kit.runs.redaction import Redaction, redaction_of
from reward_kit.runs.request import Request, header_of
from reward_kit.runs.store import RunStore, new_run_path
from reward_kit.runs.tasks import LoadedTask, selected
from reward_kit.runs.users import make_user
from reward_kit.runs.yaml_lines import about

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession


class Prepared(NamedTuple):
    """What a run of a task needs besides the task.

    Attributes:
        policies: each runs every sample.
        user: who answers the agents' texts; None where nobody does.
        redaction: what is kept out of the run's files.
    """

    policies: Sequence[NamedPolicy]
    user: SimulatedUser | None
    redaction: Redaction


def prepare(
    task: LoadedTask,
    models: Sequence[str] = (),
    names: Sequence[str] = (),
    base_url: str | None = None,
    traffic: ProviderSession | None = None,
    *,
    needs_policy: bool = True,
    lent: Sequence[NamedPolicy] = (),
) -> Prepared:
    """Make what a run of a task needs, and so find what is wrong with it. Nothing is written, nobody is called.

    Args:
        task: as it was loaded.
        models, names, base_url: the policies, as `make_policies` takes them; else those of the task file.
        traffic: what all requests of the run share.
        needs_policy: that no policy is named anywhere is an error; else there are none then.
        lent: policies that are Python objects, besides those that are named.

    Raises:
        ConfigError: a policy, the user or the redact function cannot be made, or a limit on cost cannot be kept.
    """
    is_named = bool(models or names or (task.definition.policy and not lent))
    if lent and not is_named and base_url is not None:
        raise ConfigError("base_url is for models, and no policy of this run is one; give models='openai/NAME'")
    is_wanted = is_named or (needs_policy and not lent)
    policies = [*(make_policies(task, models, names, base_url, traffic) if is_wanted else []), *lent]
    check_labels([named.label for named in policies])
    user = make_user(task, traffic)
    check_costs(task, policies, user)
    with about(task.located, "redact"):
        redaction = redaction_of(task.definition, task.folder)
    return Prepared(policies, user, redaction)


def plan_of(
    task: LoadedTask,
    request: Request,
    max_concurrency: int,
    traffic: ProviderSession | None,
    lent: Sequence[NamedPolicy] = (),
) -> tuple[Plan, Redaction]:
    """What is to be run of a task, and what is kept out of its files.

    Args:
        task: as it was loaded.
        request: what of it, and by whom.
        max_concurrency: episodes in flight; one where a person plays.
        traffic: what all requests of the run share.
        lent: policies that are Python objects.

    Raises:
        ConfigError: as of `prepare`, or a sample is asked for that is not there.
    """
    prepared = prepare(task, request.models, request.policies, request.base_url, traffic, lent=lent)
    plan = Plan(
        definition=task.definition,
        policies=prepared.policies,
        samples=selected(task, request.limit, request.sample_ids),
        rollouts=request.rollouts or task.rollouts_per_sample,
        seed=request.seed,
        max_concurrency=1 if has_human(prepared.policies, prepared.user) else max_concurrency,
        reward=task.reward,
        tools=task.tools,
        user=prepared.user,
    )
    return plan, prepared.redaction


def has_human(policies: Sequence[NamedPolicy], user: SimulatedUser | None) -> bool:
    """Whether a person at this terminal takes part."""
    played = [named.policy for named in policies] + ([user.policy] if user is not None else [])
    return any(isinstance(policy, HumanPolicy) for policy in played)


def new_store(
    log_dir: Path,
    task: LoadedTask,
    plan: Plan,
    request: Request,
    redaction: Redaction,
    objects: Mapping[str, Any] | None = None,
) -> RunStore:
    """The folder of a new run of a plan, with the inputs that its results come from.

    Args:
        log_dir: where it is made.
        task: as it was loaded.
        plan: what is run of it.
        request: what was asked for.
        redaction: what is kept out of the files.
        objects: the Python objects that act, by what each is, of which no file tells.

    Raises:
        ConfigError: the folder cannot be made.
        StoreError: a file of it cannot be written.
    """
    path = new_run_path(log_dir, task.definition.name)
    objects = objects or {}
    header = header_of(path.name, task, plan, request, {name: name_of(one) for name, one in objects.items()})
    store = RunStore.create(path, header, redaction)
    keep_inputs(store, task.inputs, task.digests, {**task.given.kept, **kept_sources(objects)})
    return store
