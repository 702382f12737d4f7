"""`reward-kit explain`: what a train file comes to, before anything is trained."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from reward_kit.cli.echo import echo
from reward_kit.cli.learning import needs_to_learn
from reward_kit.cli.trust import require_trust_in_file, trust_option
from reward_kit.runs.task_file import parse_override


@click.command(name="explain")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "-T",
    "--set",
    "overrides",
    multiple=True,
    envvar="REWARD_KIT_EXPLAIN_SET",
    metavar="KEY=VALUE",
    help="Set a key of the train file (dotted for inner; task.KEY for one of the task).",
)
@trust_option
def command(config: Path, overrides: tuple[str, ...]) -> None:
    """Say what CONFIG, a train file, comes to: batches, credit and loss in words and formulas, with their values.

    What `train` would refuse is refused here, as far as it can be told without weights and worlds: a key that nothing
    reads, with its line and the nearest key that there is; an option that does not fit the policy; a model that is not
    there.

    \b
    Examples:
      reward-kit explain train.yaml
      reward-kit explain train.yaml -T ppo.loss=gspo
    """
    with needs_to_learn("explain"):
        from reward_kit.rl.training.explain import explained, notes
        from reward_kit.rl.training.plan import load_plan
        from reward_kit.rl.training.policy_checks import check_policy
    given = dict(parse_override(item) for item in overrides)
    require_trust_in_file(config, given)
    with contextlib.redirect_stdout(sys.stderr):
        plan = load_plan(config, given)
        check_policy(plan)
        for note in [*plan.task.notes, *notes(plan)]:
            echo(note, err=True)
    echo(explained(plan))
