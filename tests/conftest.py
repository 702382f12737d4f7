"""Settings of every test: trust, a temporary state folder, one thread, a hypothesis profile, logging as before."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.profiles import PROFILE, load_profile

# Tests trust their own code, except tests of trust itself. Records of trust go to a temporary folder.
os.environ["REWARD_KIT_TRUST"] = "1"
_STATE = tempfile.TemporaryDirectory(prefix="reward-kit-state-")  # removed when this process ends
os.environ["XDG_STATE_HOME"] = _STATE.name

# With two threads on two busy cores, OpenMP's spinning makes tiny models twenty times slower; `make test-cpus` asks for
# more threads, to see that results hold, and turns the spinning off.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))

load_profile()

# A shell without job control starts background processes with SIGINT ignored, which children of tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Load the device of the tests, so that an unavailable one is a single error."""
    if os.environ.get("REWARD_KIT_TEST_DEVICE", "cpu") != "cpu":
        from reward_kit.errors import ConfigError

        try:
            import tests.devices  # noqa: F401
        except ConfigError as error:
            raise pytest.UsageError(f"REWARD_KIT_TEST_DEVICE: {error}") from None


SLOW = frozenset(Path(__file__).with_name("slow_tests.txt").read_text(encoding="utf-8").split())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to `make test-all`, unless the command line selects tests by path, keyword or marker.

    A listed function may have variants that are marked `campaign`: `pytest -m campaign` runs them all.
    """
    is_default = config.args == config.getini("testpaths") and config.option.markexpr == "not campaign"
    if PROFILE == "full" or not is_default or config.option.keyword:
        return
    slow = [item for item in items if item.nodeid.partition("[")[0] in SLOW]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item.nodeid.partition("[")[0] not in SLOW]


@pytest.fixture(autouse=True)
def _threads_as_asked() -> None:
    """Undo settings of earlier tests. PyTorch is not imported here, since most tests do not need it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _tensors_on_the_test_device() -> Iterator[None]:
    """Create the tensors of tests on the device that REWARD_KIT_TEST_DEVICE names; without torch there are none."""
    if devices := sys.modules.get("tests.devices"):
        with devices.tests_on_device():
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _package_logs_as_before() -> Iterator[None]:
    """Undo the logging setup of commands that are called in this process."""
    package = logging.getLogger("reward_kit")
    level, propagates, handlers = package.level, package.propagate, list(package.handlers)
    yield
    package.setLevel(level)
    package.propagate = propagates
    for handler in set(package.handlers) - set(handlers):
        package.removeHandler(handler)
        handler.close()
