"""Test the log on standard error: silent by default, set by `-v`, `REWARD_KIT_LOG` and its format."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from reward_kit.cli.operator_log import EVENTS, LEVELS, LogFilter, OperatorHandler, begin, first_warnings, parsed
from reward_kit.errors import ConfigError
from reward_kit.runs.redaction import Redaction
from tests.cli.project import Project

SECRET = "sk-a-long-secret-0123456789"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def record(message: str, *arguments: Any, name: str = "reward_kit.runs", **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, __file__, 1, message, arguments, None)
    vars(made).update(extra)
    return made


def format_record(form: str, told: logging.LogRecord, *secrets: str) -> str:
    return OperatorHandler(LogFilter(logging.DEBUG), form, Redaction(secrets)).format(told)


def events_of(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


class TestLogSpecification:
    """`REWARD_KIT_LOG=level:part=level,…`."""

    @pytest.mark.parametrize(
        ("text", "name", "level"),
        [
            ("info", "reward_kit.runs", "info"),
            ("DEBUG", "reward_kit.providers.request_queue", "debug"),
            ("warning:providers=debug", "reward_kit.providers.request_queue", "debug"),
            ("warning:providers=debug", "reward_kit.runs", "warning"),
            ("off:reward_kit.providers.request_queue=info, runs=error", "reward_kit.providers.request_queue", "info"),
            ("off:reward_kit.providers.request_queue=info, runs=error", "reward_kit.providers.session", "off"),
            ("info:events=off", EVENTS, "off"),
        ],
    )
    def test_nearest_parent_logger_sets_the_level(self, text: str, name: str, level: str) -> None:
        assert parsed(text).level_of(name) == LEVELS[level]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("inf", "unknown level 'inf'; known: debug, info, warning, error, off; did you mean 'info'?"),
            ("info:provider=debug", "'provider' is not a part of the package; did you mean 'providers'?"),
            ("info:runs", "'runs' must be PART=LEVEL"),
            ("info:runs=loud", "unknown level 'loud'"),
            ("", "unknown level ''"),
        ],
    )
    def test_unknown_parts_and_levels_are_rejected(self, text: str, told: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parsed(text)
        assert told in str(caught.value)


class TestLines:
    """One record per line."""

    def test_json_record_has_its_extra_fields(self) -> None:
        output = json.loads(
            format_record("json", record("episode %s", "stopped", rollout_id="r1", error=None, steps=3))
        )
        assert output.pop("at").endswith("Z") and output.pop("pid")
        assert output == {
            "level": "info",
            "logger": "reward_kit.runs",
            "message": "episode stopped",
            "rollout_id": "r1",
            "steps": 3,
        }

    def test_text_line_has_the_same_fields(self) -> None:
        line = format_record("text", record("episode stopped", rollout_id="r1", error=None, steps=3))
        assert line.partition(" ")[2] == "info    reward_kit.runs  episode stopped rollout_id=r1 steps=3"

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_hostile_text_cannot_forge_a_record(self, form: str) -> None:
        hostile = "x\n2026-01-01 error fake\r\x1b[31m\u2028half \ud83d"
        line = format_record(form, record("%s", hostile, note=hostile))
        assert len(line.splitlines()) == 1 and "\x1b" not in line
        line.encode("utf-8")

    @pytest.mark.parametrize("form", ["text", "json"])
    @pytest.mark.parametrize("secret", [SECRET, 'pass"word\\\u00e9-0123'])
    def test_secrets_are_hidden(self, form: str, secret: str) -> None:
        log_record = record("asked with %s", secret, key=secret)
        log_record.exc_info = (ValueError, ValueError(secret), None)
        line = format_record(form, log_record, secret)
        assert line.count("(hidden)") == 3 and secret not in line
        if form == "json":
            json.loads(line)

    def test_traceback_is_indented(self) -> None:
        log_record = record("it broke")
        try:
            raise ValueError("why")
        except ValueError as error:
            log_record.exc_info = (type(error), error, error.__traceback__)
        first, *rest = format_record("text", log_record).splitlines()
        assert first.endswith("it broke") and rest[-1] == "    ValueError: why"
        assert all(line.startswith("    ") for line in rest)
        assert json.loads(format_record("json", log_record))["traceback"].endswith("ValueError: why")


def test_warnings_of_one_kind_are_shown_once() -> None:
    shown: list[str] = []
    logger = logging.getLogger("reward_kit.agent")
    with first_warnings(shown.append, Redaction({})):
        for number in range(3):
            logger.warning("episode %s failed: %s", f"e{number}", "the server is down")
            logger.warning("%s", OSError(f"cannot close session {number}"))
        logger.warning("%s", "one text")
        logger.warning("%s", "another text")
    logger.warning("after the block")
    assert shown == [
        "warning: episode e0 failed: the server is down",
        "warning: cannot close session 0",
        "warning: one text",
        "warning: another text",
    ]


def test_nothing_is_logged_by_default(project: Project) -> None:
    done = project.call("run", "task.yaml")
    assert done.returncode == 0 and "reward_kit." not in done.stderr
    assert not (project.run_path() / "run.log").exists()


@pytest.mark.parametrize("asked", [["-v", "run", "task.yaml"], ["run", "task.yaml", "-v"]])
def test_verbose_logs_events_and_keeps_standard_output_clean(project: Project, asked: list[str]) -> None:
    done = project.call(*asked, "--json", REWARD_KIT_LOG_FORMAT="json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "complete"
    events = events_of(done.stderr)
    assert [one["message"] for one in events if one["message"].startswith("run ")] == ["run started", "run ended"]
    assert [one["message"] for one in events].count("episode stopped") == 6
    scored = [one for one in events if one["message"] == "episode scored"]
    assert (
        sorted(one["score"] for one in scored) == [0.0] * 4 + [1.0] * 2
        and len({one["rollout_id"] for one in scored}) == 6
    )
    assert events[-1]["status"] == "complete" and not (project.run_path() / "run.log").exists()


def test_resume_logs_only_new_events(project: Project) -> None:
    project.call("run", "task.yaml")
    done = project.call("run", "--resume", "-v", REWARD_KIT_LOG_FORMAT="json")
    assert [one["message"] for one in events_of(done.stderr)] == ["run started", "run ended"], done.stderr


def test_level_can_be_set_for_one_part_of_the_package(project: Project) -> None:
    done = project.call("run", "task.yaml", REWARD_KIT_LOG="off:agent=debug", REWARD_KIT_LOG_FORMAT="json")
    events = events_of(done.stderr)
    assert {(one["logger"], one["level"]) for one in events} == {("reward_kit.agent", "debug")}
    assert sum("step 0" in one["message"] for one in events) == 6


def test_run_log_keeps_tracebacks_at_any_level(project: Project) -> None:
    project.write_task(reward_function_path="reward.py:broken")
    here = {"REWARD_KIT_RUN_SANDBOX": "in_process"}
    done = project.call("run", "task.yaml", REWARD_KIT_LOG="error", OPENAI_API_KEY=SECRET, **here)
    assert done.returncode == 3 and "reward_kit." not in done.stderr
    assert "ZeroDivisionError" in (project.run_path() / "run.log").read_text()


def test_secret_of_the_environment_is_not_logged(project: Project) -> None:
    (project.folder / "tools.py").write_text((project.folder / "tools.py").read_text().replace("waited", SECRET))
    action = {"type": "tool_call", "name": "wait", "arguments": {"milliseconds": SECRET}}
    project.write_task(policy={"type": "scripted", "actions": [action, {"type": "text", "content": SECRET}]})
    done = project.call("run", "task.yaml", "-vv", OPENAI_API_KEY=SECRET)
    assert done.returncode == 0 and "(hidden)" in done.stderr and SECRET not in done.stderr


def test_invalid_level_is_one_line_and_exit_code_2(project: Project) -> None:
    done = project.call("run", "task.yaml", REWARD_KIT_LOG="verbose")
    assert done.returncode == 2 and "REWARD_KIT_LOG=verbose: unknown level 'verbose'" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not project.runs()


def test_unknown_log_formats_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KIT_LOG_FORMAT", "jsonl")
    with pytest.raises(ConfigError, match="=jsonl: expected text or json; did you mean 'json'"):
        begin(0)
