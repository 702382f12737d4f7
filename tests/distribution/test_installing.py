"""Test the wheel in an empty environment on every supported Python of this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.distribution.building import ROOT, Built, new_environment, pythons, run, size_of
from tests.pages.parts import read_page
from tests.pages.running import run_page

pytestmark = pytest.mark.campaign

MOST_PACKAGES = 26
MOST_BYTES = 150_000_000
HEAVY = {"torch", "transformers", "ray", "pyarrow", "openai", "pandas", "scipy"}


@pytest.fixture(scope="module", params=pythons().items(), ids=lambda item: item[0])
def core(request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The core with its installed size, excluding pip."""
    folder = tmp_path_factory.mktemp("core")
    places = new_environment(folder, request.param[1])
    before, packages = size_of(folder), installed(places)
    run(places / "pip", "install", "--quiet", built.wheel)
    came = installed(places) - packages
    return {"bin": places, "packages": came, "bytes": size_of(folder) - before}


def installed(places: Path) -> set[str]:
    listed = json.loads(run(places / "pip", "list", "--format", "json"))
    return {package["name"].lower() for package in listed}


def test_core_installation_is_small(core: dict[str, object]) -> None:
    packages, size = core["packages"], core["bytes"]
    assert "reward-kit" in packages and not packages & HEAVY
    assert len(packages) <= MOST_PACKAGES, sorted(packages)
    assert size <= MOST_BYTES, f"{size / 1e6:.0f} MB"
    print(f"{len(packages)} packages, {size / 1e6:.0f} MB")


def test_pip_check_finds_no_conflicts(core: dict[str, object]) -> None:
    assert "No broken requirements" in run(core["bin"] / "pip", "check")


def test_installed_package_runs_the_quick_start(core: dict[str, object], tmp_path: Path) -> None:
    python, program = core["bin"] / "python", core["bin"] / "reward-kit"
    run(python, "-c", "import reward_kit; [getattr(reward_kit, name) for name in reward_kit.__all__]", cwd=tmp_path)
    assert "\nEvaluate:\n" in run(program, "--help", cwd=tmp_path)
    run(program, "init", "mine", cwd=tmp_path)
    output = json.loads(run(program, "run", "task.yaml", "--json", cwd=tmp_path / "mine"))
    assert output["policies"][0]["score"]["mean"] == 1.0
    (path,) = (tmp_path / "mine/runs").iterdir()
    assert (path / "report.html").stat().st_size > 10_000
    run(program, "credit", path, cwd=tmp_path / "mine")
    assert json.loads(run(program, "doctor", "--json"))["extras"]["train"]


def test_tests_of_a_new_project_pass(core: dict[str, object], tmp_path: Path) -> None:
    run(core["bin"] / "pip", "install", "--quiet", "pytest")
    run(core["bin"] / "reward-kit", "init", "mine", cwd=tmp_path)
    assert " passed" in run(core["bin"] / "python", "-m", "pytest", "-q", cwd=tmp_path / "mine")


def test_first_tutorial_works_in_an_empty_folder(built: Built, tmp_path: Path) -> None:
    began = time.monotonic()
    programs = new_environment(tmp_path / "environment", Path(next(iter(pythons().values()))))
    run(programs / "pip", "install", "--quiet", built.wheel, "pytest")
    installed_s = time.monotonic() - began
    (tmp_path / "reader").mkdir()
    run_page(read_page(ROOT / "docs/tutorials/first_evaluation.md"), tmp_path / "reader", programs)
    print(f"{installed_s:.0f} s to install, {time.monotonic() - began - installed_s:.0f} s for the page")
