"""The options for the workers on a cluster. They are parsed and checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from reward_kit.errors import ConfigError
from reward_kit.validation import describe_validation_error

RATES = ("requests_per_minute", "tokens_per_minute", "max_connections")
"""The options of policies and rewards that limit the rate of requests. Multiple processes must share these limits."""


class RayOptions(pydantic.BaseModel):
    """The options for a run's workers.

    Attributes:
        address: the address of a running cluster, or "auto" for the cluster of this machine. If None, a cluster is
            started.
        workers: the number of processes that collect episodes. If None, as many processes as fit are started, but not
            more than there are concurrent episodes.
        cpus: the number of CPUs that each of these processes reserves. Use a fraction if a process mostly waits for an
            endpoint.
        gpus: the number of GPUs that each of these processes reserves.
        reward_workers: the number of processes that call the reward. Each process has a separate sandbox. If 0, the
            driver calls the reward.
        ship: whether to copy the directory of the task to the nodes. If False, the directory must exist on the nodes at
            the same path.
        env: additional environment variables of the driver to pass to the workers.
        worker_wait_s: the time in seconds after which the run fails if there is no worker.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    address: str | None = None
    workers: int | None = pydantic.Field(None, ge=1)
    cpus: float = pydantic.Field(1.0, gt=0)
    gpus: float = pydantic.Field(0.0, ge=0)
    reward_workers: int = pydantic.Field(0, ge=0)
    ship: bool = False
    env: tuple[str, ...] = ()
    worker_wait_s: float = pydantic.Field(300.0, gt=0)

    @pydantic.field_validator("env", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @classmethod
    def of(cls, given: Mapping[str, Any], address: str | None = None, option: str = "-E") -> RayOptions:
        """Parse options from the command line.

        Args:
            given: the options, keyed by name.
            address: the address of the cluster.
            option: the name of the command-line option, for messages.

        Raises:
            ConfigError: If a name is unknown, or if a value is out of range.
        """
        if "address" in given:
            raise ConfigError(f"{option} address: use --address")
        try:
            return cls.model_validate({**given, "address": address})
        except pydantic.ValidationError as error:
            problems = describe_validation_error(error, cls)
            raise ConfigError("\n".join(f"{option} {problem}" for problem in problems)) from None
