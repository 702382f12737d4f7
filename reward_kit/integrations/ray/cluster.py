"""The connection to a cluster: made once per run, quiet, and without anything sent to third parties."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import anyio
import anyio.to_thread

from reward_kit.errors import ConfigError, RewardKitError, boundary, how_to_install
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.processes import remove_folder, temporary_folder

_LONGEST_HOME = 43  # a socket's path has at most 107 bytes, of which Ray needs 64
_ANSWER_S = 10.0
_NOT_SHIPPED = ["runs/", ".git/", ".venv/", "__pycache__/"]


class ClusterError(RewardKitError):
    """The cluster cannot be reached, or has no worker left."""


def ray_module() -> ModuleType:
    """Ray itself.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"the engine ray: {error}; {how_to_install('ray')}") from None
    module: ModuleType = ray
    return module


@contextmanager
def connected(address: str | None, ship: Path | None = None) -> Iterator[bool]:
    """Connected to a cluster for as long as the block lasts; where the program is already, it stays so.

    The block is told whether the cluster is its own, which has what this machine has and never more.

    Args:
        address: None starts a cluster on this machine, which ends with the block.
        ship: a folder that is copied to the nodes, where it is the working directory of every worker.

    Raises:
        ClusterError: there is none at the address.
        ConfigError: it is no address, or a folder is to be shipped and the program is connected already.
    """
    ray = ray_module()
    if ray.is_initialized():
        if ship is not None:
            raise ConfigError("ship: this program is connected to a cluster already; name runtime_env in its ray.init")
        yield False
        return
    _check_address(address)
    with ExitStack() as opened:
        home = _home() if address is None else None
        if home is not None:
            opened.callback(remove_folder, home)
        handler = signal.getsignal(signal.SIGTERM)
        opened.callback(ray.shutdown)
        with boundary(ClusterError, f"connecting to {_told(address)}"):
            ray.init(**_arguments(address, ship, home))
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
        take_signals_back()
        yield address is None


def _told(address: str | None) -> str:
    """Where to, for messages. Ray sends a token only where it is told to, and of a missing one it tells nothing."""
    if address is None:
        return "a cluster on this machine"
    is_told = "RAY_AUTH_MODE" in os.environ
    return address if is_told else f"{address} (if it asks for a token, set RAY_AUTH_MODE=token and try again)"


def _check_address(address: str | None) -> None:
    """That somebody answers there; Ray itself would ask for minutes."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--address {address}: write HOST:PORT of the head node, or auto; not the address of a client"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ClusterError(f"no cluster answers at {address}: {error}; is `ray start --head` running there?") from error


def _home() -> Path | None:
    """Where a cluster of our own keeps its files, which end with it; None where the path of its sockets is too long."""
    home = temporary_folder("r")
    if len(str(home)) <= _LONGEST_HOME:
        return home
    remove_folder(home)
    return None


def _arguments(address: str | None, ship: Path | None, home: Path | None) -> dict[str, Any]:
    # What workers print is theirs: on this side it would mix with the result on standard output.
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of Ray's reports to its factories
        # "local" is a cluster of our own, also where RAY_ADDRESS names another.
        arguments |= {"address": "local", "include_dashboard": False}
        arguments |= {"_temp_dir": str(home)} if home is not None else {}
    else:
        arguments["address"] = address
    if ship is not None:
        arguments["runtime_env"] = {"working_dir": str(ship), "excludes": _NOT_SHIPPED}
    return arguments


def take_signals_back() -> None:
    """Let SIGINT and SIGTERM do again what they did before Ray took them; in the main thread, where alone it can be."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)  # Ray's is one in C, of which Python knows nothing


class Connection:
    """`connected`, for an event loop: made for the first who enters it, ended with the last.

    Args:
        address, ship: as of `connected`.

    Attributes:
        is_own: whether the cluster was started here, once it is entered.
    """

    def __init__(self, address: str | None, ship: Path | None) -> None:
        self.is_own = False
        self._address, self._ship = address, ship
        self._users = 0
        self._lock = anyio.Lock()
        self._open: AbstractContextManager[bool] | None = None

    async def __aenter__(self) -> None:
        async with self._lock:
            if self._open is None:
                opening = connected(self._address, self._ship)
                self.is_own = await anyio.to_thread.run_sync(opening.__enter__)
                self._open = opening
                take_signals_back()
            self._users += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users and self._open is not None:
            closing, self._open = self._open, None
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(closing.__exit__, None, None, None)


def workers_that_fit(cpus: float, gpus: float, taken: float = 0.0) -> int:
    """How many processes with these reservations fit on the cluster as it is, beside others that take so many CPUs."""
    total: Mapping[str, float] = ray_module().cluster_resources()
    there = {"CPU": total.get("CPU", 0.0) - taken, "GPU": total.get("GPU", 0.0)}
    rooms = [there[name] / amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount]
    return int(min(rooms, default=0))


def workers_to_start(options: RayOptions, is_own: bool, option: str) -> int:
    """How many processes may collect beside those that score: as many as are asked for, else as many as fit.

    Args:
        options: what each reserves, and how many score.
        is_own: whether the cluster was started here, so that waiting for nodes is of no use.
        option: how a key of the options is written, for messages.

    Raises:
        ConfigError: not one fits, and none is asked for or none will ever fit.
    """
    if workers_that_fit(options.cpus, options.gpus, options.reward_workers) < 1 and (is_own or options.workers is None):
        beside = f" beside {options.reward_workers} that call the reward" if options.reward_workers else ""
        wait = "" if is_own else f", or wait for nodes with {option.format('workers')}"
        raise ConfigError(
            f"no worker with {options.cpus:g} CPUs and {options.gpus:g} GPUs fits on the cluster{beside} "
            f"({told_resources()}); ask for less with {option.format('cpus')}"
            f"{' or ' + option.format('reward_workers') if beside else ''}{wait}"
        )
    return options.workers or workers_that_fit(options.cpus, options.gpus, options.reward_workers)


def told_resources() -> str:
    """What the cluster has, for messages."""
    ray = ray_module()
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in ("CPU", "GPU"))
