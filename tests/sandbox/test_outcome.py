"""Classification of a sandbox call from the available evidence."""

from __future__ import annotations

import pytest

from reward_kit.sandbox import Limits
from reward_kit.sandbox.frames import FrameError
from reward_kit.sandbox.outcome import Evidence, judge
from tests.sandbox.hostile_case import word_of

LIMITS = Limits()


def judged(**known):
    return judge(Evidence(**{"is_ready": True, "exit": 0, **known}), LIMITS, "isolated", "namespaces")


def judged_error(kind, message="m"):
    return judged(answer={"error": {"kind": kind, "type": "E", "message": message, "traceback": "t"}, "left": []})


def test_answer_with_a_value_is_ok():
    outcome = judged(answer={"value": None, "left": []})
    assert (outcome.kind, outcome.failure, word_of(outcome)) == ("ok", None, "ok")
    assert word_of(judged(answer={"value": 1, "left": []}, is_output_cut=True)) == "output-capped"


@pytest.mark.parametrize(
    ("known", "kind", "failure_class", "word"),
    [
        ({"how": "late"}, "wall", "timeout", "timeout"),
        ({"how": "cpu"}, "cpu", "timeout", "timeout"),
        ({"how": "disk"}, "disk", "limit", "denied"),
        ({"how": "lost"}, "zygote", "crash", "crashed"),
        ({"is_ready": False, "exit": 97}, "setup", "refused", "error"),
        ({"fault": FrameError("no_result", ""), "exit": -9, "cpu_s": 9.0}, "cpu", "timeout", "timeout"),
        ({"fault": FrameError("no_result", ""), "exit": -9, "cpu_s": 1.0}, "signal", "crash", "crashed"),
        ({"fault": FrameError("no_result", ""), "exit": -31}, "forbidden_call", "crash", "crashed"),
        ({"fault": FrameError("no_result", ""), "exit": 0}, "no_result", "crash", "error"),
        ({"fault": FrameError("forged_frame", "x")}, "forged_frame", "invalid_result", "invalid-result"),
        ({"fault": FrameError("result_size", "x")}, "result_size", "limit", "result-too-large"),
    ],
)
def test_host_evidence_is_classified(known, kind, failure_class, word):
    outcome = judged(**known)
    assert (outcome.kind, outcome.failure.failure_class, word_of(outcome)) == (kind, failure_class, word)
    assert outcome.value is None


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("memory", "memory_mb"),
        ("disk", "disk_mb"),
        ("open_files", "open_files"),
        ("processes", "processes"),
        ("result_size", "result_kb"),
    ],
)
def test_exceeded_limit_message_explains_how_to_raise_the_limit(kind, limit):
    assert f"raise limits.{limit}" in judged_error(kind).failure.message
    assert judged_error(kind).failure.failure_class == "limit"


def test_timeout_messages_name_the_time_limits():
    assert "raise limits.wall_s" in judged(how="late").failure.message
    assert "raise limits.cpu_s" in judged(how="cpu").failure.message


def test_harness_may_report_only_kinds_that_code_can_cause():
    assert judged_error("exception").failure.message == "E: m"
    assert judged_error("exception").failure.traceback == "t"
    for answer in (
        {"error": {"kind": "ok", "type": "", "message": "", "traceback": ""}},
        {"error": {"kind": "zygote", "type": "", "message": "", "traceback": ""}},
        {"error": {"kind": "exception"}},
        {"error": "x"},
        {"left": []},
        {"value": 1, "score": 1},
        [],
        None,
    ):
        assert judged(answer=answer).kind == "forged_frame"
