"""Test hostile code at every available sandbox strength, in an outer cage with canaries that detect access.

The quick cases here; all of them, as both users and at both levels, by `make sandbox-campaign`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from reward_kit.sandbox import Sandbox
from tests.sandbox.hostile_cage import HERE, missing_cage
from tests.sandbox.hostile_campaign import naive_row, row_of
from tests.sandbox.hostile_case import TESTS, Seen, problems_of, read_case, read_cases, share_passed
from tests.sandbox.sandbox_calls import AVAILABLE, missing, run

CASES = Path(__file__).parent / "cases"
SLOW = ("time_", "memory_", "forge_by_drops", "forge_endless_frame", "disk_", "output_without", "crash_in_c")
QUICK = [case.name for case in read_cases(CASES) if not case.name.startswith(SLOW)]
OF_WARM = [name for name in QUICK if name.startswith(("state_", "forge_"))]
HEAD = "# expect: denied|ok | kind: reward | observe: a | b | score: 0.5 | repeat: seed\n"

SURVIVOR = """# expect: ok | kind: reward | observe: nothing
import os, time
def evaluate(messages, **rest):
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 64)
        time.sleep(60)
        os._exit(0)
    return {"score": 0.0}
"""


def test_every_kind_of_attack_has_cases():
    kinds = {name.partition("_")[0] for name in QUICK}
    assert len(QUICK) >= 30
    assert {"network", "files", "process", "kernel", "secrets", "forge", "result", "crash", "state", "load"} <= kinds


@pytest.mark.skipif(missing_cage() != "", reason=missing_cage())
@pytest.mark.parametrize(
    ("strength", "level", "names"),
    [("namespaces", "isolated", QUICK), ("landlock", "isolated", QUICK), ("namespaces", "warm", OF_WARM)],
)
def test_quick_cases_find_nothing(strength, level, names):
    if missing(strength):
        pytest.skip(missing(strength))
    inside = [str(CASES), "--inside", strength, level, "--only", *names]
    command = [sys.executable, str(HERE.with_name("hostile_campaign.py")), *inside]
    row = row_of(strength, command, os.geteuid(), len(names), [CASES], 120)
    assert row.problems == {}
    assert row.passed == len(names)


@pytest.mark.skipif(missing_cage() != "", reason=missing_cage())
def test_unconfined_hostile_code_is_noticed(tmp_path):
    """With limits alone, the runner must detect each of these."""
    wanted = {
        "files_of_the_host": "canary: the secret file, or the folder it is in, was changed",
        "network_datagrams": "canary: the UDP listener was reached",
        "survivor": "left: process",
    }
    for name in wanted.keys() & set(QUICK):
        shutil.copy(CASES / f"{name}.py", tmp_path)
    (tmp_path / "survivor.py").write_text(SURVIVOR)
    inside = [str(tmp_path), "--inside", "process", "isolated"]
    command = [sys.executable, str(HERE.with_name("hostile_campaign.py")), *inside]
    found = row_of("process", command, os.geteuid(), len(wanted), [tmp_path], 120).problems
    for name, text in wanted.items():
        assert any(text in problem for problem in found.get(name, ())), (name, found.get(name))


@pytest.mark.skipif(missing_cage() != "", reason=missing_cage())
def test_unsandboxed_baseline_accepts_forged_results():
    names = ["forge_harness_patched", "result_boolean", "honest_submission"]
    row = naive_row(CASES, read_cases(CASES, names), sys.executable, os.geteuid())
    assert row.passed == 1
    assert row.problems["forge_harness_patched"][0].startswith("forged: it passed 100%")
    assert row.problems["result_boolean"][0].startswith("invalid: True was taken")


@pytest.mark.parametrize("strength", ["namespaces", "landlock"])
async def test_file_metadata_changes_are_denied_without_a_private_root(strength):
    """Such calls would change modes, times and lengths of any file of the user."""
    if missing(strength):
        pytest.skip(missing(strength))
    body = """
open("file", "w").write("text")
found = []
for act in (
    lambda: os.chmod("file", 0o700),
    lambda: os.chmod(os.open("file", os.O_RDONLY), 0o700),
    lambda: os.utime("file", (1, 1)),
    lambda: os.truncate("file", 0),
    lambda: os.open("file", os.O_RDONLY | os.O_TRUNC),
):
    try:
        act()
        found.append("done")
    except PermissionError:
        found.append("denied")
return found
"""
    async with Sandbox(strength=strength, slots=1) as sandbox:
        found = (await run(sandbox, body)).value
    assert found == ["done" if strength == "namespaces" else "denied"] * 4 + ["denied"]


async def test_late_kill_does_not_affect_the_next_call():
    if not any(found.is_available for name, found in AVAILABLE.items() if name != "process"):
        pytest.skip("nothing confines here")
    async with Sandbox(slots=1) as sandbox:
        await run(sandbox, "return 1")
        (zygote,) = sandbox._idle
        over = zygote._child  # made ready for the next call, which ends it
        await run(sandbox, "return 1")
        call = asyncio.create_task(run(sandbox, "time.sleep(0.1)\nreturn 2"))
        await asyncio.sleep(0.05)
        zygote.kill_child(over)
        assert (await call).value == 2


def test_expectations_are_parsed_from_the_first_line(tmp_path):
    (tmp_path / "one.py").write_text(HEAD + "x = '@MARK@ @OTHER@'\n")
    case = read_case(tmp_path / "one.py")
    assert (case.expect, case.kind, case.score, case.max_score) == ({"denied", "ok"}, "reward", 0.5, 0.0)
    assert case.filled({"MARK": "m"}).endswith("x = 'm @OTHER@'\n")
    (tmp_path / "two.py").write_text("# expect: fine | kind: reward | observe: a\n")
    with pytest.raises(ValueError, match="its first line says"):
        read_case(tmp_path / "two.py")


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (Seen("ok", {"score": 0.5, "denied": ["a"]}), None),
        (Seen("ok", {"score": 0.5}), None),
        (Seen("denied"), None),
        (Seen("ok", {"score": 1.0}), "score: 1.0"),
        (Seen("ok", {"score": 0.5, "breach": ["read it"]}), "breach: read it"),
        (Seen("ok", {"score": True}), "outcome: invalid-result"),
        (Seen("ok", {"score": 0.5, "seed": 1}, again={"score": 0.5, "seed": 2}), "state: seed was 1"),
        (Seen("timeout"), "outcome: timeout"),
        (Seen("ok", {"score": 0.5}, text="SECRET"), "leak"),
        (Seen("ok", {"score": 0.5}, wall_s=9), "slow"),
        (Seen("ok", {"score": 0.5}, problems=["left: a process"]), "left"),
    ],
)
def test_evidence_decides_the_outcome(tmp_path, seen, problem):
    (tmp_path / "one.py").write_text(HEAD)
    if seen.again is None and seen.value is not None:
        seen.again = seen.value
    found = problems_of(read_case(tmp_path / "one.py"), seen, ["SECRET"])
    assert (found == []) if problem is None else found[0].startswith(problem), found


def test_answer_of_another_type_does_not_pass():
    assert share_passed([wanted for _, wanted in TESTS]) == 1.0
    assert share_passed([float(wanted) for _, wanted in TESTS]) == 0.25
    assert share_passed([]) == 0.0
