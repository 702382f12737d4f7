"""Tests of the check of Harbor task folders, and of the red-team corpus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import anyio
import pytest

from reward_kit.checks.findings import FIXES
from reward_kit.checks.harbor import check_harbor_task
from reward_kit.environments.harbor_task import is_task_folder, read_harbor_task
from reward_kit.errors import ConfigError
from tests.command_line import call

CORPUS = Path(__file__).parents[2] / "benchmarks" / "red_team"
OTHER_KINDS = {"catastrophic-regex", "depends-on-hash-seed", "evaluates-answer", "hidden-state", "nondeterministic"}
OTHER_KINDS |= {"refuses-equal-form", "sensitive-to-whitespace", "unreadable-truth-earns"}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Return a copy of a task whose tests are correct."""
    return Path(shutil.copytree(CORPUS / "harbor" / "exists_only" / "fixed", tmp_path / "task"))


def test_corpus_has_two_versions_and_a_source_of_each_verifier() -> None:
    entries = sorted(path.parent for path in CORPUS.glob("*/*/given.json"))
    assert len(entries) >= 40
    for entry in entries:
        given = json.loads((entry / "given.json").read_text(encoding="utf-8"))
        assert given["source"] and set(given["exploits"]) <= FIXES.keys() | OTHER_KINDS
        for version in ("planted", "fixed"):
            assert is_task_folder(str(entry / version)) or (entry / f"{version}.py").is_file()


def test_task_is_read_without_running_it(task: Path) -> None:
    read = read_harbor_task(task)
    assert read.workdir == "/app" and not read.needs_container
    assert set(read.environment) == {"/app/data/names.txt"}
    assert set(read.tests) == {"/tests/test.sh"} and set(read.solution) == {"/solution/solve.sh"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RUN make install", "RUN make install"),
        ("RUN pip install a-package-that-is-not-here", "pip install"),
        ("FROM nvidia/cuda:12.4.0-base", "FROM nvidia"),
        ("COPY ../secret /app/", "COPY ../secret"),
    ],
)
async def test_task_that_needs_a_container_is_not_run(task: Path, line: str, reason: str) -> None:
    file = task / "environment" / "Dockerfile"
    file.write_text(f"{file.read_text()}{line}\n")
    report = await check_harbor_task(task)
    (finding,) = report.findings
    assert finding.kind == "not-run" and reason in finding.evidence[0]
    assert "needs a container" in report.unchecked["the tests"]


def test_simple_commands_and_installers_need_no_container(task: Path) -> None:
    file = task / "environment" / "Dockerfile"
    file.write_text(f"{file.read_text()}RUN apt-get update && apt-get install -y curl \\\n  && mkdir -p /app/out\n")
    read = read_harbor_task(task)
    assert not read.needs_container and read.setup == "mkdir -p /app/out"


def test_folder_without_tests_is_rejected(task: Path) -> None:
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh is missing"):
        read_harbor_task(task)


async def test_correct_tests_have_no_findings(task: Path) -> None:
    report = await check_harbor_task(task)
    assert not report.findings, "\n".join(report.lines())
    assert report.facts["rewards"] == {"solution": 1.0, "nothing": 0.0}


async def test_exploit_is_reported_with_its_commands_and_a_fix() -> None:
    report = await check_harbor_task(CORPUS / "harbor" / "reward_left" / "planted")
    (finding,) = [finding for finding in report.findings if finding.kind == "reward-file-earns"]
    assert finding.level == "error" and "delete earlier reward files" in finding.fix
    assert finding.reproduction == "printf %s 1 > /logs/verifier/reward.txt"


async def test_leftover_reward_file_does_not_replace_the_one_that_the_tests_write(task: Path) -> None:
    test = task / "tests" / "test.sh"
    as_json = 'cd /logs/verifier; echo "{\\"reward\\": $(cat reward.txt)}" > reward.json; rm reward.txt'
    test.write_text(f"{test.read_text()}\n{as_json}\n")
    report = await check_harbor_task(task)
    assert not report.findings, "\n".join(report.lines())


async def test_reason_for_a_missing_reward_is_reported(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("echo '{reward: 1}' > /logs/verifier/reward.json\n")
    (finding,) = (await check_harbor_task(task)).findings
    assert finding.kind == "gold-below-one" and "reward.json is not valid JSON: " in finding.evidence[0]


async def test_facts_of_a_task_without_a_solution_name_no_reward_of_a_solution(task: Path) -> None:
    shutil.rmtree(task / "solution")
    report = await check_harbor_task(task)
    assert report.facts["rewards"] == {"nothing": 0.0}
    assert not any("(solution" in line for finding in report.findings for line in finding.evidence)


async def test_files_of_this_machine_are_not_readable_by_a_task(task: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (task / "tests" / "test.sh").write_text(f"cat {secret} && echo 1 > /logs/verifier/reward.txt\n")
    report = await check_harbor_task(task)
    assert [finding.kind for finding in report.findings] == ["gold-below-one"]


def test_command_prints_the_report_and_exits_with_1(tmp_path: Path) -> None:
    result = call("check", str(CORPUS / "harbor" / "exists_only" / "planted"), "--json", cwd=tmp_path)
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert [(one["code"], one["reproduction"]) for one in report["findings"] if one["severity"] == "error"] == [
        ("empty-files-earn", ": > /app/count.txt")
    ]


async def test_slow_solution_has_the_time_limits_of_the_task(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_kit.checks.harbor._ATTEMPT_S", 0.5)
    solution = task / "solution" / "solve.sh"
    solution.write_text(f"sleep 1\n{solution.read_text()}")
    report = await check_harbor_task(task)
    assert not report.findings, "\n".join(report.lines())


async def test_time_of_an_attempt_is_limited(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_kit.checks.harbor._ATTEMPT_S", 0.5)
    tests = task / "tests" / "test.sh"
    tests.write_text(f"[ -e /app/count.txt ] || sleep 20\n{tests.read_text()}")
    with anyio.fail_after(60):  # many attempts write no such file
        report = await check_harbor_task(task)
    assert report.facts["rewards"] == {"solution": 1.0, "nothing": 0.0}
