"""Fixtures for TRL and verl, each started once in its own Python, and the table of compared values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.peers import PYTHON, Deviations, Peer


@pytest.fixture(scope="session")
def deviations() -> Iterator[Deviations]:
    found = Deviations()
    yield found
    found.show()


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with _started("verl_side.py", tmp_path_factory) as peer:
        yield peer


@pytest.fixture(scope="session")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with _started("trl_side.py", tmp_path_factory) as peer:
        yield peer


@pytest.fixture(scope="session")
def managers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with _started("managers.py", tmp_path_factory) as peer:
        yield peer


def _started(script: str, folders: pytest.TempPathFactory) -> Peer:
    if not PYTHON.exists():
        pytest.skip("TRL and verl are not installed; run `make integrations`")
    return Peer(script, folders.mktemp(script.removesuffix(".py")))
