"""`reward-kit doctor`: it tells what holds here, why what is missing is missing, and whether model code can run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from reward_kit.cli import doctor
from reward_kit.cli.doctor import command
from tests.sandbox.behind_walls import AVAILABLE, missing

DENY = """
import errno, sys
from reward_kit.sandbox.kernel import bpf, libc, seccomp, syscalls
denied = {"x86_64": {"unshare": 272, "landlock": 444}, "aarch64": {"unshare": 97, "landlock": 444}}[syscalls.machine()]
deny = bpf.answer(bpf.errno_action(errno.EPERM))
libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1, "")
rules = {denied[name]: deny for name in sys.argv[1].split(",")}
seccomp.load(bpf.program(syscalls.audit_arch(syscalls.machine()), rules, bpf.answer(bpf.ALLOW)))
sys.argv[1:] = sys.argv[2:]
from reward_kit.cli.main import main
main()
"""


def examined_without(names: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As in a container whose filter refuses these calls."""
    line = [sys.executable, "-c", DENY, names, "doctor", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_it_tells_what_a_run_would_get():
    done = CliRunner().invoke(command, ["--json"], standalone_mode=False)
    found = json.loads(done.stdout)
    strengths = found["sandbox"]["strengths"]
    assert {name: one["available"] for name, one in strengths.items()} == {
        name: one.is_available for name, one in AVAILABLE.items()
    }
    assert done.return_value == (0 if found["sandbox"]["confines_model_code"] else 1)
    assert found["python"]["path"] == sys.executable
    assert found["limits"]["open_files"] > 0
    assert {"games", "mcp", "train", "dev"} <= found["extras"].keys()


@pytest.mark.skipif(sys.platform != "linux", reason="the mechanisms are Linux's")
def test_a_missing_wall_is_named_with_its_reason():
    if missing("landlock"):
        pytest.skip(missing("landlock"))
    done = examined_without("unshare")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert "no" in lines["namespaces"].split() and "Operation not permitted" in lines["namespaces"]
    assert done.stdout.endswith("Model-written code is confined with landlock.\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the mechanisms are Linux's")
def test_where_nothing_confines_the_status_is_1():
    done = examined_without("unshare,landlock")
    assert done.returncode == 1, done.stderr
    assert "Model-written code is refused here: this machine cannot confine code (namespaces: " in done.stdout
    found = json.loads(examined_without("unshare,landlock", "--json").stdout)
    assert found["sandbox"]["strength"] is None
    assert "Landlock" in found["sandbox"]["strengths"]["landlock"]["reason"]


def test_a_missing_package_is_named(monkeypatch):
    wants = ["nothing-like-it>=1,<2; extra == 'games'", "click>=8; extra == 'mcp'", "click>=8"]
    wants += ["nothing-either; (python_version < '3.9') and extra == 'mcp'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wants)
    assert doctor._extras() == {"games": ["nothing-like-it"], "mcp": []}
    done = CliRunner().invoke(command, standalone_mode=False)
    assert "missing: nothing-like-it" in done.stdout
