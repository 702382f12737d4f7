"""The connection to a Ray cluster. It is opened once per run, without Ray's log output and telemetry."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import anyio
import anyio.to_thread

from reward_kit.errors import ConfigError, RewardKitError, boundary, install_hint
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.processes import remove_folder, temporary_folder

_LONGEST_HOME = 43  # The path of a socket has at most 107 bytes. Ray uses 64 of them.
_ANSWER_S = 10.0
_NOT_SHIPPED = ["runs/", ".git/", ".venv/", "__pycache__/"]


class ClusterError(RewardKitError):
    """Raised if the cluster cannot be reached or has no workers left."""


def ray_module() -> ModuleType:
    """Import Ray, or raise a `ConfigError` if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"the engine ray is not available: {error}; {install_hint('ray')}") from None
    module: ModuleType = ray
    return module


class Connection:
    """A context manager for a run's connection to a cluster.

    The first user opens the connection, and the last user closes it. If the program itself has opened a connection,
    that connection stays open.

    Args:
        address: the address of the cluster. If None, a cluster is started on this machine and stopped at the end.
        ship: a directory to copy to the nodes. On the nodes, it becomes the working directory of every worker.

    Attributes:
        is_own: True if the cluster was started here and has only this machine's resources.

    Raises:
        ClusterError: If no cluster responds at the address.
        ConfigError: If the address is invalid, or if `ship` is set although the program is already connected.
    """

    def __init__(self, address: str | None, ship: Path | None = None) -> None:
        self.is_own = False
        self._address, self._ship = address, ship
        self._users, self._lock, self._opened = 0, anyio.Lock(), ExitStack()

    async def __aenter__(self) -> None:
        async with self._lock:
            if not self._users:
                await anyio.to_thread.run_sync(self._connect)
                _take_signals_back()
            self._users += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._opened.close)

    def _connect(self) -> None:
        ray, address = ray_module(), self._address
        if ray.is_initialized():
            if self._ship is not None:
                raise ConfigError(
                    "ship: this program is already connected to a cluster; set runtime_env in ray.init instead"
                )
            return
        with ExitStack() as opened:
            # The output of workers is not forwarded, because it would mix with the result on standard output.
            arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            where = "a cluster on this machine"
            if address is None:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default, Ray sends usage statistics
                # "local" starts a new cluster even if RAY_ADDRESS names a different one.
                arguments |= {"address": "local", "include_dashboard": False}
                # The files of the cluster are removed with it, unless the path of its sockets would be too long.
                home = temporary_folder("r")
                if len(str(home)) <= _LONGEST_HOME:
                    opened.callback(remove_folder, home)
                    arguments["_temp_dir"] = str(home)
                else:
                    remove_folder(home)
            else:
                _check_address(address)
                where = arguments["address"] = address
                if "RAY_AUTH_MODE" not in os.environ:
                    # Ray sends a token only in this mode, and does not report a missing token.
                    where += " (if it requires a token, set RAY_AUTH_MODE=token and try again)"
            if self._ship is not None:
                arguments["runtime_env"] = {"working_dir": str(self._ship), "excludes": _NOT_SHIPPED}
            opened.callback(ray.shutdown)
            with boundary(ClusterError, f"connecting to {where}"):
                ray.init(**arguments)
            self.is_own, self._opened = address is None, opened.pop_all()


def _check_address(address: str) -> None:
    """Check that the address accepts connections. Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--address {address}: pass HOST:PORT of the head node, or auto; client addresses (ray://) are "
            "not supported"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ClusterError(
            f"no cluster responds at {address}: {error}; start a cluster there with `ray start --head`"
        ) from error


def _take_signals_back() -> None:
    """Restore the handlers of SIGINT and SIGTERM that Ray replaced. This is possible only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)  # Ray installs a C handler that Python does not know about.


def workers_that_fit(cpus: float, gpus: float, taken: float = 0.0) -> int:
    """Return the number of processes with these reservations that fit on the cluster.

    `taken` is the number of CPUs that are already in use.
    """
    total: Mapping[str, float] = ray_module().cluster_resources()
    there = {"CPU": total.get("CPU", 0.0) - taken, "GPU": total.get("GPU", 0.0)}
    rooms = [there[name] / amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount]
    return int(min(rooms, default=0))


def workers_to_start(options: RayOptions, is_own: bool, option: str) -> int:
    """Return the number of processes that should collect episodes.

    The number is `options.workers`. If that is not set, it is the number of processes that fit in addition to those
    that call rewards. If `is_own` is true, the cluster cannot get further nodes. `option` is the format for options in
    messages, such as "-E {}".
    """
    if workers_that_fit(options.cpus, options.gpus, options.reward_workers) < 1 and (is_own or options.workers is None):
        beside = f" in addition to {options.reward_workers} that call the reward" if options.reward_workers else ""
        wait = "" if is_own else f", or wait for nodes with {option.format('workers')}"
        raise ConfigError(
            f"no worker with {options.cpus:g} CPUs and {options.gpus:g} GPUs fits on the cluster{beside} "
            f"({describe_resources()}); request less with {option.format('cpus')}"
            f"{' or ' + option.format('reward_workers') if beside else ''}{wait}"
        )
    return options.workers or workers_that_fit(options.cpus, options.gpus, options.reward_workers)


def describe_resources() -> str:
    """Describe the free and the total resources of the cluster."""
    ray = ray_module()
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in ("CPU", "GPU"))
