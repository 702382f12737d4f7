"""A loaded task made ready to run: who acts, who answers, what is kept out of its files. `run` and `check` share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.runs.plan import NamedPolicy
from reward_kit.runs.policies import check_costs, make_policies
from reward_kit.runs.redaction import Redaction, redaction_of
from reward_kit.runs.tasks import Task
from reward_kit.runs.users import make_user
from reward_kit.runs.yaml_lines import about

if TYPE_CHECKING:
    from reward_kit.providers.traffic import Traffic


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
    task: Task,
    models: Sequence[str] = (),
    names: Sequence[str] = (),
    base_url: str | None = None,
    traffic: Traffic | None = None,
    *,
    needs_policy: bool = True,
) -> Prepared:
    """Make what a run of a task needs, and so find what is wrong with it. Nothing is written, nobody is called.

    Args:
        task: as it was loaded.
        models, names, base_url: the policies, as `make_policies` takes them; else those of the task file.
        traffic: what all requests of the run share.
        needs_policy: that no policy is named anywhere is an error; else there are none then.

    Raises:
        ConfigError: a policy, the user or the redact function cannot be made, or a limit on cost cannot be kept.
    """
    is_named = bool(models or names or task.definition.policy)
    policies = make_policies(task, models, names, base_url, traffic) if is_named or needs_policy else []
    user = make_user(task, traffic)
    check_costs(task, policies, user)
    with about(task.located, "redact"):
        redaction = redaction_of(task.definition, task.folder)
    return Prepared(policies, user, redaction)
