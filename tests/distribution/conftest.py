"""One build for all tests of the distribution."""

from __future__ import annotations

import importlib.util

import pytest

from tests.distribution.building import UV, Built, build, copy_repository


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if not UV.exists() or importlib.util.find_spec("build") is None:
        pytest.skip("needs uv and build, which `make packaging` installs")
    copy = copy_repository(tmp_path_factory.mktemp("clone"))
    return build(copy, tmp_path_factory.mktemp("dist"))
