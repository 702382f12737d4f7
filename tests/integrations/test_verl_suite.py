"""Run the tests in `tests/integrations/verl` in verl's own Python."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.integrations.peers import PYTHON, ROOT

pytestmark = pytest.mark.campaign


def test_tests_inside_the_verl_environment_pass() -> None:
    if not PYTHON.exists():
        pytest.skip("verl is not installed; run `make integrations`")
    # verl and what it needs warn of themselves while they are imported.
    options = ["-m", "campaign", "-W", "ignore", "-p", "no:cacheprovider", "-rs"]
    done = subprocess.run(
        [PYTHON, "-m", "pytest", *options, "tests/integrations/verl"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    dots = "".join(re.findall(r"^([.s]+) *\[", done.stdout, re.MULTILINE))
    assert dots.count(".") > 50 and "s" not in dots, done.stdout
