"""The flags by which a command says where episodes are collected, and the engine that they mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from reward_kit.errors import ConfigError
from reward_kit.runs.overrides import parse_override
from reward_kit.runs.plan import Plan
from reward_kit.runs.preparation import has_human
from reward_kit.runs.request import Request
from reward_kit.runs.tasks import LoadedTask

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession
    from reward_kit.runs.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What the flags said.

    Attributes:
        engine: "local" or "ray".
        address: of the cluster; None for one on this machine.
        options: of the cluster's workers, KEY=VALUE.
    """

    engine: str
    address: str | None
    options: Sequence[str]

    def refuse_unused(self, recording: Mapping[str, Any]) -> None:
        """Refuse flags that would have no effect.

        Args:
            recording: the flags about a recording of a model's answers, by name; None where one is not given.

        Raises:
            UsageError: one of them is of the other engine.
        """
        if self.engine == "local" and (self.address is not None or self.options):
            raise click.UsageError(f"{'--address' if self.address is not None else '-E'} goes with --engine ray")
        recorded = next((name for name, value in recording.items() if value is not None), None)
        if self.engine == "ray" and recorded is not None:
            raise click.UsageError(
                f"{recorded} goes with --engine local: the answers of several workers have no one order"
            )

    def as_the_driver_needs_it(self, task: LoadedTask) -> LoadedTask:
        """The task as the driver makes its parties: where others act, a model of one's own needs no weights here."""
        policy = task.definition.policy
        if self.engine == "local" or policy is None or policy.type != "hf":
            return task
        outline = policy.model_copy(update={"device": "meta"})
        return replace(task, definition=task.definition.model_copy(update={"policy": outline}))

    def engine_of(self, task: LoadedTask, request: Request, plan: Plan, traffic: ProviderSession) -> Engine | None:
        """The engine that is meant; None for this process.

        Args:
            task: as it was loaded.
            request: what of it is run, and by whom.
            plan: the same, made ready.
            traffic: of the run.

        Raises:
            ConfigError: it is not installed, an option is wrong, or a person takes part, whom a cluster does not reach.
        """
        if self.engine == "local":
            return None
        from reward_kit.integrations.ray.engine import RayEngine
        from reward_kit.integrations.ray.options import RayOptions

        options = RayOptions.of(dict(parse_override(item, "-E") for item in self.options), self.address)
        if has_human(plan.policies, plan.user):
            told = "a person at this terminal is not reached from a cluster"
            raise ConfigError(f"--engine ray: {told}; use --engine local")
        return RayEngine(task, request, options, traffic)


def where_it_is_collected() -> Callable[[Any], Any]:
    """`--engine`, `--address` and `-E`; the command gets what they say as `collecting`."""
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

    def add(command: Callable[..., Any]) -> Any:
        def gathered(*, engine: str, address: str | None, engine_options: tuple[str, ...], **given: Any) -> Any:
            return command(collecting=EngineFlags(engine, address, engine_options), **given)

        flagged: Any = functools.wraps(command)(gathered)
        for option in reversed(options):
            flagged = option(flagged)
        return flagged

    return add
