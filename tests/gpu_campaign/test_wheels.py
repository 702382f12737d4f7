"""Test which distributions travel to a machine without network."""

from __future__ import annotations

import importlib.metadata

import pytest

from benchmarks.gpu_campaign.wheels import EXTRAS, OMITTED, TOOLS, closure, of_training


def test_everything_but_torch_travels() -> None:
    versions = closure([f"reward-kit[{EXTRAS}]", *of_training(), *TOOLS], "3.12", OMITTED)
    needed = {"reward-kit", "transformers", "tokenizers", "safetensors", "pydantic-core", "numpy", "peft", "pytest"}
    assert needed <= versions.keys()
    assert not {*OMITTED, "nvidia-nccl-cu13", "cuda-bindings"} & versions.keys()
    assert versions["transformers"] == importlib.metadata.version("transformers")


def test_packages_of_the_machine_and_what_only_they_need_stay_here() -> None:
    requirement = ["hypothesis"]
    assert "sortedcontainers" in closure(requirement, "3.12", OMITTED)
    assert closure(requirement, "3.12", [*OMITTED, "hypothesis"]) == {}


def test_dependencies_depend_on_the_python_of_the_machine() -> None:
    assert "zstandard" in closure(["reward-kit[logs]"], "3.13", OMITTED)
    assert "zstandard" not in closure(["reward-kit[logs]"], "3.14", OMITTED)


def test_missing_distribution_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no-such-package is not installed here"):
        closure(["no-such-package"], "3.12", OMITTED)
