"""What is shipped: the package with all its files, and nothing else, the same from the clone and from the sources."""

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


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    info = f"reward_kit-{PROJECT['version']}.dist-info"
    facts = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names_in_wheel(built.wheel) == PACKAGES | facts


def test_what_is_no_python_is_in_it_byte_by_byte(built: Built) -> None:
    data = [name for name in tracked_files("reward_kit") if not name.endswith(".py")]
    assert {Path(name).suffix for name in data} >= {".typed", ".j2", ".js", ".css", ".yaml", ".jsonl", ".txt"}
    with zipfile.ZipFile(built.wheel) as archive:
        assert [name for name in data if archive.read(name) != (ROOT / name).read_bytes()] == []


def test_the_sources_have_what_a_build_needs(built: Built) -> None:
    expected = PACKAGES | SOURCES
    assert names_in_sources(built.sources) - WRITTEN_BY_THE_BUILD == expected


def test_a_wheel_of_the_clone_is_that_of_the_sources(built: Built, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, built.clone)
    (of_clone,) = tmp_path.glob("*.whl")
    assert names_in_wheel(of_clone) == names_in_wheel(built.wheel)


def test_metadata_for_the_package_index(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = email.message_from_bytes(archive.read(name))
    assert (told["Name"], told["Version"]) == ("reward-kit", PROJECT["version"])
    assert told["License-Expression"] == "Apache-2.0" and told["Requires-Python"] == ">=3.11"
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().startswith("# reward-kit")
