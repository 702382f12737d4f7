"""Run the tests in `verifiers/` in verifiers' own Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".integrations/verifiers/bin/python"
FOLDER = Path(__file__).parent / "verifiers"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("in_verifiers_*.py")))
def test_file_passes_in_the_verifiers_environment(file: str) -> None:
    if not PYTHON.exists():
        pytest.skip("verifiers is not installed in .integrations/verifiers; run `make integrations`")
    # The conftests above it need torch, which is not there.
    command = [PYTHON, "-m", "pytest", "-m", "", f"--confcutdir={FOLDER}", FOLDER / file]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER)])}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
