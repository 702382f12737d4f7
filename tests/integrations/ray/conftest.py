"""Small clusters of several nodes on this machine, which leave nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# All but the quick ones run in .integrations/ray, where Ray is.
collect_ignore = (
    [] if find_spec("ray") else ["test_engine.py", "test_node_loss.py", "test_rewards.py", "test_command.py"]
)
NODES = 4
_MEMORY = 80 * 1024 * 1024


def quiet() -> None:
    """Set environment variables that turn off Ray's usage reports and its token in the user's home."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


@contextmanager
def _short_folder() -> Iterator[Path]:
    """A folder with a short name, since socket paths are limited to about 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="rk"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The working directory of a test."""
    with _short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """The folder for the files of a module's cluster."""
    with _short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Any]:
    """A cluster of four nodes with one CPU each, to which this process is connected."""
    quiet()
    import ray
    from ray.cluster_utils import Cluster

    # Ray writes the address of a new cluster into this directory, but does not create it.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    facts = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": _MEMORY, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={**facts, "temp_dir": str(home)})
    for _ in range(NODES - 1):
        nodes.add_node(**facts)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()
