"""Error boundaries, failure records and tracebacks of user code."""

import asyncio
import sys
from pathlib import Path

import pytest

from reward_kit.errors import (
    AlignmentError,
    ConfigError,
    DeadlineError,
    EnvironmentFailure,
    Failure,
    InvalidResultError,
    LimitError,
    PolicyError,
    ProviderError,
    RewardError,
    RewardKitError,
    StoreError,
    ToolError,
    boundary,
    did_you_mean,
    safe_str,
    type_name,
    user_traceback,
)


class Hostile(Exception):
    def __str__(self):
        raise KeyError("no text for you")


def failure_of(error_type, raised):
    with pytest.raises(RewardKitError) as caught, boundary(error_type, "the call"):
        raise raised
    return caught.value


def test_boundary_converts_a_foreign_error_and_keeps_its_cause():
    original = ValueError("bad")
    error = failure_of(ToolError, original)
    assert type(error) is ToolError
    assert str(error) == "the call: ValueError: bad"
    assert error.__cause__ is original


def test_reward_kit_errors_pass_a_boundary_unchanged():
    original = ProviderError("429")
    assert failure_of(PolicyError, original) is original


def test_timeout_becomes_a_deadline_error_at_any_boundary():
    error = failure_of(RewardError, TimeoutError())
    assert type(error) is DeadlineError
    assert str(error) == "the call: timed out"


def test_system_exit_of_user_code_is_converted():
    assert str(failure_of(RewardError, SystemExit(3))) == "the call: SystemExit: 3"


def test_stop_iteration_is_converted():
    assert type(failure_of(RewardError, StopIteration("end"))) is RewardError


def test_keyboard_interrupt_passes_through_a_boundary():
    with pytest.raises(KeyboardInterrupt), boundary(RewardError, "the call"):
        raise KeyboardInterrupt


async def test_cancellation_of_the_running_task_passes_through_a_boundary():
    async def work():
        with boundary(RewardError, "the call"):
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_leaking_from_foreign_code_is_an_error():
    inner = asyncio.create_task(asyncio.sleep(30))
    inner.cancel()
    expected = "the call: a task that it awaited was cancelled"
    with pytest.raises(RewardError, match=expected), boundary(RewardError, "the call"):
        await inner


def test_an_exception_without_readable_text_is_still_recorded():
    failure = Failure.from_exception(failure_of(RewardError, Hostile()))
    assert "Hostile whose __str__ raised KeyError" in failure.message


def test_long_messages_are_truncated_with_their_length():
    text = safe_str("x" * 5_000)
    assert text.startswith("x" * 2_000 + "…")
    assert text.endswith("(5000 characters)")


@pytest.mark.parametrize(
    ("error_type", "failure_class"),
    [
        (ConfigError, "refused"),
        (ProviderError, "provider_error"),
        (PolicyError, "crash"),
        (EnvironmentFailure, "crash"),
        (RewardError, "crash"),
        (InvalidResultError, "invalid_result"),
        (AlignmentError, "invalid_result"),
        (DeadlineError, "timeout"),
        (LimitError, "limit"),
        (ZeroDivisionError, "crash"),
    ],
)
def test_every_error_type_has_a_failure_class(error_type, failure_class):
    failure = Failure.from_exception(error_type("x"))
    assert (failure.failure_class, failure.where) == (failure_class, error_type.__name__)


def test_exit_code_is_2_for_config_errors_and_3_for_others():
    assert ConfigError.exit_code == 2
    assert {t.exit_code for t in (ProviderError, StoreError, RewardError)} == {3}


def run_file(path: Path, code: str) -> BaseException:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    try:
        exec(compile(code, str(path), "exec"), {})
    except (ValueError, ArithmeticError) as error:
        return error
    raise AssertionError("the code did not raise")


def test_user_traceback_begins_with_the_innermost_user_frame(tmp_path):
    mine = tmp_path / "reward.py"
    lines = user_traceback(run_file(mine, "def inner():\n    1 / 0\ndef outer():\n    inner()\nouter()\n")).splitlines()
    assert lines[0] == "ZeroDivisionError: division by zero"
    assert lines[1] == f"  {mine}:2 in inner"
    assert lines[2].strip() == "1 / 0"
    assert lines[3] == f"  {mine}:4 in outer"


def test_user_traceback_omits_library_frames(tmp_path):
    mine = tmp_path / "reward.py"
    text = user_traceback(run_file(mine, "import json\njson.loads('{')\n"))
    assert str(mine) in text
    assert "json/decoder" not in text


def test_user_traceback_of_library_frames_only_is_empty(tmp_path):
    installed = tmp_path / "site-packages" / "lib.py"
    try:
        exec(compile("1 / 0", str(installed), "exec"), {})
    except ZeroDivisionError as error:
        error.__traceback__ = error.__traceback__.tb_next
        assert user_traceback(error) == ""


def test_folder_with_the_package_name_as_prefix_counts_as_user_code(tmp_path):
    package = Path(sys.modules["reward_kit.errors"].__file__).parent
    filename = f"{package}_of_mine/reward.py"
    try:
        exec(compile("1 / 0", filename, "exec"), {})
    except ZeroDivisionError as error:
        assert filename in user_traceback(error)


def test_user_traceback_has_at_most_fifteen_lines(tmp_path):
    error = run_file(tmp_path / "deep.py", "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(50)\n")
    assert len(user_traceback(error).splitlines()) == 15


def test_error_raised_by_reward_kit_has_no_traceback():
    error = ConfigError("no such file")
    assert Failure.from_exception(error).traceback == ""


def test_failure_json_round_trip():
    failure = Failure("timeout", "DeadlineError", "too slow", "frames")
    assert failure.to_json()["class"] == "timeout"
    assert Failure.from_json(failure.to_json()) == failure


def test_failure_line_round_trip_keeps_class_and_message():
    failure = Failure("timeout", "DeadlineError", "too slow: 3 s", "frames")
    assert failure.to_line() == "timeout: too slow: 3 s"
    assert Failure.from_line(failure.to_line(), "rollout") == Failure("timeout", "rollout", "too slow: 3 s")
    assert Failure.from_line("no class: here", "rollout") == Failure("crash", "rollout", "no class: here")


def test_unknown_failure_class_is_rejected_when_read():
    with pytest.raises(StoreError, match="unknown failure class 'oops'"):
        Failure.from_json({"class": "oops", "where": "", "message": ""})


def test_did_you_mean_suggests_the_nearest_word_or_lists_all():
    assert did_you_mean("pritn", ["print", "input"]) == "; did you mean 'print'?"
    assert did_you_mean("GRPO", ["gae", "grpo"]) == "; did you mean 'grpo'?"
    assert did_you_mean("httpresource", ["HttpResource"]) == "; did you mean 'HttpResource'?"
    assert did_you_mean("zzz", ["b", "a", "b"]) == "; known: a, b"
    assert did_you_mean("zzz", []) == ""
    assert did_you_mean("zzz", map("s{:04}".format, range(9_000))).endswith("s0038, s0039, … (9,000 in all)")


def test_type_name_has_an_article_and_a_fallback():
    assert [type_name(value) for value in (1, "", type("", (), {})())] == ["an int", "a str", "a value"]
