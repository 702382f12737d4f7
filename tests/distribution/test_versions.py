"""Test that the newest and the oldest allowed versions work, for the core and for each extra.

That the tests pass on the oldest is shown by `make test-oldest`; here each extra does one thing of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution.building import PROJECT, ROOT, Built, resolved, run

pytestmark = pytest.mark.campaign

USES = {
    "": "from reward_kit.runs import evaluation",
    "games": "import asyncio; from reward_kit.checks.resource import check_resource; "
    "from reward_kit.environments.config import resource_class; "
    "assert not asyncio.run(check_resource(resource_class('gymnasium'), {'env_id': 'FrozenLake-v1'}, seed=0, steps=5))",
    "text-games": "import textworld, alfworld",
    "json": "import jsonschema; jsonschema.validate(1, {'type': 'integer'})",
    "math": "import math_verify, sympy; from reward_kit.rewards import math_answer",
    "languages": "import py3langid; assert py3langid.classify('This is an English sentence.')[0] == 'en'",
    "mcp": "import reward_kit.environments.mcp; import mcp",
    "similarity": "from rapidfuzz import fuzz; assert fuzz.ratio('a', 'a') == 100",
    "train": "from reward_kit.cli.main import program; program.get_command(None, 'train'); import reward_kit.rl.ppo",
    "lora": "import peft; peft.LoraConfig()",
    "constrained": "import llguidance",
    "export": "import pyarrow.parquet",
    "logs": "import sys; assert sys.version_info >= (3, 14) or __import__('zstandard')",
    "otel": "from reward_kit.runs.otlp import Sender; Sender('http://127.0.0.1:1/v1/traces').close()",
    "ray": "import reward_kit.integrations.ray.engine, ray",
    "docs": "import mkdocs, mkdocstrings",
    "dev": "import hypothesis, mypy, openai, pytest",
}
"""What is done with each extra once it is installed; "" is the core alone."""


# The tag in its wheel is that of its file's name, four in one, which none is; it installs and works.
TAGGED_WRONGLY = "textworld 1.7.0 is not supported on this platform"


def contradictions(places: Path) -> list[str]:
    """Return the output of `pip check` without known problems."""
    line = [places / "python", "-m", "pip", "check"]
    lines = subprocess.run(line, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in lines if line not in (TAGGED_WRONGLY, "No broken requirements found.")]


def test_every_extra_is_tested() -> None:
    assert set(USES) - {""} == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("extra", USES, ids=lambda extra: extra or "core")
@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"], ids=["newest", "oldest"])
def test_resolved_versions_are_consistent_and_work(built: Built, resolution: str, extra: str, tmp_path: Path) -> None:
    wanted = f"reward-kit[{extra}] @ {built.wheel.as_uri()}"
    # Of PyTorch the newest is the one that everything here is tested with; the oldest is the oldest.
    pinned = ["--constraint", ROOT / "constraints.txt"] if resolution == "highest" else []
    places = resolved(tmp_path / "there", wanted, resolution=resolution, more=pinned)
    assert contradictions(places) == []
    output = json.loads(run(places / "reward-kit", "doctor", "--json", cwd=tmp_path))
    assert output["extras"].get(extra, []) == [], "an extra that pip installed whole is whole to doctor"
    run(places / "python", "-W", "ignore", "-c", USES[extra], cwd=tmp_path)
    print(run(places / "python", "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"))


def test_running_python_is_a_supported_version() -> None:
    assert any(line.endswith(f"{sys.version_info[0]}.{sys.version_info[1]}") for line in PROJECT["classifiers"])
