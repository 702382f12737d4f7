"""The flags by which a command says where episodes are collected, and the engine that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from reward_kit.errors import ConfigError
from reward_kit.runs.overrides import parse_override
from reward_kit.runs.plan import Plan
from reward_kit.runs.preparation import has_human
from reward_kit.runs.request import Request
from reward_kit.runs.tasks import Task

if TYPE_CHECKING:
    from reward_kit.providers.traffic import Traffic
    from reward_kit.runs.engine import Engine


def where_it_is_collected() -> Callable[[Any], Any]:
    """`--engine`, `--address` and `-E`."""
    options = (
        click.option(
            "--engine",
            type=click.Choice(["local", "ray"]),
            default="local",
            show_default=True,
            help="Where episodes are collected: in this process, or on a Ray cluster.",
        ),
        click.option("--address", metavar="HOST:PORT|auto", help="Of the Ray cluster; default: one on this machine."),
        click.option(
            "-E",
            "--engine-option",
            "engine_options",
            multiple=True,
            envvar="REWARD_KIT_RUN_ENGINE_OPTION",
            metavar="KEY=VALUE",
            help="Of the Ray workers: workers, cpus, gpus, reward_workers, ship, env, worker_wait_s.",
        ),
    )

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def refuse_unused(engine: str, address: str | None, given: tuple[str, ...], recording: Mapping[str, Any]) -> None:
    """Refuse flags that would have no effect.

    Args:
        engine, address, given: the flags about the engine.
        recording: the flags about a recording of a model's answers, by name; None where one is not given.

    Raises:
        UsageError: one of them is of the other engine.
    """
    if engine == "local" and (address is not None or given):
        raise click.UsageError(f"{'--address' if address is not None else '-E'} goes with --engine ray")
    if engine == "ray" and (name := next((name for name, value in recording.items() if value is not None), None)):
        raise click.UsageError(f"{name} goes with --engine local: the answers of several workers have no one order")


def as_the_driver_needs_it(engine: str, task: Task) -> Task:
    """The task as the driver makes its parties: where others act, a model of one's own needs no weights here."""
    policy = task.definition.policy
    if engine == "local" or policy is None or policy.type != "hf":
        return task
    outline = policy.model_copy(update={"device": "meta"})
    return replace(task, definition=task.definition.model_copy(update={"policy": outline}))


def engine_of(
    engine: str,
    address: str | None,
    given: tuple[str, ...],
    task: Task,
    request: Request,
    plan: Plan,
    traffic: Traffic,
) -> Engine | None:
    """The engine that the flags mean; None for this process.

    Args:
        engine, address, given: the flags.
        task: as it was loaded.
        request: what of it is run, and by whom.
        plan: the same, made ready.
        traffic: of the run.

    Raises:
        ConfigError: it is not installed, an option is wrong, or a person takes part, whom a cluster does not reach.
    """
    if engine == "local":
        return None
    from reward_kit.integrations.ray.engine import RayEngine
    from reward_kit.integrations.ray.options import RayOptions

    options = RayOptions.of(dict(parse_override(item, "-E") for item in given), address)
    if has_human(plan.policies, plan.user):
        raise ConfigError("--engine ray: a person at this terminal is not reached from a cluster; use --engine local")
    return RayEngine(task, request, options, traffic)
