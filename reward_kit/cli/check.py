"""`reward-kit check`: a task file or a resource, before it costs anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import click

from reward_kit.agent.execution import as_text
from reward_kit.cli.numbers import WholeNumber
from reward_kit.environments.base import ToolSpec
from reward_kit.environments.checker import Finding, check_resource
from reward_kit.environments.registry import resource_class
from reward_kit.errors import ConfigError
from reward_kit.runs.policies import make_policies
from reward_kit.runs.tasks import check_world, load_task, parse_override
from reward_kit.runs.users import make_user


@click.command(name="check")
@click.argument("target")
@click.option("-c", "--config", "config", multiple=True, metavar="KEY=VALUE", help="A key of the resource's config.")
@click.option(
    "--steps",
    type=WholeNumber(1),
    default=20,
    show_default=True,
    help="How many random actions to try on a resource.",
)
@click.option("--seed", default=0, show_default=True, help="For everything random.")
def command(target: str, config: tuple[str, ...], steps: int, seed: int) -> None:
    """Check TARGET: a task file, or a resource (a built-in name, module:Class or file.py:Class).

    A resource is driven with random actions; what it declares about forking, determinism and state keys is proved.

    \b
    Examples:
      reward-kit check task.yaml
      reward-kit check my_world.py:MyResource -c size=4
      reward-kit check gymnasium -c env_id=FrozenLake-v1
    """
    if target.endswith((".yaml", ".yml")):
        _check_task(Path(target))
    else:
        _check_resource(target, dict(parse_override(item, "-c") for item in config), steps, seed)


def _check_task(path: Path) -> None:
    task = load_task(path)
    policies = [named.label for named in make_policies(task)] if task.definition.policy else []
    make_user(task)
    for note in task.notes:
        click.echo(note, err=True)
    if not anyio.run(check_world, task) and task.tools is None:
        kind = task.definition.resource_type
        click.echo(f"warning: resource {kind!r} offers no tools, and an agent can only write texts")
    episodes = len(task.samples) * task.rollouts_per_sample
    reward = f"scored by {task.reward.id}" if task.reward else "not scored"
    by = f"by {', '.join(policies)}" if policies else "by the policy that you name"
    click.echo(f"{path}: ok. {len(task.samples)} samples, {episodes} episodes {by}, {reward}.")


def _check_resource(target: str, config: dict[str, Any], steps: int, seed: int) -> None:
    if Path(target).exists():
        raise ConfigError(f"{target} is neither a task file (.yaml) nor a resource (a name, or file.py:Class)")
    kind = resource_class(target)

    async def check() -> tuple[list[Finding], list[ToolSpec], Any]:
        findings = await check_resource(kind, config, seed=seed, steps=steps)
        world = kind()
        try:
            await world.setup(config)
            await world.reset(seed)
            return findings, await world.get_tools_spec(), await world.get_observation()
        finally:
            await world.close()

    findings, tools, observation = anyio.run(check)
    for finding in findings:
        click.echo(f"{finding.level}: {finding.message}")
    errors = sum(finding.level == "error" for finding in findings)
    for tool in tools:
        function = tool["function"]
        click.echo(
            f"tool {function['name']}({', '.join(function['parameters'].get('properties', ()))}): "
            f"{function.get('description', '(no description)')}"
        )
    click.echo(f"first observation:\n{as_text(observation) or '(none)'}")
    verdict = f"{errors} errors" if errors else "ok"
    click.echo(f"{target}: {verdict} ({kind.fork_kind_for(config)} fork, {steps} steps)")
    if errors:
        sys.exit(1)
