"""Test that the distribution has all files of the package and nothing else."""

from __future__ import annotations

import email
import sys
import zipfile
from pathlib import Path

import pytest

from tests.distribution.building import (
    PROJECT,
    ROOT,
    Built,
    names_in_sources,
    names_in_wheel,
    run,
    tracked_files,
)

pytestmark = pytest.mark.campaign

PACKAGES = {*tracked_files("reward_kit"), *tracked_files("reward_protocol")}
SOURCES = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}
WRITTEN_BY_THE_BUILD = {".gitignore", "PKG-INFO"}


def test_wheel_contains_exactly_the_package(built: Built) -> None:
    info = f"reward_kit-{PROJECT['version']}.dist-info"
    facts = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names_in_wheel(built.wheel) == PACKAGES | facts


def test_data_files_are_in_the_wheel_unchanged(built: Built) -> None:
    data = [name for name in tracked_files("reward_kit") if not name.endswith(".py")]
    assert {Path(name).suffix for name in data} >= {".typed", ".j2", ".js", ".css", ".yaml", ".jsonl", ".txt"}
    with zipfile.ZipFile(built.wheel) as archive:
        assert [name for name in data if archive.read(name) != (ROOT / name).read_bytes()] == []


def test_sdist_contains_the_sources_for_a_build(built: Built) -> None:
    expected = PACKAGES | SOURCES
    assert names_in_sources(built.sources) - WRITTEN_BY_THE_BUILD == expected


def test_wheel_from_the_clone_equals_the_wheel_from_the_sdist(built: Built, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, built.clone)
    (of_clone,) = tmp_path.glob("*.whl")
    assert names_in_wheel(of_clone) == names_in_wheel(built.wheel)


def test_metadata_for_the_package_index_is_complete(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = email.message_from_bytes(archive.read(name))
    assert (told["Name"], told["Version"]) == ("reward-kit", PROJECT["version"])
    assert told["License-Expression"] == "Apache-2.0" and told["Requires-Python"] == ">=3.11"
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().startswith("# reward-kit")
